"""LLM on a tiny random checkpoint: shapes of inputs and outputs, and what is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from lmkit import LLM, AsyncLLM, SamplingParams
from lmkit.api import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDead,
    EngineRequest,
    InvalidParam,
    RequestError,
    SelectionError,
    Text,
    UnknownKey,
)
from lmkit.config import EngineConfig, ModelConfig
from lmkit.text.stream import Finish

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), max_rows=4) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    stats = llm._engine.core.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_one_text_is_one_prompt(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.prompt == "hello"
    assert len(output.prompt_token_ids) == 5
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"
    assert output.text == llm.text.tokenizer.decode(output.token_ids)


def test_ids_and_text_give_the_same(llm: LLM) -> None:
    ids = llm.text.encode_prompt("hello")
    outputs = [llm.generate(p, GREEDY)[0].token_ids for p in ("hello", ids, ["hello"], [ids])]
    assert all(tokens == outputs[0] for tokens in outputs)


def test_batch_is_independent_of_its_order_and_size(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(23)]  # more than twice the rows: they queue outside
    together = [o.token_ids for o in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(p, GREEDY)[0].token_ids for p in prompts]
    assert together == alone
    assert idle(llm)


def test_params_may_differ_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(o.token_ids) for o in llm.generate(["a", "b", "c"], params)] == [1, 5, 3]
    with pytest.raises(InvalidParam):
        llm.generate(["a", "b"], params)


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, ignore_eos=True)
    (output,) = llm.generate("hello", params, n=3)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    tokens = [tuple(o.token_ids) for o in output.outputs]
    assert len(set(tokens)) == 3
    second = SamplingParams(max_tokens=8, seed=6, ignore_eos=True)
    assert tuple(llm.generate("hello", second)[0].token_ids) == tokens[1]


def test_logprobs_of_tokens_and_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert [e.token for e in output.logprobs] == output.token_ids
    assert all(e.rank == 1 and e.top[0][0] == e.token and len(e.top) == 2 for e in output.logprobs)
    assert [e.token for e in output.prompt_logprobs] == output.prompt_token_ids[1:]


def test_prefix_cache_is_seen(tiny: Path) -> None:
    with LLM(str(tiny)) as llm:
        prompt = "x" * 40
        first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
        assert (first.num_cached, second.num_cached) == (0, 32)
        assert first.token_ids == second.token_ids


def test_stop_string_ends_text_and_request(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0]
    stop = whole.text[4:6]
    (output,) = llm.generate("hello", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, stop=(stop,)))
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.finish_reason == "stop"
    assert output.outputs[0].stop == stop
    assert idle(llm)


def test_stop_token_is_reported(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].token_ids
    token = whole[3]
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True, stop_token_ids=(token,))
    (output,) = llm.generate("hello", params)
    assert output.outputs[0].stop == token
    assert output.token_ids == whole[: whole.index(token) + 1]


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    several = llm.chat([[{"role": "user", "content": c}] for c in "ab"], GREEDY)
    assert len(several) == 2


def test_streams_say_the_same_as_generate(llm: LLM) -> None:
    events = list(llm.stream("hello", GREEDY))
    assert "".join(e.text for e in events if isinstance(e, Text)) == llm.generate("hello", GREEDY)[0].text
    assert isinstance(events[-1], Finish)
    assert events[-1].usage.prompt_tokens == 5


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert idle(llm)


def test_wrong_prompt_fails_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1"):
        llm.generate([[1, 2], [9999]], GREEDY)
    with pytest.raises(RequestError, match="maximum context length is"):
        llm.generate("x" * 500, GREEDY)
    with pytest.raises(InvalidParam):
        llm.generate([1.5], GREEDY)  # type: ignore[list-item]
    assert idle(llm)


def test_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core, steps = llm._engine.core, []
    step = core.step

    def interrupted() -> list:
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True))
    monkeypatch.undo()
    assert idle(llm)
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"


def test_calls_from_several_threads(llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].token_ids
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(llm.generate("hello", GREEDY)[0].token_ids)) for _ in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3


def test_closed_llm_says_so(tiny: Path) -> None:
    llm = LLM(str(tiny))
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a")


def test_start_errors_are_typed(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownKey):
        LLM(str(tiny), kv_memroy="1GiB")
    with pytest.raises(ConfigError):
        LLM(str(tiny), config=object())  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(SelectionError):
        LLM(str(tiny), attention="nothing")  # pinned: it is refused
    with pytest.raises(CapacityError):
        LLM(str(tiny), kv_memory="1KiB")


async def test_async_llm_runs_in_its_own_process(tiny: Path) -> None:
    async with await AsyncLLM.start(EngineConfig(model=ModelConfig(model=str(tiny)))) as llm:
        ids = llm.text.encode_prompt("hello")
        events = [event async for event in llm.client.submit(EngineRequest("a", ids, GREEDY))]
        assert [e.finish for e in events if e.finish] == ["length"]
        assert llm.facts.vocab_size == 259
        assert llm.client.client.pid is not None
    with LLM(str(tiny)) as same:
        assert [t for e in events for t in e.tokens] == same.generate(ids, GREEDY)[0].token_ids


def test_a_thread_beside_an_open_stream(llm: LLM) -> None:
    """Neither waits for the other, and both get what they would get alone."""
    alone = [llm.generate(p, GREEDY)[0].text for p in ("first", "second")]
    stream = llm.stream("first", GREEDY)
    begun = next(stream)
    found: list[str] = []
    thread = Thread(target=lambda: found.append(llm.generate("second", GREEDY)[0].text), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    text = "".join(e.text for e in [begun, *stream] if isinstance(e, Text))
    assert [text, *found] == alone
    assert idle(llm)
