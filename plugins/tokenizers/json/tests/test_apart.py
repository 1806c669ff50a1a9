"""Templates and tokenizers of strangers: whatever they do ends within bounds, and others do not notice."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import CheckpointError, ConfigError, RequestError, TemplateFailed
from lmkit_killable import Limits
from lmkit_tokenizer_json import apart as module
from lmkit_tokenizer_json.apart import Apart, ApartRenderer, ApartTokenizer, open_tokenizer
from lmkit_tokenizer_json.render import Renderer
from lmkit_tokenizer_json.tokenizer import JsonTokenizer

TREE = "{% set ns = namespace(x=[n], y=[n], t=(n, n)) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}"
TREE += "{% set ns.y = [ns.y, ns.y] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"  # 120 lists, 2^40 leaves each
BIG = "{% set ns = namespace(x=n + 2) %}{% for i in range(22) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
BOMBS = {
    "equal": TREE + "{{ ns.x == ns.y }}",
    "less": TREE + "{{ ns.x < ns.y }}",
    "in": TREE + "{{ ns.y in [ns.x] }}",
    "select in": TREE + "{{ [ns.y]|select('in', [ns.x])|list }}",
    "key": TREE + "{{ {ns.t: 1}|length }}",
    "text": TREE + "{{ ns.x|string|length }}",
    "output": TREE + "{{ ns.x }}",
    "concat": TREE + "{{ ns.x ~ '' }}",
    "format": TREE + "{{ '%s'|format(ns.x) }}",
    "format method": TREE + "{{ '{}'.format(ns.x) }}",
    "json": TREE + "{{ ns.x|tojson|length }}",
    "max": TREE + "{{ [ns.x, ns.y]|max }}",
    "sorted trees": TREE + "{{ [ns.x, ns.y]|sort }}",
    "error message": TREE + "{{ raise_exception(ns.x) }}",
    "division": BIG + "{{ (ns.x * ns.x + 7) // (ns.x + 3) > n }}",
    "remainder": BIG + "{{ (ns.x * ns.x + 7) % (ns.x + 3) > n }}",
    "number as text": BIG + "{{ ns.x }}",
    "round": "{{ 1.5|round(n * 100000000, 'floor') }}",
    "indent of text": "{{ [[n] * 100000, [2]]|tojson(indent='a' * n * 8000000)|length }}",
    "separators": "{{ ([n] * 1000)|tojson(separators=('a' * n * 8000000, 'b'))|length }}",
    "needles": "{{ (['a' * n * 2000000 ~ 'b'] * 3000)|select('in', 'a' * n * 4000000)|list|length }}",
    "sort": "{{ ('b a' * n * 2000000)|list|sort|length }}",
    "groupby": "{{ ('ab' * n * 4000000)|list|groupby('x')|length }}",
    "title": "{{ ('ab ' * n * 2600000)|title|length }}{{ ('ab ' * n * 2600000)|title|length }}",
    "unique": "{{ ('ab' * n * 4000000)|list|unique|list|length }}",
    "join": "{{ ('a' * n * 10000).join('b' * n * 1000000)|length }}",
    "width": "{{ '{0:{1}}'.format('a', n * 4000000000)|length }}",
    "budget": "{% for q in _budget.running().gen %}{% endfor %}{{ nothing.more }}",
}
TYPICAL = {"equal", "number as text", "needles", "sort", "join", "width", "budget"}  # the others end in the same way
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, sooner."""
    small = Limits(0.15, 256 << 20, 30.0)
    monkeypatch.setattr(module, "_render_limits", lambda nbytes: small)
    monkeypatch.setattr(module, "_encode_limits", lambda nbytes: small)


