"""The renderers of the core itself: of a tokenizer's own writer, and in place of one that is not installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from lmkit.api import InvalidParam, TemplateFailed, Tokenizer
from lmkit.text.renderer import WriterRenderer, open_renderer
from lmkit_testing.engines import no_plan

HELLO = [{"role": "user", "content": "Hello"}]


class Joining:
    """A ChatWriter that puts texts side by side."""

    takes_tools, options = True, frozenset[str]()

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: object, options: object, *, add_generation_prompt: bool
    ) -> str:
        contents = [m["content"] for m in messages]
        return "".join(c if isinstance(c, str) else "".join(p["text"].strip() for p in c) for c in contents) + "<|end|>"


def test_texts_that_a_writer_joins(byte_level: Tokenizer) -> None:
    renderer = WriterRenderer(Joining(), ["<|end|>", "<tool_call>"])
    renderer.content = "list"
    for parts in (["a <|en", "d|>"], ["<|end| ", "><tool_", "call>"], [*"<|end|>"], ["<|<", "tool_call>"]):
        text = renderer.render([{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}])
        ids = byte_level.encode_marked(text, add_special=False)
        assert [i for i in ids if i in byte_level.special_ids] == [byte_level.id_of("<|end|>")]
        assert byte_level.decode(ids, skip_special=False) == "".join(p.strip() for p in parts) + "<|end|>"


def test_without_a_renderer_a_chat_is_refused_with_what_to_install() -> None:
    renderer = open_renderer(no_plan(), "{{ messages[0].content }}", {})
    with pytest.raises(TemplateFailed, match="installed") as caught:
        renderer.render(HELLO, [{"type": "function"}])
    assert "plugins/tokenizers/json" in caught.value.fix
    assert not renderer.takes_system
    assert set(renderer.findings.values()) >= {"no: nothing that is installed renders chat templates"}


class Broken(Joining):
    def write(self, *given: Any, **options: Any) -> str:
        raise KeyError("role")


def test_what_a_writer_does_not_take_is_the_requests_fault() -> None:
    with pytest.raises(TemplateFailed, match="KeyError"):
        WriterRenderer(Broken()).render(HELLO)
    with pytest.raises(InvalidParam, match="chat_template_kwargs"):
        WriterRenderer(Joining()).render(HELLO, kwargs={"other": 1})


class Strict(Joining):
    """A ChatWriter that takes no critics, and no answer at the end."""

    def write(self, messages: Sequence[Mapping[str, Any]], *rest: Any, **options: Any) -> str:
        for message in messages:
            if message["role"] == "critic":
                raise ValueError("no critics")
        if messages[-1]["role"] == "assistant":
            raise ValueError("ends with an answer")
        return super().write(messages, *rest, **options)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("after", range(6))
def test_the_message_that_a_writer_refuses_is_named(before: int, after: int) -> None:
    said = [{"role": role, "content": "x"} for role in ("user", "assistant") * 3]
    messages = [*said[:before], {"role": "critic", "content": "x"}, *said[:after]]
    with pytest.raises(TemplateFailed, match="no critics") as failed:
        WriterRenderer(Strict()).render(messages)
    assert failed.value.field == f"messages.{before}"
    assert failed.value.message.startswith(f"messages.{before}: ")
