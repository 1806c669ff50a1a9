"""`lmkit verify`: whether templates, parsers, tokenizer and grammars of a model fit together. No weights are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from lmkit.api import DeclaredFormat, Grammar, LmkitError, ToolChoice, ToolDef, load_target
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced

if TYPE_CHECKING:
    from lmkit.api import ResolvedPlan, StructuredOutput, Vocabulary
    from lmkit.plugins.host import PluginHost
    from lmkit.text.side import TextSide

Status = Literal["ok", "warning", "failed", "absent"]
STYLE = {"ok": "green", "warning": "yellow", "failed": "red", "absent": "dim"}
TEXTS = (
    "Hello, world!",
    "  two  blanks\n\n\ttab",
    "Gr\u00fc\u00dfe \u4f60\u597d \U0001f600 e\u0301",
    '{"a": [1, 2], "b": 1234567890}',
)
ARGUMENTS = {"city": "Par\u00eds", "days": 3}
TOOL = ToolDef("get_weather", "Weather of a city", {
    "type": "object", "required": ["city"],
    "properties": {  # some templates cannot do without descriptions
        "city": {"type": "string", "description": "Name"}, "days": {"type": "integer", "description": "Number of days"},
    },
})  # fmt: skip
MARKER = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")  # looks like a token
GRAMMAR_SECONDS = 60.0


@dataclass(frozen=True)
class Check:
    part: str
    name: str
    status: Status
    detail: str = ""


@with_config
def command(
    settings: Sourced, as_json: Annotated[bool, typer.Option("--json", help="the checks as data")] = False
) -> int:
    """Check that a model's template, parsers, tokenizer and grammars fit together. Exit code 1 when a check fails."""
    from lmkit.plugins.resolve import resolve
    from lmkit.text.side import TextSide

    host = plugin_host(settings)
    plan, checkpoint, info = resolve(settings.config, host)
    text = TextSide.open(checkpoint, plan, settings.config)
    eos = tuple(plan.value("eos_token_ids", info.eos_token_ids))
    checks = [
        *_template(text),
        *_parsers(text),
        *_shown(text, plan, host),
        *_tokenizer(text, eos),
        *_grammars(text, plan, eos, info.vocab_size),
    ]
    if as_json:
        print(json.dumps([asdict(c) for c in checks], indent=2))
    else:
        _print(checks)
    return int(any(c.status == "failed" for c in checks))


command.examples = """[bold]Examples[/]

lmkit verify demo

lmkit verify ./my-model --tool-parser hermes --json
"""


