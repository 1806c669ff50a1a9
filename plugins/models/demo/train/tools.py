"""Tool definitions, the requests that need them, their results, and what the model says about a result.

Names, parameters and descriptions vary, and many tools are invented, so that the model must read the definitions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from train import words
from train.skills import Exchange, ToolCall


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool; `type` is its JSON type."""

    name: str
    type: str
    description: str
    required: bool = True
    choices: tuple[str, ...] = ()

    def schema(self, described: bool) -> dict:
        """The parameter's JSON schema, with its description if asked for."""
        schema: dict = {"type": self.type}
        if described:
            schema["description"] = self.description
        if self.choices:
            schema["enum"] = list(self.choices)
        return schema


@dataclass(frozen=True)
class Tool:
    """One tool of a request: its definition, and how to make an exchange that uses it."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    use: Callable[[Random, bool, "Tool"], Exchange] = field(repr=False)


@dataclass(frozen=True)
class Style:
    """How an author writes tool definitions."""

    described: bool  # parameters have descriptions
    closed: bool  # "additionalProperties": false
    strict: bool  # "strict": true
    shuffled: bool  # keys in any order


def definitions(tools: list[Tool], rng: Random) -> list[dict]:
    """The tools in the OpenAI format, all in one style."""
    style = Style(rng.random() < 0.4, rng.random() < 0.1, rng.random() < 0.1, rng.random() < 0.15)
    return [definition(tool, style, rng) for tool in tools]


def definition(tool: Tool, style: Style, rng: Random) -> dict:
    """One tool in the OpenAI format."""
    schema = {
        "type": "object",
        "properties": {p.name: p.schema(style.described) for p in tool.parameters},
        "required": [p.name for p in tool.parameters if p.required],
    }
    if style.closed:
        schema["additionalProperties"] = False
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    if style.strict:
        function["strict"] = True
    if style.shuffled:
        function["parameters"] = words.shuffled_keys(schema, rng)
        function = words.shuffled_keys(function, rng)
    return {"type": "function", "function": function}


def typed(parameter: Parameter, value: object) -> object:
    """The value in the parameter's type."""
    return str(value) if parameter.type == "string" else value


def finish(rng: Random, tool: Tool, user: str, values: list, result: str, answer: str) -> Exchange:
    """An exchange with one call: `values` are the arguments in the order of the parameters, None where absent."""
    arguments = {p.name: typed(p, v) for p, v in zip(tool.parameters, values, strict=True) if v is not None}
    thought = f"I call {tool.name} with {', '.join(str(v) for v in arguments.values())}."
    return Exchange(
        "tools",
        user,
        answer,
        thought,
        calls=(ToolCall(tool.name, arguments),),
        results=(result,),
        result_thought=f"{tool.name} has answered.",
    )


def maybe_json(rng: Random, **fields: object) -> str:
    """A tool's result: a JSON object, its keys in any order."""
    return json.dumps(words.shuffled_keys(fields, rng))


WEATHER = (
    "what is the weather in {x}",
    "what's the weather in {x}",
    "whats the weather like in {x}",
    "weather in {x}",
    "how is the weather in {x}",
    "weather {x}",
    "tell me the weather in {x}",
    "get the weather for {x}",
    "check the weather in {x}",
    "is it raining in {x}",
    "how warm is it in {x}",
    "do i need an umbrella in {x}",
    "what is the temperature in {x}",
    "is it cold in {x}",
    "show me the weather for {x}",
    "forecast for {x}",
    "what is the weather like in {x}",
    "what is the weather like in {x} today",
    "what's the weather in {x} today",
    "what is the weather in {x} right now",
    "how is the weather in {x} now",
    "i want to know the weather in {x}",
    "current weather in {x}",
    "what's the temperature in {x}",
)
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy", "clear"]


