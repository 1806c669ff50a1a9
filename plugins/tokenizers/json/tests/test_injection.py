"""No text of a client makes a control token, wherever it goes in, with every chat template there is.

Each place is filled once with a harmless text and once with one that spells control tokens: the prompts have the same
count of each. What the prompts say is what the template says of the same texts without any protection.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import TemplateFailed
from lmkit.prompts import MARK, shown
from lmkit_testing.tokenizers import DATA
from lmkit_tokenizer_json.budget import BudgetedEnvironment
from lmkit_tokenizer_json.render import Renderer
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = sorted((DATA / "chat_templates").glob("*.jinja"))
MARKER = re.compile(r"</?[\w:|\uff5c\u2581.-]{2,40}>|<\|[^<>\s|]{1,30}\|>|\[/?[A-Z_]{3,20}\]")
THOUGHT = {"<think>", "</think>", "<seed:think>", "</seed:think>"}
SLOT = "SLOT"  # where the text goes
IDS = ("123456789", "123456780")

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="the test material (shared/data) is not beside the repository")


def byte_tokenizer(template: str) -> JsonTokenizer:
    """One token per byte, and each marker that the template writes: every second one is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    found = {
        *MARKER.findall(template),
        "<|im_end|>",
        "<|im_start|>",
        "<|user|>",
        "<|system|>",
        "<s>",
        "</s>",
        "<think>",
    }
    for number, name in enumerate(sorted(found)):
        raw.add_tokens([AddedToken(name, special=number % 2 == 0, normalized=False)])
    return JsonTokenizer(raw, bos_token="<s>", eos_token="</s>")


class World:
    """A template with a tokenizer of its markers."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.tokenizer = byte_tokenizer(self.source)
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        control = {self.tokenizer.token(i) for i in self.tokenizer.special_ids}
        self.control = control | self.tokenizer.markers([self.source])
        self.ids = {self.tokenizer.id_of(name): name for name in self.control}
        self.renderer = Renderer(self.source, special, control_tokens=self.control)
        self.bare = bare(self.renderer, self.source)
        names = sorted(self.control)
        self.evil = ["".join(names), " x ".join(reversed(names))]

    def count(self, request: Mapping[str, Any]) -> Counter[str] | None:
        """None: the template takes no such request."""
        try:
            text = self.renderer.render(**request)
        except TemplateFailed:
            return None
        ids = self.tokenizer.encode_marked(text, add_special=False)
        assert self.tokenizer.decode(ids, skip_special=False) == shown(text)
        return Counter(self.ids[i] for i in ids if i in self.ids)


class Bare(Renderer):
    """Texts stay plain ones."""

    def run(self, *given: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmkit_tokenizer_json.render.theirs_of_request", lambda variables, reads: dict(variables))
            return super().run(*given)

    write = run

    def finished(self, text: str) -> str:
        return text


def bare(renderer: Renderer, source: str) -> Renderer:
    """The same template without any protection."""
    found = copy.copy(renderer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmkit_tokenizer_json.render.TrackedEnvironment", BudgetedEnvironment)
        found._compile(source)
    found.__class__ = Bare
    return found


@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda path: path.stem)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def tool(name: str = "f", description: str = "A tool", key: str = "a", about: str = "words") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string", "description": about, "enum": [about]}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(name: str = "f", arguments: object = None, id: str = IDS[0]) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {"a": "b"})
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def messages(*more: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hello"}, *more]


def called(one: dict[str, Any], result: object = "5", id: str = IDS[0], **more: object) -> list[dict[str, Any]]:
    reply = {"role": "assistant", "content": "", "tool_calls": [one], **more}
    return messages(reply, {"role": "tool", "tool_call_id": id, "content": result, "name": "f"})


def answered(**fields: object) -> list[dict[str, Any]]:
    return messages({"role": "assistant", "content": "Good day", **fields}, {"role": "user", "content": "Thanks"})


def places(renderer: Renderer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with SLOT at each place that a client fills."""
    yield "system", {"messages": [{"role": "system", "content": SLOT}, *messages()]}
    yield "second user", {"messages": [*answered()[:2], {"role": "user", "content": SLOT}]}
    yield "user", {"messages": [{"role": "user", "content": SLOT}]}
    yield "user part", {"messages": [{"role": "user", "content": [{"type": "text", "text": SLOT}]}]}
    yield "name", {"messages": [{"role": "user", "content": "Hello", "name": SLOT}]}
    yield "assistant", {"messages": answered(content=SLOT)}
    yield (
        "last assistant",
        {"messages": messages({"role": "assistant", "content": SLOT}), "add_generation_prompt": False},
    )
    yield "continued", {"messages": messages({"role": "assistant", "content": SLOT}), "continue_final_message": True}
    yield "reasoning", {"messages": answered(reasoning_content=SLOT)}
    yield "thinking", {"messages": called(call(), thinking=SLOT), "tools": [tool()]}
    yield "reasoning of a call", {"messages": called(call(), reasoning_content=SLOT), "tools": [tool()]}
    yield "content of a call", {"messages": called(call(), content=SLOT), "tools": [tool()]}
    yield "result", {"messages": called(call(), SLOT), "tools": [tool()]}
    yield "result part", {"messages": called(call(), [{"type": "text", "text": SLOT}]), "tools": [tool()]}
    yield "result without tools", {"messages": called(call(), SLOT)}
    yield "id of a result", {"messages": called(call(), id=SLOT), "tools": [tool()]}
    yield "id of a call", {"messages": called(call(id=SLOT)), "tools": [tool()]}
    yield "name of a call", {"messages": called(call(name=SLOT)), "tools": [tool()]}
    for name, arguments in (
        ("value", {"a": SLOT}), ("key", {SLOT: "b"}), ("list", {"a": [1, SLOT]}),
        ("nested", {"a": {SLOT: {"c": SLOT}}}), ("text", SLOT), ("bare list", f'["{SLOT}"]'),
    ):  # fmt: skip
        yield f"arguments: {name}", {"messages": called(call(arguments=arguments)), "tools": [tool()]}
    for field in ("name", "description", "key", "about"):
        yield f"tool: {field}", {"messages": messages(), "tools": [tool(**{field: SLOT})]}
    yield "role", {"messages": messages({"role": SLOT, "content": "Hello"})}
    for option in sorted(renderer.options):
        yield f"option {option}", {"messages": messages(), "kwargs": {option: SLOT}}
        yield f"option {option}, a list", {"messages": messages(), "tools": [tool()], "kwargs": {option: [SLOT]}}
    if renderer.takes_documents:
        for document in ({"title": SLOT, "text": SLOT}, {"doc_id": SLOT, "content": SLOT}, {SLOT: SLOT}):
            yield f"document {document}", {"messages": messages(), "documents": [document]}