@pytest.fixture(scope="module")
def bombs() -> ApartRenderer:
    cases = "".join(f"{{% elif messages[0].content == '{name}' %}}{source}" for name, source in BOMBS.items())
    source = "{% set n = messages|length %}{% if 0 %}" + cases + "{% else %}{{ messages[0].content }}!{% endif %}"
    return ApartRenderer(Apart(), source, {})


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in TYPICAL)) for n in BOMBS])
@pytest.mark.one_in(3)
def test_a_template_ends_within_its_limits_and_others_go_on(short: None, bombs: ApartRenderer, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    with ThreadPoolExecutor(1) as beside:
        bad = beside.submit(bombs.render, [{"role": "user", "content": name}])
        for _ in range(3):
            assert bombs.render(HELLO) == "Hello!"
        with pytest.raises(TemplateFailed) as caught:
            bad.result()
    assert "more than it may" in caught.value.message or "undefined" in caught.value.message
    assert bombs.render(HELLO) == "Hello!"
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert (after.ru_maxrss - before.ru_maxrss) << 10 < 64 << 20  # this process made nothing large


def test_limits_hold_by_default(bombs: ApartRenderer) -> None:
    with pytest.raises(TemplateFailed, match=r"1 s of CPU time") as caught:
        bombs.render([{"role": "user", "content": "equal"}])
    assert "--chat-template" in caught.value.fix
    assert caught.value.status == 400


def test_all_that_is_tried_at_load_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN_TEMPLATE", Limits(0.6, 256 << 20, 30.0))
    apart = Apart()
    slow = "{% for i in range(messages|length * 99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}"
    folded = "{{ ('b a' * 2500000)|list|sort|length }}" + "{{ ('ab' * 4000000)|list|sort|length }}" * 9
    for source in ("{% set n = messages|length %}" + BOMBS["equal"], slow, folded):
        with pytest.raises(ConfigError, match=r"when it was tried: .* CPU time"):
            ApartRenderer(apart, source, {})
    assert ApartRenderer(apart, "{{ messages[0].content }}", {}).render(HELLO) == "Hello"  # it may be asked again


def test_a_template_that_hangs_is_blamed_and_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the clock ends it, as on a busy machine, and before a plugin's time is over."""
    assert module.OPEN_TEMPLATE.seconds + module._TRIAL_SECONDS < 30 > module._OPEN_SECONDS
    monkeypatch.setattr(module, "OPEN_TEMPLATE", Limits(60.0, 256 << 20, 0.3))
    asked = []
    exchange = Apart._exchange
    monkeypatch.setattr(Apart, "_exchange", lambda self, *args: asked.append(1) or exchange(self, *args))
    for _ in range(3):
        with pytest.raises(
            ConfigError, match=r"the chat template used more than it may .*no answer within 0\.3 s"
        ) as e:
            ApartRenderer(Apart(), "{% set hangs = messages|length %}" + BOMBS["equal"], {})
        assert "--chat-template" in e.value.fix
    assert len(asked) == 1


@pytest.mark.parametrize("source", ["{% if 1 %}" * 20000, "{{ " + "(" * 20000, "{{ 1" + " + 1" * 20000 + "}}"])
def test_a_template_that_is_nested_deeply_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ApartRenderer(Apart(), source, {})


def test_it_is_the_same_renderer(data: Path) -> None:
    """Everything that is known of a template, and what it renders, is what the class says in this process."""
    source = (data / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
    options: dict[str, Any] = {"control_tokens": ["<|im_end|>", "<think>"]}
    here = Renderer(source, {"bos_token": "<s>"}, **options)
    there = ApartRenderer(Apart(), source, {"bos_token": "<s>"}, **options)
    assert here.findings
    public = [name for name in vars(here) if not name.startswith("_")]
    assert {name: getattr(there, name) for name in public} == {name: getattr(here, name) for name in public}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**70, "x": float("inf")}}}
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 18446744073709551616}'}}
    messages = [
        {"role": "user", "content": "a<|im_end|>b \ud83d é😀"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert there.render(messages, [tool], {"enable_thinking": False}) == here.render(
        messages, [tool], {"enable_thinking": False}
    )
    with pytest.raises(RequestError, match="JSON"):
        there.render([{"role": "user", "content": "x", "extra": object()}])
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError):
        there.render([{"role": "user", "content": "x", "extra": nested}])
    assert there.render(HELLO) == here.render(HELLO)


def test_a_process_that_dies_is_replaced_and_the_request_answered(bombs: ApartRenderer) -> None:
    for _ in range(3):
        process = module._pool.take([])
        process._process.kill()  # type: ignore[union-attr]
        module._pool.give(process, [])
        assert bombs.render(HELLO) == "Hello!"


def test_many_share_the_processes() -> None:
    """More than are kept open: those that were forgotten are opened again."""
    renderers = [ApartRenderer(Apart(), f"{i} {{{{ messages[0].content }}}}", {}) for i in range(7)]
    for _ in range(2):
        assert [r.render(HELLO) for r in renderers] == [f"{i} Hello" for i in range(7)]
    assert module._pool._num <= module._MAX_PROCESSES


def test_a_forked_process_has_its_own(bombs: ApartRenderer) -> None:
    assert bombs.render(HELLO) == "Hello!"
    source, sink = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # threads: the child does nothing but this
        pid = os.fork()
    if not pid:
        text = "failed"
        try:
            text = bombs.render(HELLO)
        finally:
            os.write(sink, text.encode())
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(source, 99) == b"Hello!"
    os.close(source)
    os.close(sink)
    assert bombs.render(HELLO) == "Hello!"


# ------------------------------------------------------------------------------------------------- tokenizers


def replace(old: Any, new: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": old} if isinstance(old, str) else {"Regex": old[0]},
        "content": new,
    }


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def several(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(parts), "decoders": list(parts)}


def added(text: str, number: int = 3) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": number, "content": text, "normalized": True, **flags}


def write(folder: Path, vocab: dict[str, int] | None = None, **parts: Any) -> Path:
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "BPE", "vocab": vocab or {"a": 0, "b": 1, "x": 2}, "merges": []}
    file = {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(file))
    return folder


