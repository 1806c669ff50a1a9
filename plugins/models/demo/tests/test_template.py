"""What the chat template writes."""

import pytest
from train.data import Renderer

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "f", "arguments": {"x": 1}}}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


def test_thinking_is_off_unless_asked_for(renderer: Renderer) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.prompt([USER]) == prompt + "<think>\n\n</think>\n\n"
    assert renderer.prompt([USER], thinking=True) == prompt


def test_tools_follow_the_system_prompt(renderer: Renderer) -> None:
    tools = (
        '# Tools\n<tools>\n{"type": "function", "function": {"name": "f", "description": "d", '
        '"parameters": {"type": "object"}}}\n</tools><|im_end|>\n'
    )
    assert renderer.prompt([USER], (TOOL,)).startswith("<|im_start|>system\n" + tools)
    system = {"role": "system", "content": "Be brief."}
    assert renderer.prompt([system, USER], (TOOL,)).startswith("<|im_start|>system\nBe brief.\n\n" + tools)


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_calls_and_results(renderer: Renderer, arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call, CALL]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    one_call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert (
        f"assistant\n<think>\n\n</think>\n\n{one_call}\n{one_call}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    ) in renderer.prompt(messages)


def test_a_chat_without_thinking_extends_its_prompt(renderer: Renderer) -> None:
    """What an engine has cached for one turn is the beginning of the next turn's prompt."""
    prompt = renderer.prompt([USER])
    later = renderer.prompt([USER, {"role": "assistant", "content": "Hello!"}, USER])
    assert later.startswith(prompt + "Hello!<|im_end|>\n")


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
        {"role": "assistant", "content": "<think>\n2 + 2\n</think>\n\n4"},
    ],
)
def test_reasoning_is_kept_until_the_next_question(renderer: Renderer, reply: dict) -> None:
    assert "<think>\n2 + 2\n</think>\n\n4<|im_end|>" in renderer.prompt([USER, reply])
    assert "2 + 2" not in renderer.prompt([USER, reply, USER])


def test_content_may_come_in_parts(renderer: Renderer) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert renderer.prompt([{"role": "user", "content": parts}]) == renderer.prompt([USER])