def filled(value: Any, text: str) -> Any:
    if isinstance(value, str):
        return value.replace(SLOT, json.dumps(text)[1:-1] if value.startswith(("{", "[")) else text)
    if isinstance(value, dict):
        return {filled(k, text): filled(v, text) for k, v in value.items()}
    return [filled(v, text) for v in value] if isinstance(value, list) else value


@pytest.mark.one_in(4)
def test_no_place_makes_control_tokens(world: World) -> None:
    taken = set()
    for place, request in places(world.renderer):
        harmless = world.count(filled(request, "harmless"))
        if harmless is None and "tools" not in request:  # some templates are for tools only
            request["tools"] = [tool()]
            harmless = world.count(filled(request, "harmless"))
        for evil in world.evil:
            found = world.count(filled(request, evil))
            if found is None or harmless is None:
                continue
            taken.add(place)
            more = found - harmless
            if "assistant" in place or place in ("continued", "content of a call"):
                # templates look for thoughts in the text of answers, and write them as they write thoughts
                more = Counter({name: n for name, n in more.items() if not (name in THOUGHT and n == 1)})
            assert not more, (place, evil)
    assert {"user", "user part", "second user", "name"} <= taken


@pytest.mark.one_in(4)
def test_the_protection_changes_no_text(world: World) -> None:
    """The template decides as it would without: what it compares, cuts and trims are the texts as they came."""
    for place, request in places(world.renderer):
        for text in ("harmless", "<think>\na\n</think>\n\nb ", *world.evil):
            given = filled(request, text)
            try:
                expected = world.bare.render(**copy.deepcopy(given))
            except TemplateFailed:
                continue
            rendered = world.renderer.render(**given)
            assert shown(rendered) == expected, place
            if text == "harmless":
                assert MARK not in rendered, place