GROWING = several(*[replace("a", "a" * 10)] * 9)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"normalizer": GROWING}, "aa"),
        ({"normalizer": several(*[{"type": "Prepend", "prepend": "a" * 100_000}] * 100)}, "a"),
        ({"normalizer": replace(["(x+x+)+y"], "z")}, "x" * 60),
        ({"pre_tokenizer": split("(x+x+)+y")}, "x" * 40),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "aaa"),  # the library panics
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}}, "zz"),
    ],
    ids=["growing", "prepend", "regex normalizer", "regex", "panic", "no unknown token"],
)
@pytest.mark.one_in(3)
def test_a_text_that_takes_too_much_is_refused(
    short: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], parts: dict[str, Any], text: str
) -> None:
    tokenizer = open_tokenizer(write(tmp_path, **parts))
    with pytest.raises(RequestError, match="tokenizer") as caught:
        tokenizer.encode(text)
    assert caught.value.status == 400
    assert tokenizer.decode([0, 0]) == "a a"
    inner = tokenizer.encode_inner
    assert inner is None
    assert capfd.readouterr().err == ""  # a panic is no reason to fill the log


@pytest.mark.parametrize(
    "parts",
    [
        {"vocab": {"a": 0, "b": 2**31}},
        {"vocab": {"a": 0, "b": 2**24}},
        {"vocab": {"a": 0, "b": 2**70}},
        {"vocab": {"a": 0, "b": -1}},
        {"added_tokens": [added("y", 2**31)]},
        {"normalizer": GROWING, "added_tokens": [added("aa")]},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"version": json.loads("[" * 900 + "]" * 900)},
    ],
    ids=["id", "gap", "huge id", "negative id", "added id", "grows at load", "panic at load", "nested"],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "_open_limits", lambda nbytes: Limits(2.0, 256 << 20, 60.0))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        open_tokenizer(write(tmp_path, **parts))
    assert caught.value.fix


def test_ids_may_leave_gaps(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write(tmp_path, {"a": 0, "b": 5000}))
    assert tokenizer.encode("ab") == [0, 5000]
    assert (tokenizer.piece(5000), tokenizer.piece(4999)) == (b"b", b"")


@pytest.mark.parametrize("decoder", [several(*[replace("a", "a" * 1000)] * 4), replace(["(x+x+)+y"], "z")])
def test_a_decoder_that_may_take_too_much_runs_apart(short: None, tmp_path: Path, decoder: dict[str, Any]) -> None:
    tokenizer = open_tokenizer(write(tmp_path, decoder=decoder))
    assert tokenizer.decode([1, 1]) == "bb"
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(1) + detokenizer.feed(1) + detokenizer.flush() == "bb"
    if decoder["type"] == "Sequence":
        with pytest.raises(RequestError):
            tokenizer.decode([0, *[2] * 60])


