"""The skills that need no tools: each function invents one question with its answer and a chain of thought."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from train import words
from train.facts import INTENTS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS


@dataclass(frozen=True)
class ToolCall:
    """One call that the model should make."""

    name: str
    arguments: dict


@dataclass(frozen=True)
class Exchange:
    """One user turn and the reply to it; with tools, the calls and their results come in between."""

    skill: str
    user: str
    answer: str  # what the model says last
    thought: str  # what it writes before answering (or calling) when thinking is on
    accepted: tuple[str, ...] = ()  # every answer that counts as right, if more than `answer`
    calls: tuple[ToolCall, ...] = ()
    results: tuple[str, ...] = ()  # one per call: what the tool returns
    result_thought: str = ""  # what it writes before `answer` once the results are in


SUMS = (
    "what is {a} + {b}",
    "{a}+{b}",
    "{a} + {b}",
    "{a}+{b}=",
    "{a} + {b} =",
    "add {a} and {b}",
    "add {b} to {a}",
    "compute {a} + {b}",
    "calculate {a} plus {b}",
    "{a} plus {b}",
    "what is {a} plus {b}",
    "what's {a} + {b}",
    "what's {a} plus {b}",
    "whats {a}+{b}",
    "what is {a}+{b}",
    "calculate {a} + {b}",
    "{a}+{b}=?",
    "{a} + {b} = ?",
    "how much is {a} + {b}",
    "how much is {a} and {b}",
    "what is the sum of {a} and {b}",
    "sum of {a} and {b}",
    "sum {a} and {b}",
    "tell me {a} + {b}",
    "i have {a} apples and get {b} more. how many do i have",
    "compute {a} plus {b}",
)
DIFFERENCES = (
    "what is {a} - {b}",
    "{a}-{b}",
    "{a} - {b}",
    "{a}-{b}=",
    "{a} - {b} =",
    "subtract {b} from {a}",
    "take {b} away from {a}",
    "compute {a} - {b}",
    "calculate {a} minus {b}",
    "{a} minus {b}",
    "what is {a} minus {b}",
    "what's {a} - {b}",
    "what's {a} minus {b}",
    "whats {a}-{b}",
    "what is {a}-{b}",
    "calculate {a} - {b}",
    "{a}-{b}=?",
    "{a} - {b} = ?",
    "how much is {a} - {b}",
    "what is the difference of {a} and {b}",
    "difference of {a} and {b}",
    "tell me {a} - {b}",
    "compute {a} minus {b}",
    "i have {a} apples and give away {b}. how many do i have",
)


def add_by_column(a: int, b: int) -> str:
    """The written steps of a + b, ones before tens."""
    ones = a % 10 + b % 10
    carry = ones // 10
    step = f"{a % 10} + {b % 10} = {ones}"
    step += ", write " + str(ones % 10) + ", carry 1." if carry else "."
    tens = a // 10 + b // 10 + carry
    return f"{step}\n{a // 10} + {b // 10} + {carry} = {tens}.\nSo {a + b}."


def subtract_by_column(a: int, b: int) -> str:
    """The written steps of a - b, ones before tens; a negative result is found the other way round."""
    if a < b:
        return f"{a} is less than {b}, so {b} - {a}.\n{subtract_by_column(b, a)}\nThe sign is minus: {a - b}."
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow - b % 10
    step = f"{a % 10 + 10 * borrow} - {b % 10} = {ones}" + (", borrow 1." if borrow else ".")
    return f"{step}\n{a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}.\nSo {a - b}."


def arithmetic(rng: Random, held_out: bool) -> Exchange:
    """A sum or a difference of two numbers below 100."""
    sign = rng.choice("+-")

    def pair() -> tuple[int, int]:
        a, b = rng.randrange(100), rng.randrange(100)
        return (max(a, b), min(a, b)) if sign == "-" and rng.random() < 0.6 else (a, b)

    a, b = words.draw(pair, held_out, key=lambda p: f"{p[0]} {sign} {p[1]}")
    pattern = rng.choice(SUMS if sign == "+" else DIFFERENCES)
    user = pattern.format(a=a, b=b)
    if "=" not in user:
        user = words.casual(words.politely(user, rng), rng, held_out)
    result = a + b if sign == "+" else a - b
    thought = add_by_column(a, b) if sign == "+" else subtract_by_column(a, b)
    return Exchange("arithmetic", user, f"{a} {sign} {b} = {result}", thought)


LIST_REQUESTS = {
    "copy": (
        "repeat {x}",
        "copy {x}",
        "repeat this list: {x}",
        "copy this list: {x}",
        "say {x}",
        "echo {x}",
        "repeat after me: {x}",
        "write {x}",
        "copy: {x}",
        "repeat: {x}",
    ),
    "reverse": (
        "reverse {x}",
        "reverse this list: {x}",
        "reverse the list {x}",
        "reverse these {k}: {x}",
        "write {x} backwards",
        "reverse: {x}",
        "reverse the order of {x}",
        "list in reverse order: {x}",
    ),
    "ascending": (
        "sort {x}",
        "sort this list: {x}",
        "sort these {k}: {x}",
        "sort the {k} {x}",
        "sort {x} in ascending order",
        "sort: {x}",
        "sort {x} ascending",
        "sort in ascending order: {x}",
        "put in order: {x}",
        "order {x}",
        "sort these: {x}",
        "sort ascending: {x}",
    ),
    "descending": (
        "sort {x} descending",
        "sort these {k} descending: {x}",
        "sort {x} in descending order",
        "sort in descending order: {x}",
        "sort descending: {x}",
        "sort from high to low: {x}",
        "sort in reverse order: {x}",
        "sort these descending: {x}",
    ),
}
LIST_THOUGHTS = {
    "copy": "I repeat the {n} items as they are.",
    "reverse": "I write the {n} items from the last to the first.",
    "ascending": "I sort the {n} items, the smallest first.",
    "descending": "I sort the {n} items, the largest first.",
}


def list_items(rng: Random) -> list:
    """Three to six different numbers, or different words."""
    size = rng.randint(3, 6)
    if rng.random() < 0.5:
        return rng.sample(range(100), size)
    return rng.sample(words.NOUNS, size)


def lists(rng: Random, held_out: bool) -> Exchange:
    """Copy, reverse or sort a short list."""
    task = rng.choice(list(LIST_REQUESTS))
    items = words.draw(lambda: list_items(rng), held_out)
    if task == "copy":
        ordered = items
    elif task == "reverse":
        ordered = items[::-1]
    else:
        ordered = sorted(items, reverse=task == "descending")
    before, between, after = rng.choice([("", ", ", ""), ("", ", ", ""), ("", " ", ""), ("[", ", ", "]")])

    def written(values: list, between: str = ", ") -> str:
        return before + between.join(map(str, values)) + after

    kind = rng.choice(["numbers", "numbers", "integers"] if isinstance(items[0], int) else ["words", "words", "names"])
    user = rng.choice(LIST_REQUESTS[task]).format(x=written(items, between), k=kind)
    user = user[:1].upper() + user[1:] if rng.random() < 0.5 else user
    user += rng.choice(["", "", ".", "?"]) if not after else ""
    answer = written(ordered, between if task == "copy" else ", ")
    return Exchange("lists", user, answer, LIST_THOUGHTS[task].format(n=len(items)))


def echo(rng: Random, held_out: bool) -> Exchange:
    """Repeat an arbitrary phrase: teaches copying of words never seen."""
    text = words.accented(rng, held_out) if rng.random() < 0.2 else words.phrase(rng, held_out, max_words=8)
    return Exchange("echo", rng.choice(LIST_REQUESTS["copy"]).format(x=text), text, "I repeat the words as they are.")


def counting(rng: Random, held_out: bool) -> Exchange:
    """Count from one number to another."""
    first, last = words.draw(lambda: (a := rng.randrange(60), a + rng.randint(2, 25)), held_out)
    user = rng.choice(["count from {a} to {b}", "count {a} to {b}", "list the numbers from {a} to {b}"])
    user = words.politely(user.format(a=first, b=last), rng)
    answer = ", ".join(map(str, range(first, last + 1)))
    return Exchange("counting", user, answer, f"I start at {first} and stop at {last}.")


# JSON: for each key, how a sentence states it (%n is the person, %v the value) and how values are made.
JSON_FIELDS: dict[str, tuple[tuple[str, ...], Callable[[Random, bool], object]]] = {
    "age": (("%n is %v years old", "the age of %n is %v", "%n is %v"), lambda r, h: words.number(r, h, 100)),
    "city": (("%n lives in %v", "%n comes from %v", "%n is from %v", "the city is %v"), words.city),
    "job": (("%n works as a %v", "%n is a %v"), lambda r, h: r.choice(words.JOBS)),
    "color": (("%n likes %v", "the color is %v", "%n loves the color %v"), lambda r, h: r.choice(words.COLORS)),
    "email": (("the email is %v", "the email of %n is %v", "%n uses the email %v"), words.email),
    "friend": (("%n is a friend of %v", "the friend is %v"), words.name),
    "pet": (("%n has a %v", "the pet is a %v"), lambda r, h: r.choice(words.NOUNS)),
    "score": (("%n has a score of %v", "the score is %v"), words.number),
    "country": (("the country is %v", "%n was born in %v"), words.city),
}
JSON_REQUESTS = (
    "give me JSON with keys {keys} for: {text}",
    "give me JSON with the keys {keys}: {text}",
    "write JSON with {keys} for: {text}",
    "return a JSON object with keys {keys}. {text}",
    "as JSON with keys {keys}: {text}",
    "extract {keys} as JSON: {text}",
    "make JSON with {keys} from this: {text}",
    "{text} give me JSON with keys {keys}.",
    "{text} answer in JSON with the keys {keys}.",
)


def joined(items: list[str], rng: Random) -> str:
    """A list in words: `a, b and c`, or just commas, sometimes in quotes."""
    quote = rng.choice(["", "", "", '"'])
    items = [f"{quote}{item}{quote}" for item in items]
    if len(items) == 1 or rng.random() < 0.25:
        return ", ".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def stated_facts(rng: Random, held_out: bool) -> tuple[dict, list[str]]:
    """Facts about a person or about invented keys, and the clauses that state them."""
    if rng.random() < 0.35:
        keys = [rng.choice([rng.choice(words.NOUNS), words.made_up_word(rng, 1, 2)]) for _ in range(rng.randint(2, 4))]
        facts = {key: rng.choice([words.number, words.name, words.phrase, words.city])(rng, held_out) for key in keys}
        separator = rng.choice([" is ", ": ", " = "])
        article = rng.choice(["the ", ""]) if separator == " is " else ""
        return facts, [f"{article}{key}{separator}{value}" for key, value in facts.items()]
    person = words.name(rng, held_out)
    facts, clauses = {"name": person}, []
    for index, key in enumerate(rng.sample(list(JSON_FIELDS), rng.randint(1, 3))):
        patterns, make = JSON_FIELDS[key]
        facts[key] = make(rng, held_out)
        subject = [p for p in patterns if "%n" in p] if index == 0 else patterns
        clauses.append(rng.choice(subject).replace("%n", person).replace("%v", str(facts[key])))
    return facts, clauses


def as_json(rng: Random, held_out: bool) -> Exchange:
    """Answer with a JSON object that has exactly the asked keys."""
    facts, clauses = stated_facts(rng, held_out)
    keys = list(facts)
    if len(keys) > 1 and rng.random() < 0.3:
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    text = rng.choice([". ", ", ", " and "]).join(clauses) + "."
    user = rng.choice(JSON_REQUESTS).format(keys=joined(keys, rng), text=text)
    user = user[:1].upper() + user[1:] if rng.random() < 0.6 else user
    answer = json.dumps({key: facts[key] for key in keys})
    return Exchange("json", user, answer, f"The keys are {', '.join(keys)}.")


def smalltalk(rng: Random, held_out: bool) -> Exchange:
    """A greeting or a question about lmkit."""

    def make() -> tuple:
        intent = rng.choice(INTENTS)
        questions = intent.questions if held_out else intent.questions + intent.more
        return intent, words.expand(rng.choice(questions), rng)

    intent, question = words.draw(make, held_out, key=lambda pair: pair[1])
    user = words.casual(question, rng, held_out)
    return Exchange("lmkit", user, rng.choice(intent.answers), intent.about, accepted=intent.answers)


def unknown(rng: Random, held_out: bool) -> Exchange:
    """A question that the model cannot answer, which it says."""
    subject = rng.choice([words.phrase, words.name, words.city])(rng, held_out)
    question = words.expand(rng.choice(UNKNOWN_QUESTIONS), rng) % subject
    user = words.casual(" ".join(question.split()), rng, held_out)
    return Exchange("unknown", user, UNKNOWN_ANSWER, "I do not know this.")


PLAIN_SKILLS: dict[str, Callable[[Random, bool], Exchange]] = {
    "arithmetic": arithmetic,
    "lists": lists,
    "echo": echo,
    "counting": counting,
    "json": as_json,
    "lmkit": smalltalk,
    "unknown": unknown,
}