def _print(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("part", "check", "", "detail"):
        table.add_column(name, overflow="fold")
    for c in checks:
        table.add_row(c.part, c.name, Line(c.status, style=STYLE[c.status]), Line(c.detail))
    console = Console(highlight=False)
    console.print(table)
    counts = {s: sum(c.status == s for c in checks) for s in STYLE}
    console.print(", ".join(f"{n} {s}" for s, n in counts.items() if n))


def _run(part: str, name: str, check: Callable[[], str | None]) -> Check:
    """`check` returns a detail, or raises: AssertionError and typed errors are failures."""
    try:
        return Check(part, name, "ok", check() or "")
    except (AssertionError, LmkitError) as e:
        return Check(part, name, "failed", str(e))


# ---------------------------------------------------------------------------------------------------- template


def _template(text: TextSide) -> Iterator[Check]:
    if text.renderer is None:
        yield Check("template", "chat", "absent", "the checkpoint has no chat template")
        return
    for name, finding in text.renderer.findings.items():
        good = not finding.startswith("no: ")
        bad: Status = "failed" if name == "user" else "warning"
        yield Check("template", name, "ok" if good else bad, "" if finding == "yes" else finding)
    yield _run("template", "control tokens", lambda: _control_tokens(text))


def _control_tokens(text: TextSide) -> str:
    """A message that spells control tokens has as many of them as one that does not."""
    assert text.renderer is not None
    names = sorted(text.renderer.control_tokens)[:100]
    control = {text.tokenizer.id_of(name) for name in text.renderer.control_tokens}

    def count(parts: list[str]) -> int:
        content = [{"type": "text", "text": part} for part in parts]
        ids = text.encode_prompt(text.render_chat([{"role": "user", "content": content}]), add_special=False)
        return sum(i in control for i in ids)

    spelt = ["x", *names, *(half for name in names for half in (name[:2], name[2:])), "x"]
    assert count(spelt) == count(["x", "x"]), "texts of clients can make control tokens"
    return f"{len(control)} in the vocabulary"


# ----------------------------------------------------------------------------------------------------- parsers


def _parsers(text: TextSide) -> Iterator[Check]:
    if text.tool_format is None:
        yield Check("tools", "parser", "absent", "no tool parser is chosen")
    elif text.renderer is not None and text.renderer.findings["tool calls"] != "yes":
        yield Check("tools", "history is read back", "warning", "the template does not show calls")
    elif text.renderer is not None and text.renderer.takes_tools:
        yield _run("tools", "history is read back", lambda: _tool_history(text))
    reasoning = text.reasoning_format
    thought = reasoning.thought if isinstance(reasoning, DeclaredFormat) else ("", "")
    if any(thought):
        yield _run("reasoning", "markers are read back", lambda: _reasoning(text, thought))
        if isinstance(text.tool_format, DeclaredFormat) and not text.tool_format.whole:
            yield _run("reasoning", "calls that are only mentioned", lambda: _mentioned(text, thought))
    else:
        yield Check("reasoning", "parser", "absent", "no reasoning parser is chosen")


def _shown(text: TextSide, plan: ResolvedPlan, host: PluginHost) -> Iterator[Check]:
    """Whether the chosen parsers read what the template shows, and which others would."""
    from lmkit.text.formats import load_format
    from lmkit.text.readback import Readback

    back = Readback(text.renderer)
    for part, kind, what in (("tools", "tool_parser", "calls"), ("reasoning", "reasoning_parser", "reasoning")):
        choice = plan.choice(kind)
        load = partial(load_format, host, kind)
        readers = back.readers(kind, choice.name if choice else None, host.names(kind), load)
        if readers is None:
            continue
        # formats that many families share come first
        others = ", ".join(sorted(readers, key=lambda n: host.load(kind, n).tier)[:5])
        name = f"{what} of the template"
        if choice is None:
            yield Check(part, name, "warning", f"the template shows {what}, and no parser is chosen: {others} read it")
        elif choice.name not in readers:
            yield Check(part, name, "failed", f"{choice.name} does not read what the template shows; {others} do")
        else:
            yield Check(part, name, "ok", f"read by {choice.name}")


def _mentioned(text: TextSide, thought: tuple[str, str]) -> str:
    """A call that the model thinks of is part of its thought."""
    before, after = thought
    fmt = text.tool_format
    assert isinstance(fmt, DeclaredFormat)
    marker, call = min(fmt.openers, default=""), fmt.write([(TOOL.name, ARGUMENTS)], [TOOL])
    thinks = f"I might call {marker} later.\nAs in {call} it is"
    name, _, reasoning, content = _parse(text, f"{before}{thinks}\n{after}Good day")
    assert not name, "a call that was only thought of became a call"
    assert reasoning.strip() == thinks, f"the reasoning became {reasoning!r}"
    assert content.strip() == "Good day", f"the content became {content!r}"
    return marker


def _tool_history(text: TextSide) -> str:
    """A call of an earlier turn, as the template writes it, is a call to the parser."""
    from lmkit.prompts import shown
    from lmkit.text.readback import goes_on

    function = {"name": TOOL.name, "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
    calls = [{"id": "123456789", "type": "function", "function": function}]
    user, call = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": calls}
    definition = {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    tool = {"type": "function", "function": definition}
    before = shown(text.render_chat([user], [tool]))
    after = shown(text.render_chat([user, call], [tool], add_generation_prompt=False))
    written = after[goes_on(after, before) :]
    for token in text.tokenizer.eos_token_ids:
        written = written.split(text.tokenizer.piece(token).decode(errors="replace"))[0]
    name, arguments, _, _ = _parse(text, written)
    assert name == TOOL.name, f"no call was found in {written[:200]!r}"
    assert json.loads(arguments) == ARGUMENTS, f"arguments became {arguments[:200]}"
    return f"{len(written)} characters"


def _reasoning(text: TextSide, thought: tuple[str, str]) -> str:
    before, after = thought
    _, _, reasoning, content = _parse(text, f"{before}\nhm\n{after}\n\nGood day")
    assert reasoning.strip() == "hm", f"the reasoning became {reasoning!r}"
    assert content.strip() == "Good day", f"the content became {content!r}"
    return f"{before} ... {after}"


def _parse(text: TextSide, written: str) -> tuple[str, str, str, str]:
    """Name and arguments of the first call, reasoning, content."""
    from lmkit.text.formats import Chain, in_order, start_parser
    from lmkit_python.front.message import Message

    formats = in_order(text.reasoning_format, text.tool_format)
    parser = Chain(*(start_parser(f, "", [TOOL]) for f in formats))
    message = Message()
    message.feed(parser.feed(written) + parser.flush())
    call = next((call for call in message.calls if call.complete), None)
    return call.name if call else "", call.arguments if call else "", message.reasoning, message.content


# --------------------------------------------------------------------------------------------------- tokenizer


def _tokenizer(text: TextSide, eos: tuple[int, ...]) -> Iterator[Check]:
    yield _run("tokenizer", "round trip", lambda: _round_trip(text))
    yield _run("tokenizer", "end tokens", lambda: _ends(text, eos))
    if text.renderer is not None:
        yield _end_of_turn(text, eos)


def _round_trip(text: TextSide) -> str:
    """Streamed text is the decoded text, and for these texts the text itself."""
    lossy = 0
    for sample in TEXTS:
        ids = text.encode_prompt(sample, add_special=False)
        detokenizer = text.tokenizer.detokenizer()
        streamed = "".join(detokenizer.feed(i) for i in ids) + detokenizer.flush()
        whole = text.tokenizer.decode(ids)
        assert streamed == whole, f"streamed {streamed!r}, decoded {whole!r}"
        lossy += streamed.strip() != sample.strip()
    return f"{lossy} of {len(TEXTS)} texts are normalized" if lossy else ""


def _ends(text: TextSide, eos: tuple[int, ...]) -> str:
    assert eos, "no end token is known: answers end at max_tokens only"
    missing = [i for i in eos if not text.tokenizer.piece(i)]
    assert not missing, f"ids {missing} are not in the vocabulary"
    return ", ".join(repr(text.tokenizer.piece(i).decode(errors="replace")) for i in eos)


def _end_of_turn(text: TextSide, eos: tuple[int, ...]) -> Check:
    """What the template writes behind an answer, as tokens, has one that ends it."""
    from lmkit.text.ends import answer_tails

    assert text.renderer is not None
    part, name, control = "tokenizer", "end of turn", set[int]()
    tails = list(answer_tails(text.renderer))
    for tail in tails:
        ids = text.encode_prompt(tail, add_special=False)
        if (end := next((i for i in ids if i in eos), None)) is not None:
            return Check(part, name, "ok", f"{text.tokenizer.piece(end).decode(errors='replace')!r} ({end})")
        control.update(i for i in ids if i in text.tokenizer.special_ids)
    if not tails:
        return Check(part, name, "warning", "the template shows no answers of the assistant")
    written = f"the template writes {tails[0][:60]!r} behind an answer"
    if control or MARKER.match(tails[0]):
        return Check(part, name, "failed", f"{written}, and no end token is in it: answers run on into the next turn")
    return Check(part, name, "warning", f"{written}, which has no token: answers end where the model ends them")


# ---------------------------------------------------------------------------------------------------- grammars


def _grammars(text: TextSide, plan: Any, eos: tuple[int, ...], size: int) -> Iterator[Check]:
    from lmkit.text.constrain import constraint
    from lmkit.text.side import vocabulary

    backends = [c for c in plan.choices if c.kind == "grammar"]
    running = plan.choice("structured_output")
    if not backends or running is None:
        missing = "grammar backend" if not backends else "structured output"
        yield Check("grammar", "backend", "absent", f"no {missing} is installed")
        return
    vocab = vocabulary(text.tokenizer, eos, size)
    output: StructuredOutput = load_target(running)(backends, lambda: vocab)
    good = json.dumps(ARGUMENTS, ensure_ascii=False)
    samples = [
        ("json_schema", Grammar("json_schema", json.dumps(TOOL.parameters)), good),
        ("regex", Grammar("regex", "[a-z]+-[0-9]{2}"), "ab-12"),
        ("choice", Grammar("choice", '["red", "dark green"]'), "dark green"),
    ]
    try:
        for name, grammar, sample in samples:
            yield _run("grammar", name, partial(_generates, text, output, vocab, grammar, sample))
        if text.tool_format is not None:
            yield _run("grammar", "tool calls", lambda: _compiles(
                output, constraint(None, [TOOL], ToolChoice("required"), text.tool_format)
            ))  # fmt: skip
    finally:
        output.close()


def _compiles(output: StructuredOutput, grammar: Grammar | None) -> str:
    if grammar is not None:
        output.compile(grammar, GRAMMAR_SECONDS)
    return ""


def _generates(text: TextSide, output: StructuredOutput, vocab: Vocabulary, grammar: Grammar, sample: str) -> str:
    """The tokens of `sample` are allowed one after the other, and then the end."""
    import numpy as np

    matcher = output.compile(grammar, GRAMMAR_SECONDS).matcher()
    ids = (vocab.encode or (lambda s: text.tokenizer.encode(s, add_special=False)))(sample)
    row = np.zeros(-(-vocab.size // 32), np.int32)
    for token in ids:
        matcher.fill(row)
        shown = vocab.pieces[token]
        assert row[token // 32] >> (token % 32) & 1, f"token {shown!r} of {sample!r} is not allowed"
        assert matcher.accept([token]) == 1, f"token {shown!r} of {sample!r} is not accepted"
    assert matcher.complete, f"after {sample!r} the answer may not end"
    return f"{len(ids)} tokens"
