"""Asks and their turns: what every front door refuses, and what it makes of the same words."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from lmkit.api import (
    EngineBusy,
    InvalidParam,
    Pooled,
    PoolerInfo,
    RequestError,
    SamplingParams,
    TokenEvent,
    ToolChoice,
    UnsupportedTask,
)
from lmkit.engine.messages import EngineFacts
from lmkit.text.stream import Finish, Usage
from lmkit_python.front.ask import ChatAsk, PoolAsk, ScoreAsk, TextAsk, UnsupportedField
from lmkit_python.front.limits import ContextTooLong
from lmkit_python.front.message import Message
from lmkit_python.front.prepare import Turn, expand, prepare, prepare_all
from lmkit_python.front.run import Generation, check_finish, check_taken
from lmkit_python.front.vectors import scores_of, vector_of
from lmkit_testing.serving import END, scripted, text_side
from msgspec import structs

FACTS = EngineFacts("m", 1000, 1000, 257)
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}


def turns_of(ask: ChatAsk | TextAsk, **side: Any) -> list[Turn]:
    return prepare(text_side(**side), FACTS, ask, "id")


def play(turn: Turn, text: str) -> None:
    """The engine says `text`, a byte at a time, and ends."""
    for token in text_side().tokenizer.encode(text):
        turn.message.feed(turn.stream.feed(TokenEvent("id", [token])))
    turn.message.feed(turn.stream.feed(TokenEvent("id", [END], "stop", END)))


def test_a_message_that_is_continued_inside_its_reasoning() -> None:
    messages = [HELLO, {"role": "assistant", "content": "<think>two plus"}]
    (turn,) = turns_of(ChatAsk(messages=messages, continue_final=True, add_generation_prompt=False))
    play(turn, " two</think>4")
    assert (turn.message.reasoning, turn.message.content) == (" two", "4")


def test_the_role_of_developers_and_both_names_of_reasoning() -> None:
    ask = ChatAsk(messages=[{"role": "developer", "content": "Be brief"}, HELLO | {"reasoning": "r", "refusal": "x"}])
    assert ask.messages[0]["role"] == "system"
    assert ask.messages[1] == HELLO | {"reasoning": "r", "reasoning_content": "r"}
    (turn,) = turns_of(ask)
    assert (turn.prompt or "").startswith("<|system|>Be brief")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, {"role": "user"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, {"content": "x"}, "x",
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, {"role": "user", "content": 3},
    ],
)  # fmt: skip
def test_messages_that_no_template_could_show(message: Any) -> None:
    with pytest.raises(InvalidParam) as caught:
        ChatAsk(messages=[HELLO, message])
    assert caught.value.field.startswith("messages[1]")


def test_tools_that_nobody_would_read_are_refused() -> None:
    for side in ({"tools": None}, {}):
        ask = ChatAsk(messages=[HELLO], tools=[TOOL])
        if side:
            with pytest.raises(UnsupportedField, match="no tool parser"):
                turns_of(ask, **side)
        else:
            (turn,) = turns_of(ask)
            assert turn.constrained_by == "tools"
    assert len(turns_of(ChatAsk(messages=[HELLO], tools=[TOOL], tool_choice=ToolChoice("none")), tools=None)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [TOOL, TOOL]}, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [{}]},
        {"tool_choice": ToolChoice("required")}, {"tools": [TOOL], "tool_choice": ToolChoice("named", "g")},
        {"continue_final": True}, {"n": 0}, {"n": True},
    ],
)  # fmt: skip
def test_asks_that_contradict_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ChatAsk(**{"messages": [HELLO], **wrong})


def test_seeds_go_around() -> None:
    top = (1 << 63) - 1
    seeds = [one.seed for one in expand(SamplingParams(seed=top - 1, prompt_logprobs=1), 4)]
    assert seeds == [top - 1, top, -top - 1, -top]
    assert [one.prompt_logprobs for one in expand(SamplingParams(prompt_logprobs=1), 3)] == [1, None, None]
    assert [one.prompt_logprobs for one in expand(SamplingParams(prompt_logprobs=1), 2, scores_each=True)] == [1, 1]


def test_limits_are_those_of_the_model_for_everyone() -> None:
    for ask in (
        TextAsk(prompts=["x" * 1000]),
        TextAsk(prompts=["x" * 10_000_000]), ChatAsk(messages=[HELLO | {"content": "x" * 10_000_000}]),
    ):  # fmt: skip
        with pytest.raises(ContextTooLong):
            turns_of(ask)
    with pytest.raises(InvalidParam, match="prompt 1"):
        prepare_all(text_side(), FACTS, [TextAsk(prompts=["x"]), TextAsk(prompts=[[300]])], "id")
    more = TextAsk(prompts=["x" * 990], params=SamplingParams(max_tokens=1000))
    assert [t.request.params.max_tokens for t in turns_of(more)] == [10]
    assert [t.request.params.max_tokens for t in turns_of(TextAsk(prompts=["x" * 990], default_tokens=16))] == [10]
    assert [t.request.params.max_tokens for t in turns_of(TextAsk(prompts=["x"], default_tokens=16))] == [16]


def test_who_goes_on_after_a_death() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert [t.request.resume for t in turns_of(TextAsk(prompts=["x"], params=greedy))] == [True]
    assert [t.request.resume for t in turns_of(TextAsk(prompts=["x"]))] == [False]
    assert [t.request.resume for t in turns_of(TextAsk(prompts=["x", "y"], params=greedy))] == [False, False]
    assert [t.request.resume for t in turns_of(TextAsk(prompts=["x"], n=2, resume=True))] == [True, True]


def test_a_model_that_generates_has_no_vectors() -> None:
    with pytest.raises(UnsupportedTask):
        prepare(text_side(), FACTS, PoolAsk(prompts=["x"]), "id")


def pooled(ask: PoolAsk | ScoreAsk, pooler: PoolerInfo, vectors: list[list[float]]) -> list[Turn]:
    """The turns of the ask; the engine answers each with the next of `vectors`."""
    turns = prepare(text_side(), structs.replace(FACTS, pooler=pooler), ask, "id")
    for turn, vector in zip(turns, vectors, strict=True):
        answer = Pooled(np.array(vector, "<f4").tobytes(), np.shape(vector))
        turn.message.feed(turn.stream.feed(TokenEvent(turn.request.id, finish="stop", pooled=answer)))
    return turns


def test_vectors_are_messages_like_any_other() -> None:
    turns = pooled(PoolAsk(prompts=["ab", [7, 8, 9]], limit=2), PoolerInfo("embed", 2), [[1, 2], [3, 4]])
    assert [turn.prompt for turn in turns] == ["ab", None]
    assert [turn.request.token_ids for turn in turns] == [[*text_side().tokenizer.encode("ab")], [7, 8]]
    assert [turn.message.finish for turn in turns] == [Finish("stop", None, Usage(2))] * 2
    assert [vector_of(turn).tolist() for turn in turns] == [[1.0, 2.0], [3.0, 4.0]]


def test_scores_are_cosines_or_what_a_cross_encoder_says() -> None:
    ask = ScoreAsk(queries=["q"], documents=["d", "q", "d"])
    turns = pooled(ask, PoolerInfo("embed", 2), [[3, 4], [4, 3]])
    assert [turn.prompt for turn in turns] == ["q", "d"]
    assert scores_of(ask, turns) == pytest.approx([0.96, 1.0, 0.96])
    late = [[[1, 0], [0, 2]], [[3, 0], [1, 1]]]
    assert scores_of(ask, pooled(ask, PoolerInfo("token_embed", 2), late)) == pytest.approx(
        [1 + 0.5**0.5, 2.0, 1 + 0.5**0.5]
    )
    turns = pooled(ask, PoolerInfo("classify", 1), [[0.5], [0.25], [2.0]])
    assert scores_of(ask, turns) == [0.5, 0.25, 2.0]
    with pytest.raises(UnsupportedTask):
        pooled(ask, PoolerInfo("classify", 3), [])


def test_a_vector_that_does_not_come_is_an_error() -> None:
    (turn,) = pooled(PoolAsk(prompts=["x"]), PoolerInfo("embed", 1), [[1]])
    turn.stream.finished, turn.message, turn.number = False, Message(), 2
    turn.message.feed(turn.stream.fail(EngineBusy("no room").info()))
    with pytest.raises(EngineBusy):
        vector_of(turn)
    with pytest.raises(EngineBusy, match="no room"):
        check_taken(turn)


async def test_as_many_at_a_time_as_are_wanted() -> None:
    llm = scripted("abc", delay=0.001)
    client: Any = llm.client
    turns = prepare(llm.text, llm.facts, TextAsk(prompts=["x"] * 9, params=SamplingParams(max_tokens=3)), "id")
    most = 0
    async with Generation(client, turns, at_once=2) as generation:
        async for turn, events in generation.events():
            turn.message.feed(events)
            check_finish(turn)
            most = max(most, client.num_streams)
            await asyncio.sleep(0)
    assert [turn.message.content for turn in turns] == ["abc"] * 9
    assert most <= 2
