"""Plugins that go wrong while an engine runs: who asked for them hears who it was, and the engine serves the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import LmkitError, PluginError
from lmkit_testing.dists import write_dist

OPTIONS: dict[str, Any] = {"max_length": 256, "kv_memory": "4MiB", "threads": 1}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SHORT = SamplingParams(max_tokens=8, temperature=0.0)

HEAD = "from lmkit.api import *\nfrom lmkit.api import hookimpl\n"
POLICY = (
    HEAD
    + """
class Policy:
    def admit_key(self, r):
        {admit}
    def victim_key(self, r):
        {victim}
@hookimpl
def lmkit_schedulers():
    yield SchedulerSpec(name="bad", summary="It", target="bad_running.hooks:Policy")
"""
)
PARSER = (
    HEAD
    + """
class Parser:
    def feed(self, text, ids=()):
        {feed}
    def flush(self):
        {flush}
class Format:
    name, keep_special = "bad", frozenset()
    def grammar(self, tools, choice):
        return None
    def start(self, prompt_tail, tools):
        {start}
@hookimpl
def lmkit_tool_parsers():
    yield ToolParserSpec(name="bad", summary="It", target="bad_running.hooks:Format")
"""
)
PROCESSOR = (
    HEAD
    + """
class Processor:
    stage, keeps_argmax, options = "logits", False, None
    def add(self, slot, params, prompt):
        {add}
    def remove(self, slot):
        {remove}
    def apply(self, logits, ctx):
        {apply}
@hookimpl
def lmkit_logits_processors():
    yield LogitsProcessorSpec(name="bad", summary="It", target="bad_running.hooks:Processor")
"""
)
PROPOSER = (
    HEAD
    + """
class Proposer:
    max_drafts = 2
    def propose(self, texts, most):
        {propose}
@hookimpl
def lmkit_proposers():
    yield ProposerSpec(name="bad", summary="It", target="bad_running.hooks:Proposer")
"""
)
CONNECTOR = (
    HEAD
    + """
class Connector:
    fingerprint = "bad"
    def __init__(self, checkpoint, resolved, kv):
        {made}
    def fetch(self, id, keys):
        {fetch}
    def computed(self, key, parent, tokens):
        {computed}
    def evicted(self, key):
        {evicted}
    def save(self, blocks):
        {save}
    def forget(self):
        {forget}
    def release(self, id):
        {release}
    def close(self):
        {close}
@hookimpl
def lmkit_kv_connectors():
    yield KVConnectorSpec(name="bad", summary="It", target="bad_running.hooks:Connector")
"""
)
TEMPLATE = (
    HEAD
    + """
def template(path, checkpoint):
    {template}
@hookimpl
def lmkit_templates():
    yield TemplateSpec(name="bad", summary="It", target="bad_running.hooks:template", suffixes=(".old",),
        interface={interface})
"""
)
TOKENIZER = (
    HEAD
    + """
def read(folder, eos_token_ids=()):
    {read}
@hookimpl
def lmkit_tokenizers():
    yield TokenizerSpec(name="bad", summary="It", target="bad_running.hooks:read", files=("tokenizer.json",))
"""
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a plugin of a kind with the name "bad"; its module is forgotten afterwards."""

    def write(kind: str, source: str, **bodies: str) -> None:
        for name, body in bodies.items():
            source = source.replace("{" + name + "}", body)
        write_dist(
            tmp_path / "site", "bad-running", {kind: {"bad": "bad_running.hooks"}}, {"bad_running.hooks": source}
        )
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield write
    for name in [n for n in sys.modules if n.startswith("bad_running")]:
        del sys.modules[name]


def answers(llm: LLM, prompts: list[Any], params: Any = SHORT) -> list[str]:
    """Texts, or what was wrong, of each; each asked alone."""
    found = []
    for prompt in prompts:
        try:
            output = llm.generate(prompt, params)[0].outputs[0]
            found.append(f"{output.error.code}: {output.error.message}" if output.error else output.text)
        except LmkitError as e:
            found.append(f"{e.code}: {e}")
    return found


ODD = "if r.num_prompt_tokens % 2: "


@pytest.mark.parametrize(
    ("admit", "victim"),
    [
        pytest.param(ODD + "raise KeyError('x')\n        return (r.order,)", "return (0,)", id="raises"),
        *(
            pytest.param(a, v, id=i, marks=pytest.mark.one_in(5))
            for i, a, v in [
                ("number", ODD + "return 5\n        return (r.order,)", "return (0,)"),
                ("nan", ODD + "return (float('nan'),)\n        return (r.order,)", "return (0,)"),
                ("objects", ODD + "return (object(),)\n        return (r.order,)", "return (0,)"),
                ("victim", "return (r.order,)", ODD + "raise KeyError('x')\n        return (0,)"),
                ("victim none", "return (r.order,)", ODD + "return None\n        return (0,)"),
            ]
        ),
    ],
)
def test_a_policy_ends_its_request_and_not_the_engine(install: Any, admit: str, victim: str) -> None:
    install("scheduler", POLICY, admit=admit, victim=victim)
    with LLM("demo", scheduler="bad", **OPTIONS) as llm:
        odd, even = [5], [5, 6]
        texts = answers(llm, [even, odd, even, odd])
    assert all("scheduler 'bad' (bad-running 0.1.0): " in text and text.startswith("plugin") for text in texts[1::2]), (
        texts
    )
    assert texts[0] == texts[2]
    assert not texts[0].startswith("plugin")