@pytest.mark.parametrize("name", ["qwen", "byte_level", "sentencepiece_like"])
def test_it_is_the_same_tokenizer(
    request: pytest.FixtureRequest, real: Callable[[str], JsonTokenizer], tmp_path: Path, name: str
) -> None:
    """Ids, texts, pieces and streams are those of the class in this process."""
    here = real(name) if name == "qwen" else request.getfixturevalue(name)
    here._raw.save(str(tmp_path / "tokenizer.json"))
    there = open_tokenizer(tmp_path)
    assert isinstance(there, ApartTokenizer)
    assert (there.vocab_size, there.special_ids) == (here.vocab_size, here.special_ids)
    some = range(0, here.vocab_size + 50, max(1, here.vocab_size // 3000))
    assert [there.piece(i) for i in some] == [here.piece(i) for i in some]
    rng = random.Random(7)
    for _ in range(50):
        ids = [rng.randrange(here.vocab_size) for _ in range(rng.randrange(12))]
        for skip in (True, False):
            assert there.decode(ids, skip_special=skip) == here.decode(ids, skip_special=skip)
    text = "Hello world. hello <tool_call>é😀\n\n  a b<|im_end|>" + "x " * 900
    for add_special in (True, False):
        assert there.encode(text, add_special=add_special) == here.encode(text, add_special=add_special)
    assert there.encode_pair("a b", "hello", 3) == here.encode_pair("a b", "hello", 3)
    assert (there.encode_inner is None) == (here.encode_inner is None)
    assert there.id_of("hello") == here.id_of("hello")
    assert there.markers(["<tool_call>"]) == here.markers(["<tool_call>"])


# ------------------------------------------------------------------------------------------------- files


def test_links_that_leave_the_checkpoint_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"chat_template": "{{ 1 }}"}')
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json", "special_tokens_map.json"):
        write(folder)
        (folder / name).symlink_to(secret)
        with pytest.raises(CheckpointError, match="outside of the checkpoint"):
            open_tokenizer(folder)
        (folder / name).unlink()
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    (tmp_path / "x.jinja").write_text("x")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        open_tokenizer(folder)


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "anywhere" / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write(blobs).joinpath("tokenizer.json").rename(blobs / "0a")
    (blobs / "0b").write_text("{{ 1 }}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0a")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/0b")
    linked, own = tmp_path / "linked", tmp_path / "own"
    linked.mkdir()
    (linked / "tokenizer.json").symlink_to(blobs / "0a")
    write(own := tmp_path).joinpath("tokenizer.json").rename(own / "other.json")
    (own / "tokenizer.json").symlink_to("other.json")
    for folder, template in ((snapshot, "{{ 1 }}"), (linked, None), (own, None)):
        tokenizer = open_tokenizer(folder)
        assert tokenizer.chat_template == template


@pytest.mark.parametrize(
    "config",
    ["[" * 300_000, '{"a":' * 300_000, '{"added_tokens_decoder": {"x": {"content": "y"}}}',
     '{"added_tokens_decoder": {"%s": {"content": "y"}}}' % ("9" * 5000), '{"added_tokens_decoder": {"9": ["y"]}}'],
    ids=["lists", "objects", "key", "number", "entry"],
)  # fmt: skip
def test_a_configuration_that_is_no_configuration(tmp_path: Path, config: str) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        open_tokenizer(tmp_path)


def test_the_template_engine_is_imported_in_the_process_apart_only(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "import lmkit_tokenizer_json.hooks\n"
        "import lmkit.text.side\n"
        "assert not {'jinja2', 'tokenizers'} & set(sys.modules)\n"
        "from lmkit_tokenizer_json.apart import open_renderer\n"
        "renderer = open_renderer('{{ messages[0].content }}!', {})\n"
        "print(renderer.render([{'role': 'user', 'content': 'hi'}]), 'jinja2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("hi! False\n", 0), done.stderr
