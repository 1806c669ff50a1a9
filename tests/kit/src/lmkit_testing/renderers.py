"""Conformance of renderers: prompts hold what clients said and no control token of theirs; what they take is found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from lmkit.api import MARK, ChatRenderer, ConfigError, InvalidParam, LmkitError, TemplateFailed

from lmkit_testing.signatures import wrong_methods
from lmkit_testing.specs import PluginConformance

END = "<|end|>"
SOURCE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "And caf\u00e9 \u65e5\u672c?"},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]
FINDINGS = frozenset({
    "user", "system", "late system", "several turns", "consecutive users", "list content", "tools", "tool calls",
    "parallel tool calls", "tool results", "prefill", "thinking switch",
})  # fmt: skip


class RendererConformance(PluginConformance):
    """`source` is a template that shows role and content of each message, its end as END, tools, a variable `mood`, and
    what begins an answer; it is Jinja unless the class of a test says it in the plugin's own language. `broken` are
    templates that must be refused when they are read, `failing` those that fail in a request."""

    source: ClassVar[str] = SOURCE
    broken: ClassVar[Sequence[str]] = ("{% for m in messages %}", "{{ messages", "{% nothing %}")
    failing: ClassVar[Sequence[str]] = ("{% if messages[0].content == 'Hi' %}{{ raise_exception('no') }}{% endif %}x",)
    special: ClassVar[Mapping[str, str]] = {"bos_token": "<s>", "eos_token": END}

    @pytest.fixture
    def make(self, target: Any) -> Callable[..., ChatRenderer]:
        def made(source: str = self.source, **options: Any) -> ChatRenderer:
            given = {"control_tokens": {END, "<|user|>", "<|assistant|>"}, **options}
            found: ChatRenderer = target(source, self.special, **given)
            return found

        return made

    @pytest.fixture
    def renderer(self, make: Callable[..., ChatRenderer]) -> ChatRenderer:
        return make()

    def test_it_is_a_renderer(self, renderer: ChatRenderer) -> None:
        assert isinstance(renderer, ChatRenderer), "a subclass of lmkit.api.ChatRenderer"
        assert not (wrong := wrong_methods(renderer, ChatRenderer)), wrong
        assert renderer.content in ("string", "list", "both")
        assert {type(renderer.takes_tools), type(renderer.takes_documents)} == {bool}
        assert END in renderer.control_tokens, "what must not come from clients is kept"
        assert all(isinstance(name, str) for name in renderer.options)

    def test_findings_are_whole_and_true(self, renderer: ChatRenderer) -> None:
        """Each kind of message, with "yes" or the reason."""
        found = renderer.findings
        assert set(found) >= FINDINGS, f"missing: {sorted(FINDINGS - set(found))}"
        for name in FINDINGS - {"thinking switch"}:
            assert found[name] == "yes" or found[name].startswith("no: "), f"{name}: {found[name]!r}"
        assert found["user"] == found["several turns"] == found["system"] == "yes", dict(found)
        assert found["tools"] == "yes" or not renderer.takes_tools

    def test_all_that_is_said_is_shown(self, renderer: ChatRenderer) -> None:
        prompt = renderer.render(CHAT)
        places = [prompt.find(str(message["content"])) for message in CHAT]
        assert min(places) >= 0, f"a message is missing: {prompt!r}"
        assert places == sorted(places), "the order of the messages"
        assert prompt.count(END) == len(CHAT), "the template's own control tokens stand as they are"
        assert MARK not in prompt, "nobody spelled a control token"
        ended, open_end = renderer.render(CHAT, add_generation_prompt=False), renderer.render(CHAT)
        assert open_end != ended, "add_generation_prompt changes nothing"
        assert renderer.takes_tools == ("look_up" in renderer.render(CHAT, TOOLS)), "takes_tools is what is shown"

    def test_clients_write_no_control_token(self, renderer: ChatRenderer) -> None:
        """Typed as one, or joined of several pieces: a MARK stands in it, and nothing else has changed."""
        contents: list[Any] = [f"a{END}b", END, f"{END}{END}", [{"type": "text", "text": f"x{END}"}]]
        for content in contents:
            for role in ("user", "system", "assistant"):
                chat: list[dict[str, Any]] = [*CHAT, {"role": role, "content": content}, CHAT[1]]
                prompt = renderer.render(chat)
                assert prompt.count(END) == len(chat), f"{role} wrote {END}: {prompt!r}"
                assert MARK in prompt
                typed = content if isinstance(content, str) else content[0]["text"]
                assert typed in prompt.replace(MARK, ""), "a text was changed"
        tools = copy.deepcopy(TOOLS)
        tools[0]["function"]["description"] = f"says {END}"  # type: ignore[index]
        if renderer.takes_tools:
            assert renderer.render(CHAT, tools).count(END) == len(CHAT), "a tool's description wrote a control token"

    def test_variables_are_known(self, renderer: ChatRenderer) -> None:
        assert "mood" in renderer.options, "a variable of the template that requests may set"
        assert "(gay)" in renderer.render(CHAT, kwargs={"mood": "gay"})
        with pytest.raises(InvalidParam, match="no_such_variable"):
            renderer.render(CHAT, kwargs={"no_such_variable": 1})
        if not renderer.takes_documents:
            with pytest.raises(InvalidParam):
                renderer.render(CHAT, documents=[{"text": "x"}])

    def test_a_message_is_continued(self, renderer: ChatRenderer) -> None:
        chat = [*CHAT, {"role": "assistant", "content": "It is "}]
        if renderer.findings["prefill"] == "yes":
            assert renderer.render(chat, continue_final_message=True).endswith("It is "), "the message ends the prompt"

    def test_inputs_stay_as_they_are(self, renderer: ChatRenderer) -> None:
        chat, tools = copy.deepcopy(CHAT), copy.deepcopy(TOOLS)
        first = renderer.render(chat, tools, {"mood": "x"})
        assert (chat, tools) == (CHAT, TOOLS), "what a client sent belongs to the request"
        assert renderer.render(chat, tools, {"mood": "x"}) == first, "the same every time"

    def test_threads_do_not_matter(self, renderer: ChatRenderer) -> None:
        chats = [[{"role": "user", "content": f"number {i}"}] for i in range(24)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(renderer.render, chats)) == [renderer.render(chat) for chat in chats]

    def test_broken_templates_are_refused(self, make: Callable[..., ChatRenderer]) -> None:
        for source in self.broken:
            with pytest.raises(ConfigError) as caught:
                make(source)
            assert caught.value.message

    def test_what_fails_in_a_request_is_the_requests_fault(self, make: Callable[..., ChatRenderer]) -> None:
        for source in self.failing:
            renderer = make(source)
            with pytest.raises(LmkitError) as caught:
                renderer.render([{"role": "user", "content": "Hi"}])
            assert isinstance(caught.value, TemplateFailed | InvalidParam)


__all__ = ["RendererConformance"]