@pytest.mark.parametrize(
    ("feed", "flush", "start"),
    [
        pytest.param("return ['text']", "return []", "return Parser()", id="texts"),
        *(
            pytest.param(*bodies, id=i, marks=pytest.mark.one_in(5))
            for i, bodies in {
                "raises": ("raise KeyError('x')", "return []", "return Parser()"),
                "none": ("return None", "return []", "return Parser()"),
                "number": ("return [Text(5)]", "return []", "return Parser()"),
                "flush raises": ("return []", "raise KeyError('x')", "return Parser()"),
                "flush none": ("return []", "return None", "return Parser()"),
                "start raises": ("return []", "return []", "raise KeyError('x')"),
                "start none": ("return []", "return []", "return None"),
            }.items()
        ),
    ],
)
def test_a_parser_is_named_and_no_text_is_lost(install: Any, feed: str, flush: str, start: str) -> None:
    install("tool_parser", PARSER, feed=feed, flush=flush, start=start)
    with LLM("demo", tool_parser="bad", **OPTIONS) as llm:
        try:
            error = llm.chat([{"role": "user", "content": "hello"}], SHORT, tools=TOOLS)[0].outputs[0].error
        except LmkitError as e:
            error = e.info()
        assert error
        assert error.code == "plugin"
        assert "parser 'bad'" in error.message
        assert llm.generate("hello", SHORT)[0].text