def use_weather(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for the weather in a city, sometimes in a unit."""
    place = words.city(rng, held_out)
    user = rng.choice(WEATHER).format(x=place)
    unit = None
    if len(tool.parameters) > 1 and rng.random() < 0.5:
        unit = rng.choice(tool.parameters[1].choices)
        user += rng.choice([" in {u}", ", in {u}", " ({u})", " in {u} please"]).format(u=unit)
    degrees, sky = rng.randint(-15, 40), rng.choice(SKIES)
    result, answer = rng.choice(
        [
            (maybe_json(rng, temperature=degrees, condition=sky), f"It is {degrees} degrees and {sky} in {place}."),
            (
                maybe_json(rng, city=place, temperature=degrees, condition=sky),
                f"It is {degrees} degrees and {sky} in {place}.",
            ),
            (maybe_json(rng, temperature=degrees), f"It is {degrees} degrees in {place}."),
            (maybe_json(rng, temperature=degrees, unit=unit or "celsius"), f"It is {degrees} degrees in {place}."),
            (f"{degrees} degrees, {sky}", f"The answer is: {degrees} degrees, {sky}"),
            (f"{sky}, {degrees}C", f"The answer is: {sky}, {degrees}C"),
        ]
    )
    values = [place, unit] if len(tool.parameters) > 1 else [place]
    return finish(rng, tool, words.politely(user, rng), values, result, answer)


def weather_tool(rng: Random) -> Tool:
    """A weather tool, with or without a unit."""
    name = rng.choice(["get_weather"] * 4 + ["get_current_weather", "weather", "fetch_weather", "getWeather"])
    place = Parameter(
        rng.choice(["city", "city", "location", "location", "place", "town"]),
        "string",
        rng.choice(
            [
                "The city",
                "The city name",
                "City and country",
                "The place",
                "The city to look up",
                "The city and state, e.g. San Francisco, CA",
                "City name, e.g. Paris",
            ]
        ),
    )
    units = rng.choice([("celsius", "fahrenheit"), ("celsius", "fahrenheit"), ("fahrenheit", "celsius")])
    unit = Parameter(rng.choice(["unit", "unit", "units"]), "string", "The temperature unit", False, units)
    description = rng.choice(
        [
            "Get the weather",
            "Get the weather in a city",
            "Get the current weather in a city",
            "Current weather",
            "Weather of a place",
            "Get the current weather in a given location",
            "Look up the weather",
        ]
    )
    return Tool(name, description, (place, unit) if rng.random() < 0.5 else (place,), use_weather)


TIMES = (
    "what time is it in {x}",
    "what is the time in {x}",
    "time in {x}",
    "tell me the time in {x}",
    "current time in {x}",
    "what's the time in {x}",
    "how late is it in {x}",
    "get the time for {x}",
)


def use_time(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for the time in a city."""
    place, time = words.city(rng, held_out), words.clock_time(rng, held_out)
    result, answer = rng.choice(
        [
            (maybe_json(rng, time=time), f"It is {time} in {place}."),
            (maybe_json(rng, city=place, time=time), f"It is {time} in {place}."),
            (time, f"The answer is: {time}"),
        ]
    )
    return finish(rng, tool, words.politely(rng.choice(TIMES).format(x=place), rng), [place], result, answer)


def time_tool(rng: Random) -> Tool:
    """A clock for places."""
    name = rng.choice(["get_time", "get_time", "get_current_time", "time_in", "clock"])
    place = Parameter(rng.choice(["city", "location", "timezone", "place"]), "string", "The place")
    description = rng.choice(["Get the time in a city", "Get the current time", "Current time of a place"])
    return Tool(name, description, (place,), use_time)


SIGNS = {"+": ("plus", "+"), "-": ("minus", "-"), "*": ("times", "*", "x"), "/": ("divided by", "/")}


def use_calculator(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for the value of an expression."""
    a, b, sign = words.number(rng, held_out, 5000), words.number(rng, held_out, 5000), rng.choice(list(SIGNS))
    question = rng.choice(["what is {e}", "calculate {e}", "compute {e}", "how much is {e}", "{e}", "what's {e}"])
    user = words.politely(question.format(e=f"{a} {rng.choice(SIGNS[sign])} {b}"), rng)
    value = rng.randint(1, 99999)
    result, answer = rng.choice(
        [(str(value), f"The answer is: {value}"), (maybe_json(rng, result=value), f"The result is {value}.")]
    )
    return finish(rng, tool, user, [f"{a} {sign} {b}"], result, answer)


def calculator_tool(rng: Random) -> Tool:
    """A calculator for expressions."""
    name = rng.choice(["calculator", "calculate", "compute", "evaluate"])
    expression = Parameter(rng.choice(["expression", "expression", "formula", "input"]), "string", "The expression")
    return Tool(
        name, rng.choice(["Calculate", "Evaluate an expression", "A calculator"]), (expression,), use_calculator
    )


VERBS = {
    "add": ("Add two numbers", "+", ("add {a} and {b}", "what is {a} + {b}", "{a} plus {b}", "what is {a} plus {b}")),
    "multiply": ("Multiply two numbers", "*", ("multiply {a} by {b}", "what is {a} * {b}", "{a} times {b}")),
    "subtract": ("Subtract two numbers", "-", ("what is {a} - {b}", "{a} minus {b}", "compute {a} - {b}")),
    "divide": ("Divide two numbers", "/", ("divide {a} by {b}", "what is {a} / {b}", "{a} divided by {b}")),
}


def use_operation(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for one operation on two numbers."""
    verb = next(v for v in VERBS if VERBS[v][0] == tool.description)
    a, b = words.number(rng, held_out, 5000), words.number(rng, held_out, 5000)
    user = words.politely(rng.choice(VERBS[verb][2]).format(a=a, b=b), rng)
    value = rng.randint(1, 99999)
    result, answer = rng.choice(
        [(str(value), f"The answer is: {value}"), (maybe_json(rng, result=value), f"The result is {value}.")]
    )
    return finish(rng, tool, user, [a, b], result, answer)


def operation_tool(rng: Random) -> Tool:
    """One arithmetic operation with two numeric parameters."""
    verb = rng.choice(list(VERBS))
    name = rng.choice([verb, verb, f"{verb}_numbers", words.made_up_word(rng)])
    type_ = rng.choice(["number", "integer"])
    first, second = rng.choice([("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")])
    parameters = (Parameter(first, type_, "First number"), Parameter(second, type_, "Second number"))
    return Tool(name, VERBS[verb][0], parameters, use_operation)


SEARCHES = (
    "search for {x}",
    "search the web for {x}",
    "look up {x}",
    "find {x}",
    "google {x}",
    "find information about {x}",
    "search {x}",
    "look for {x} on the web",
)


def use_search(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask to search for a phrase."""
    query, found = words.phrase(rng, held_out), words.phrase(rng, held_out)
    result, answer = rng.choice(
        [(found, f"The answer is: {found}"), (maybe_json(rng, title=found), f"The title is {found}.")]
    )
    return finish(rng, tool, rng.choice(SEARCHES).format(x=query), [query], result, answer)


def search_tool(rng: Random) -> Tool:
    """A web search."""
    name = rng.choice(["search", "search", "web_search", "search_web", "find"])
    query = Parameter(rng.choice(["query", "query", "q", "text", "keywords"]), "string", "The search query")
    return Tool(name, rng.choice(["Search the web", "Search for something", "Web search"]), (query,), use_search)


def use_email(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask to send an email about something."""
    to, subject = words.email(rng, held_out), words.phrase(rng, held_out, 3)
    user = rng.choice(
        [
            "send an email to {t} about {s}",
            "email {t} about {s}",
            "write an email to {t} with the subject {s}",
            "send {t} an email with subject {s}",
            "mail {t} about {s}",
        ]
    ).format(t=to, s=subject)
    result = rng.choice([maybe_json(rng, status="sent"), "sent", "ok", maybe_json(rng, status="ok")])
    return finish(rng, tool, words.politely(user, rng), [to, subject], result, f"I sent the email to {to}.")


def email_tool(rng: Random) -> Tool:
    """An email sender."""
    to = Parameter(rng.choice(["to", "to", "recipient", "address"]), "string", "The address")
    subject = Parameter(rng.choice(["subject", "subject", "title", "topic"]), "string", "The subject")
    name = rng.choice(["send_email", "send_email", "email", "send_mail"])
    return Tool(name, rng.choice(["Send an email", "Send a mail", "Email someone"]), (to, subject), use_email)


def use_timer(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for a timer."""
    minutes = words.number(rng, held_out, 500)
    user = rng.choice(
        [
            "set a timer for {m} minutes",
            "timer for {m} minutes",
            "start a timer of {m} minutes",
            "remind me in {m} minutes",
            "{m} minute timer",
            "wake me in {m} minutes",
        ]
    )
    result = rng.choice(["ok", "done", maybe_json(rng, status="ok"), maybe_json(rng, status="started")])
    user = words.politely(user.format(m=minutes), rng)
    return finish(rng, tool, user, [minutes], result, f"The timer is set for {minutes} minutes.")


def timer_tool(rng: Random) -> Tool:
    """A timer."""
    minutes = Parameter(
        rng.choice(["minutes", "minutes", "duration", "time"]), rng.choice(["integer", "number"]), "Minutes"
    )
    name = rng.choice(["set_timer", "set_timer", "timer", "start_timer"])
    return Tool(name, rng.choice(["Set a timer", "Start a timer in minutes", "A timer"]), (minutes,), use_timer)


def use_currency(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask to convert an amount of money."""
    amount, value = words.number(rng, held_out, 5000), rng.randint(1, 9999)
    source, target = rng.sample(words.CURRENCIES, 2)
    user = rng.choice(
        [
            "convert {a} {s} to {t}",
            "how much is {a} {s} in {t}",
            "what is {a} {s} in {t}",
            "change {a} {s} into {t}",
            "{a} {s} in {t}",
            "{a} {s} to {t}",
        ]
    )
    user = words.politely(user.format(a=amount, s=source, t=target), rng)
    result, answer = rng.choice(
        [
            (str(value), f"The answer is: {value}"),
            (maybe_json(rng, result=value), f"The result is {value}."),
            (maybe_json(rng, amount=value, currency=target), f"The amount is {value} {target}."),
        ]
    )
    return finish(rng, tool, user, [amount, source, target], result, answer)


def currency_tool(rng: Random) -> Tool:
    """A currency converter."""
    source, target = rng.choice(
        [("from", "to"), ("from", "to"), ("source", "target"), ("from_currency", "to_currency")]
    )
    parameters = (
        Parameter(rng.choice(["amount", "amount", "value"]), rng.choice(["number", "number", "integer"]), "The amount"),
        Parameter(source, "string", "Currency to convert from"),
        Parameter(target, "string", "Currency to convert to"),
    )
    name = rng.choice(["convert_currency", "convert_currency", "currency", "exchange", "convert"])
    return Tool(
        name, rng.choice(["Convert currency", "Convert an amount of money", "Convert money"]), parameters, use_currency
    )


def use_invented(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """Ask for an invented tool by its name and the names of its parameters."""
    values = [
        words.number(rng, held_out)
        if p.type == "integer"
        else rng.choice([words.city, words.name, words.phrase])(rng, held_out)
        for p in tool.parameters
    ]
    pairs = [
        rng.choice(["{n} {v}", "{n} {v}", "{n} = {v}"]).format(n=p.name, v=v)
        for p, v in zip(tool.parameters, values, strict=True)
    ]
    user = rng.choice(
        ["use {tool} with {args}", "call {tool} with {args}", "{tool} with {args}", "run {tool} for {args}"]
    )
    user = user.format(tool=tool.name, args=rng.choice([", ", " and "]).join(pairs))
    user = user[:1].upper() + user[1:] if not user.startswith(tool.name) and rng.random() < 0.5 else user
    key, value = rng.choice([rng.choice(words.NOUNS), words.made_up_word(rng)]), words.phrase(rng, held_out, 2)
    if rng.random() < 0.5:
        value = words.number(rng, held_out)
    result, answer = rng.choice(
        [(str(value), f"The answer is: {value}"), (maybe_json(rng, **{key: value}), f"The {key} is {value}.")]
    )
    return finish(rng, tool, user, values, result, answer)


def invented_tool(rng: Random) -> Tool:
    """A tool with an invented name and one to three parameters."""

    def label() -> str:
        return rng.choice([rng.choice(words.NOUNS), words.made_up_word(rng, 1, 2)])

    name = rng.choice([f"{label()}_{label()}", f"{label()}_{label()}", label(), f"get_{label()}"])
    labels = list(dict.fromkeys(label() for _ in range(rng.randint(1, 3))))
    parameters = tuple(
        Parameter(n, rng.choice(["string", "string", "integer"]), f"The {rng.choice([n, label()])}") for n in labels
    )
    description = rng.choice(
        [f"Get the {label()}", f"Find a {label()}", f"Make a {label()}", f"The {label()} {label()}"]
    )
    return Tool(name, description, parameters, use_invented)


MAKERS: tuple[tuple[Callable[[Random], Tool], int], ...] = (
    (weather_tool, 5),
    (time_tool, 2),
    (calculator_tool, 2),
    (operation_tool, 2),
    (search_tool, 2),
    (email_tool, 2),
    (timer_tool, 2),
    (currency_tool, 2),
    (invented_tool, 5),
)
ARITHMETIC_USES = (use_calculator, use_operation)
NO_TOOL_ANSWER = "I have no tool for that."
NO_TOOL_THOUGHT = "I have no tool for that, so I say so."


def rename(tool: Tool, rng: Random) -> Tool:
    """Sometimes give a known tool an invented name: its description must then be enough to choose it."""
    if rng.random() > 0.15:
        return tool
    return Tool(words.made_up_word(rng), tool.description, tool.parameters, tool.use)


def toolbox(rng: Random) -> list[Tool]:
    """The tools of one request, no two of them for the same purpose."""
    makers, weights = zip(*MAKERS, strict=True)
    chosen: list[Tool] = []
    for maker in rng.choices(makers, weights, k=rng.choice([1, 1, 1, 2, 2, 3, 4])):
        tool = rename(maker(rng), rng)
        clashes = any(tool.name == other.name or same_purpose(tool, other) for other in chosen)
        if not clashes:
            chosen.append(tool)
    return chosen


def same_purpose(tool: Tool, other: Tool) -> bool:
    """Whether a request could mean either tool. Any two invented tools are told apart by their names."""
    if tool.use in ARITHMETIC_USES and other.use in ARITHMETIC_USES:
        return True
    return tool.use is other.use and tool.use is not use_invented


def without_tool(rng: Random, held_out: bool, present: list[Tool]) -> Exchange:
    """A request whose tool is absent, which the model says."""
    makers = [maker for maker, _ in MAKERS if maker not in (calculator_tool, operation_tool, invented_tool)]
    while True:
        tool = rng.choice(makers)(rng)
        if not any(same_purpose(tool, other) for other in present):
            exchange = tool.use(rng, held_out, tool)
            return Exchange("no_tool", exchange.user, NO_TOOL_ANSWER, NO_TOOL_THOUGHT)


def parallel(rng: Random, held_out: bool, tool: Tool) -> Exchange:
    """One request about two places: two calls in one reply."""
    first, second = words.city(rng, held_out), words.city(rng, held_out)
    what = "weather" if tool.use is use_weather else "time"
    user = rng.choice(["what is the {w} in {a} and {b}", "{w} in {a} and in {b}", "what's the {w} in {a} and {b}"])
    user = words.politely(user.format(w=what, a=first, b=second), rng)
    calls = tuple(ToolCall(tool.name, {tool.parameters[0].name: place}) for place in (first, second))
    if what == "weather":
        values = [rng.randint(-15, 40) for _ in range(2)]
        results = tuple(maybe_json(rng, temperature=value) for value in values)
        sentences = [f"It is {v} degrees in {p}." for v, p in zip(values, (first, second), strict=True)]
    else:
        values = [words.clock_time(rng, held_out) for _ in range(2)]
        results = tuple(maybe_json(rng, time=value) for value in values)
        sentences = [f"It is {v} in {p}." for v, p in zip(values, (first, second), strict=True)]
    thought = f"I call {tool.name} with {first}, then with {second}."
    return Exchange(
        "tools",
        user,
        " ".join(sentences),
        thought,
        calls=calls,
        results=results,
        result_thought=f"{tool.name} has answered.",
    )


def tool_exchange(rng: Random, held_out: bool, present: list[Tool]) -> Exchange:
    """A request for one of the tools at hand."""
    tool = rng.choice(present)
    if tool.use in (use_weather, use_time) and rng.random() < 0.15:
        return parallel(rng, held_out, tool)
    return tool.use(rng, held_out, tool)