@pytest.mark.one_in(4)
def test_no_seam_makes_control_tokens(world: World) -> None:
    """Parts, and texts that stand beside each other, are one text for the tokenizer and several for us."""
    harmless = world.count({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}]})
    for name in sorted(world.control):
        for at in (1, len(name) // 2):
            parts = [f"a {name[:at]}", name[at:], f"b{name[:at]} ", name[at:]]
            content = [{"type": "text", "text": text} for text in parts]
            assert world.count({"messages": [{"role": "user", "content": content}]}) == harmless, parts
            twice = [{"role": "user", "content": name[:at]}, {"role": "user", "content": name[at:]}]
            plain = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
            assert world.count({"messages": twice}) == world.count({"messages": plain})


JOINS = [
    "{% for p in messages[0].content %}{{ p.text }}{% endfor %}",
    "{% for p in messages[0].content %}{{ p.text | trim }}{% endfor %}",
    "{{ messages[0].content | map(attribute='text') | join }}",
    "{{ ''.join(messages[0].content | map(attribute='text') | list) }}",
    "{% set ns = namespace(t='') %}{% for p in messages[0].content %}{% set ns.t = ns.t ~ p.text %}{% endfor %}"
    "{{ ns.t }}",
    "{% set t %}{% for p in messages[0].content %}{{ p.text }}{% endfor %}{% endset %}"
    "{{ t | trim | replace('\\n', '') }}",
    "{% macro m(p) %}{{ p.text }}{% endmacro %}{% for p in messages[0].content %}{{ m(p) }}{% endfor %}",
    "{% for p in messages[0].content %}{{ '%s' % p.text }}{% endfor %}",
    "{% for p in messages[0].content %}{{ '{}'.format(p.text) }}{% endfor %}",
    "{% for p in messages[0].content %}{% for c in p.text %}{{ c }}{% endfor %}{% endfor %}",
    "{% for p in messages[0].content %}{{ p.text[:1] + p.text[1:] }}{% endfor %}",
    "{% for p in messages[0].content %}{{ p.text.split('q')[0] }}{% endfor %}",
    '{{ (messages[0].content | tojson).replace(\'"}, {"type": "text", "text": "\', \'\') }}',
    "{{ (messages[0].content | string).replace(\"'}, {'type': 'text', 'text': '\", '') }}",
]


@pytest.mark.parametrize("source", JOINS)
def test_whatever_joins_the_parts(source: str, byte_level: JsonTokenizer) -> None:
    renderer = Renderer(source + "<|end|>", {}, control_tokens=["<|end|>", "<tool_call>"])
    renderer.content = "list"
    end = byte_level.id_of("<|end|>")
    for parts in (["a <|en", "d|>", "<", "|end|>"], ["<|", "end", "|>"], [*"<|end|>"], ["<|end|>", "b"]):
        content = [{"type": "text", "text": text} for text in parts]
        text = renderer.render([{"role": "user", "content": content}])
        assert shown(text).count("<|end|>") >= 2
        ids = byte_level.encode_marked(text, add_special=False)
        assert [i for i in ids if i in byte_level.special_ids] == [end]
        assert byte_level.decode(ids, skip_special=False) == shown(text)


def test_what_a_template_makes_of_a_role_is_its_own(byte_level: JsonTokenizer) -> None:
    renderer = Renderer(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", {}, control_tokens=["<|end|>"]
    )

    def tokens(role: str, content: str) -> list[int]:
        text = renderer.render([{"role": role, "content": content}])
        return [i for i in byte_level.encode_marked(text, add_special=False) if i in byte_level.special_ids]

    assert len(tokens("end", "x")) == 1
    assert len(tokens("end", "<|end|>")) == 1
    assert tokens("x|><|end|><|y", "x") == []
    assert tokens("end|>", "x") == []


def test_a_template_that_refuses_control_tokens_takes_marked_ones() -> None:
    source = "{% if '<|end|>' in messages[0].content %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    renderer = Renderer(source, {}, control_tokens=["<|end|>"])
    text = renderer.render([{"role": "user", "content": "a <|end|>"}])
    assert MARK in text
    assert shown(text) == "a <|end|>"
    always = Renderer(
        "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}", {}, control_tokens=["<|end|>"]
    )
    with pytest.raises(TemplateFailed, match="no"):
        always.render([{"role": "user", "content": "<|end|>"}] * 2)


def test_the_template_for_tools_is_guarded_too(byte_level: JsonTokenizer) -> None:
    source = "{{ messages[0].content }}{{ tools | tojson }}<|end|>"
    renderer = Renderer("{{ messages[0].content }}", {}, tools_source=source, control_tokens=["<|end|>"])
    text = renderer.render([{"role": "user", "content": "<|end|>"}], [tool(about="<|end|>")])
    ids = byte_level.encode_marked(text, add_special=False)
    assert [i for i in ids if i in byte_level.special_ids] == [byte_level.id_of("<|end|>")]


def test_a_vocabulary_without_bytes_has_ways_too() -> None:
    """It cannot carry the mark: the texts are tokenized one by one."""
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(("?", "<", "end", ">", "a"))}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation()])
    raw.add_special_tokens(["<end>"])
    tokenizer = JsonTokenizer(raw)
    renderer = Renderer("{{ messages[0].content }}<end>", {}, control_tokens=["<end>"])
    text = renderer.render([{"role": "user", "content": "a <end>"}])
    assert tokenizer.encode_marked(text, add_special=False) == [4, 1, 2, 3, 5]