@pytest.mark.one_in(3)
def test_a_parser_that_swallows_all_is_named(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("tool_parser", PARSER, feed="return []", flush="return []", start="return Parser()")
    with LLM("demo", tool_parser="bad", **OPTIONS) as llm:
        assert llm.chat([{"role": "user", "content": "hello"}], SHORT, tools=TOOLS)
    assert "tool_parser 'bad' (bad-running 0.1.0) made nothing of an output" in caplog.text


@pytest.mark.parametrize(
    "bodies",
    [
        {"apply": "raise KeyError('x')"},
        pytest.param({"add": "raise KeyError('x')"}, marks=pytest.mark.one_in(3)),
    ],
    ids=str,
)
def test_a_logits_processor_ends_who_asked_for_it(install: Any, bodies: dict[str, str]) -> None:
    install("logits_processor", PROCESSOR, **({"add": "return True", "remove": "pass", "apply": "pass"} | bodies))
    bad = SamplingParams(max_tokens=8, temperature=0.0, extra={"bad": {}})
    with LLM("demo", **OPTIONS) as llm:
        text = llm.generate("hello", SHORT)[0].text
        said = answers(llm, ["hello"], bad)[0]
        assert said.startswith("plugin: ")
        assert f"logits_processor 'bad' (bad-running 0.1.0): {next(iter(bodies))} raised KeyError" in said
        assert llm.generate("hello", SHORT)[0].text == text


@pytest.mark.parametrize("error", ["RuntimeError('x')", "SystemExit(3)", "KeyboardInterrupt"])
def test_options_of_a_logits_processor_that_raise_end_who_sent_them(install: Any, error: str) -> None:
    """TypeError and ValueError say that the client's options are wrong; anything else is the plugin's fault."""
    options = f"    class options:\n        def __init__(self, **values): raise {error}\n\n"
    source = PROCESSOR.replace("    stage, keeps_argmax, options =", f"{options}    stage, keeps_argmax, _ =")
    install("logits_processor", source, add="return True", remove="pass", apply="pass")
    with LLM("demo", **OPTIONS) as llm:
        text = llm.generate("hello", SHORT)[0].text
        with pytest.raises(PluginError, match=r"logits processor 'bad': its options raised"):
            llm.generate("hello", SamplingParams(max_tokens=8, extra={"bad": {"size": 1}}))
        assert llm.generate("hello", SHORT)[0].text == text


@pytest.mark.parametrize(
    "propose",
    [
        "raise KeyError('x')",
        *(
            pytest.param(body, marks=pytest.mark.one_in(4))
            for body in ("return None", "return []", "return [['a'] for t in texts]", "return [[-5] for t in texts]")
        ),
    ],
)
def test_a_proposer_is_named(install: Any, propose: str) -> None:
    install("proposer", PROPOSER, propose=propose)
    with LLM("demo", proposer="bad", **OPTIONS) as llm:
        said = answers(llm, ["hello"])[0]
        assert said.startswith("plugin: ")
        assert "proposer 'bad' (bad-running 0.1.0): propose" in said


@pytest.mark.parametrize("read", ["return 5", pytest.param("raise KeyError('x')", marks=pytest.mark.one_in(2))])
def test_a_tokenizer_is_named(install: Any, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PLUGINS_DISABLE", "tokenizer:json")
    install("tokenizer", TOKENIZER, read=read)
    with pytest.raises(LmkitError, match=r"tokenizer 'bad' \(bad-running 0.1.0\)") as caught:
        LLM("demo", **OPTIONS)
    assert caught.value.code == "plugin"


QUIET = {
    "made": "pass", "fetch": "return {}", "computed": "return True", "evicted": "return True", "save": "pass",
    "forget": "pass", "release": "pass", "close": "pass",
}  # fmt: skip
LONG = [[7 + i % 90 for i in range(64)], [9 + i % 70 for i in range(64)]]


@pytest.mark.parametrize(
    ("method", "body"),
    [
        *((method, "raise OSError('/secret')") for method in QUIET if method != "made"),
        ("fetch", "raise SystemExit(3)"),
        ("fetch", "raise KeyboardInterrupt"),
        ("fetch", "return 5"),
        ("fetch", "return {key: b'short' for key in keys}"),
        ("fetch", "return {key: 'text' for key in keys}"),
        ("computed", "import sys; sys.exit()"),
    ],
)
def test_a_kv_connector_that_raises_has_found_nothing(
    install: Any, caplog: pytest.LogCaptureFixture, method: str, body: str
) -> None:
    """The engine lives, every request is answered as without a connector, and the log names it once."""
    with LLM("demo", **OPTIONS) as llm:
        expected = answers(llm, LONG * 2)
    install("kv_connector", CONNECTOR, **(QUIET | {method: body}))
    with LLM("demo", kv_connector="bad", **OPTIONS) as llm:
        assert answers(llm, LONG * 2) == expected
        if method == "forget":
            llm.reset_prefix_cache()
            assert answers(llm, LONG) == expected[:2]
    if method != "evicted":  # nothing was
        said = [r.getMessage() for r in caplog.records if "kv_connector 'bad' (bad-running 0.1.0)" in r.getMessage()]
        assert len([text for text in said if f": {method} raised" in text]) == 1, said


def test_a_kv_connector_that_cannot_be_made_is_named(install: Any) -> None:
    install("kv_connector", CONNECTOR, **(QUIET | {"made": "raise OSError('no disk')"}))
    with pytest.raises(LmkitError, match=r"'bad' \(bad-running 0.1.0\) could not be made: OSError") as caught:
        LLM("demo", kv_connector="bad", **OPTIONS)
    assert caught.value.code == "plugin"


@pytest.mark.parametrize("interface", ["0", "3"])
def test_a_template_reader_that_is_refused_is_named(install: Any, tmp_path: Path, interface: str) -> None:
    """B3: the file that it reads is not taken for a template's text instead."""
    file = tmp_path / "chat.old"
    file.write_text("user={u}")
    install("template", TEMPLATE, template="return 'x'", interface=interface)
    with pytest.raises(LmkitError, match=r"template plugin 'bad' \(bad-running 0.1.0\) reads .old files") as caught:
        LLM("demo", chat_template=str(file), **OPTIONS)
    assert caught.value.code == "no-candidate"
    assert "interface-unsupported" in str(caught.value)
    assert "LMKIT_PLUGINS_DISABLE=template:bad" in caught.value.fix


def test_a_template_reader_that_is_broken_is_not_passed_over(install: Any, tmp_path: Path) -> None:
    """Nobody knows what it reads: an unusual file is refused, usual ones are read with a warning."""
    install("template", "raise OSError('no luck')")
    for name, refused in (("chat.old", True), ("chat.jinja", False)):
        file = tmp_path / name
        file.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        if refused:
            with pytest.raises(LmkitError, match=r"template plugin 'bad' \(bad-running 0.1.0\) may read .old files"):
                LLM("demo", chat_template=str(file), **OPTIONS)
            continue
        with LLM("demo", chat_template=str(file), **OPTIONS) as llm:
            assert any("template plugin 'bad'" in text for text in llm.resolved.warnings)


@pytest.mark.parametrize("text", ["", "  \n\t\n"])
@pytest.mark.parametrize("name", ["chat.jinja", "chat.old"])
def test_an_empty_template_file_is_an_error(install: Any, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    install("template", TEMPLATE, template="return path.read_text()", interface="2")
    with pytest.raises(LmkitError, match="holds no chat template") as caught:
        LLM("demo", chat_template=str(file), **OPTIONS)
    assert caught.value.code == "config"


@pytest.mark.parametrize("template", ["raise OSError('/secret')", "raise SystemExit(3)", "return 5"])
def test_a_template_reader_is_named(install: Any, tmp_path: Path, template: str) -> None:
    file = tmp_path / "chat.old"
    file.write_text("user={u}")
    install("template", TEMPLATE, template=template, interface="2")
    with pytest.raises(LmkitError, match=r"template 'bad' \(bad-running 0.1.0\)") as caught:
        LLM("demo", chat_template=str(file), **OPTIONS)
    assert caught.value.code == "plugin"
