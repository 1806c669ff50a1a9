"""Beam search, steps and streams of texts by the Python API, on the demo checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmkit import LLM, AsyncLLM, BeamSearchParams, LLMEngine, SamplingParams
from lmkit.api import CheckpointError, ConfigError, EngineDead, InvalidParam, RequestError, SelectionError
from lmkit.config import from_options

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_rows=8) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    stats = llm._engine.core.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_beams_are_ranked_and_begin_with_the_prompt(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=0.5)
    ids = llm.text.encode_prompt("The lmkit server")
    by_text, by_ids = llm.beam_search(["The lmkit server", ids], params)
    assert [s.tokens for s in by_text.sequences] == [s.tokens for s in by_ids.sequences]
    scores = [s.score for s in by_text.sequences]
    assert scores == sorted(scores, reverse=True)
    for found in by_text.sequences:
        assert found.tokens[: len(ids)] == ids
        assert found.text.startswith("The lmkit server")
        assert found.cum_logprob == pytest.approx(sum(entry.logprob for entry in found.logprobs))
        assert found.score == pytest.approx(found.cum_logprob / len(found.logprobs) ** 0.5)
        assert (found.finish_reason == "stop") == (found.tokens[-1] in llm.facts.eos_token_ids)
        assert found.stop_reason is None  # the model ended by itself
    assert idle(llm)


def test_one_beam_is_greedy(llm: LLM) -> None:
    (found,) = llm.beam_search("Tell me", BeamSearchParams(1, max_tokens=12, ignore_eos=True))
    (greedy,) = llm.generate("Tell me", GREEDY)
    assert found.sequences[0].tokens == greedy.prompt_token_ids + greedy.token_ids


@pytest.mark.parametrize(
    "wrong", [{"beam_width": 0}, {"temperature": 0.5}, {"early_stopping": "x"}, {"max_tokens": 0}, {"logprobs": 99}]
)
def test_wrong_params_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidParam):
        BeamSearchParams(**{"beam_width": 4, **wrong})


def test_what_cannot_be_searched_is_refused_as_a_whole(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 1"):
        llm.beam_search(["x", [1] * 4000], BeamSearchParams(2, max_tokens=4))
    with pytest.raises(InvalidParam):
        llm.beam_search("x", SamplingParams())  # type: ignore[arg-type]
    assert idle(llm)


def test_steps_tell_what_is_known_so_far(llm: LLM) -> None:
    (whole,) = llm.generate("Tell me", GREEDY)
    texts: dict[str, list[str]] = {}
    with LLMEngine(llm) as engine:
        assert engine.step() == []
        engine.add_request("a", "Tell me", GREEDY)
        engine.add_request("chat", QUESTION, GREEDY, n=2)
        engine.add_request("wrong", "x", SamplingParams(extra={"nobody": 1}))
        with pytest.raises(InvalidParam):
            engine.add_request("a", "again")
        with pytest.raises(InvalidParam):
            engine.add_request("two", ["one", "two"])
        assert engine.get_num_unfinished_requests() == 3
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts.setdefault(output.request_id, []).append(output.text)
                last = output
                if output.request_id == "wrong":
                    assert output.outputs[0].error.field == "extra.nobody"
                    assert output.finished
                elif output.finished:
                    assert [len(one.token_ids) for one in output.outputs] == [12] * len(output.outputs)
        assert last.finished
    assert len(texts["a"]) > 3
    assert texts["a"][-1] == whole.text
    assert all(later.startswith(earlier) for earlier, later in zip(texts["a"], texts["a"][1:], strict=False))
    assert set(texts) == {"a", "chat", "wrong"}
    assert idle(llm)


def test_aborted_and_closed_requests_leave_nothing(llm: LLM) -> None:
    engine = LLMEngine(llm)
    for name in "abc":
        engine.add_request(name, "Tell me", GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["a", "unknown"])
    heard = {output.request_id for _ in range(3) for output in engine.step()}
    assert "a" not in heard
    assert heard
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    llm.generate("x", GREEDY)  # what was posted is done before the next step
    assert idle(llm)


def test_others_may_use_the_engine_between_steps(llm: LLM) -> None:
    with LLMEngine(llm) as engine:
        engine.add_request("a", "Tell me", GREEDY)
        engine.step()
        between = llm.generate("Tell me", GREEDY)[0].token_ids
        outputs = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
    assert outputs[0].token_ids == between


def test_texts_come_as_they_are_made(llm: LLM) -> None:
    assert "".join(llm.stream_text("Tell me", GREEDY)) == llm.generate("Tell me", GREEDY)[0].text
    params = SamplingParams(max_tokens=12, temperature=0.0)
    pieces = list(llm.stream_text(QUESTION, params))
    assert "".join(pieces) == llm.chat(QUESTION, params)[0].text
    assert len(pieces) > 1
    with pytest.raises(RequestError):
        list(llm.stream_text("x", SamplingParams(extra={"nobody": 1})))
    for _ in llm.stream_text("Tell me", GREEDY):
        break
    llm.generate("x", GREEDY)
    assert idle(llm)


def test_the_sum_of_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    (output,) = llm.generate("Tell me", params)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
    assert llm.generate("Tell me", GREEDY)[0].outputs[0].cumulative_logprob is None


@pytest.mark.full
async def test_the_same_beside_an_engine_of_its_own() -> None:
    params = BeamSearchParams(3, max_tokens=6)
    async with AsyncLLM("demo", dtype="float32") as other:
        found = await other.beam_search(["Tell me", "The lmkit server"], params)
        text = "".join([piece async for piece in other.stream_text("Tell me", GREEDY)])
        said = "".join([piece async for piece in other.stream_text(QUESTION, SamplingParams(max_tokens=12))])
        with pytest.raises(RequestError):
            async for _ in other.stream_text("x", SamplingParams(extra={"nobody": 1})):
                pass
        assert (await other.stats()).num_running == 0
    with LLM("demo", dtype="float32") as here:
        assert here.beam_search(["Tell me", "The lmkit server"], params) == found
        assert here.generate("Tell me", GREEDY)[0].text == text
        assert said
    with pytest.raises(EngineDead):
        here.beam_search("x", params)


async def test_an_engine_of_its_own_starts_with_the_first_call() -> None:
    """However many there are; one that gives up does not end it for the others."""
    llm = AsyncLLM("demo", dtype="float32")
    with pytest.raises(ConfigError, match="has not started"):
        _ = llm.facts
    first = asyncio.ensure_future(llm.generate("Tell me", GREEDY))
    second = asyncio.ensure_future(llm.generate("Tell me", GREEDY))
    await asyncio.sleep(0)
    first.cancel()
    try:
        (found,) = await second
        assert found.text
        assert (await llm.generate("Tell me", GREEDY))[0].text == found.text
    finally:
        await llm.close()
        await llm.close()


async def test_what_prevents_a_start_is_raised_by_each_call() -> None:
    llm = AsyncLLM("demo", attention="nobody")  # pinned: to be refused
    for _ in range(2):
        with pytest.raises(SelectionError, match="nobody"):
            await llm.generate("x")
    await llm.close()
    with pytest.raises(ConfigError, match="either config= or a model"):
        AsyncLLM("demo", config=from_options({}))
    await AsyncLLM("demo").close()  # one that never started


def test_steps_can_be_recorded(llm: LLM, tmp_path: Path) -> None:
    before = llm.stats()
    llm.start_profile(str(tmp_path / "mine"))
    llm.generate("Tell me", GREEDY)
    llm.stop_profile()
    with pytest.raises(RequestError, match="no steps are being recorded"):
        llm.stop_profile()
    assert llm.stats().num_steps > before.num_steps
    llm._engine.core.executor.worker._profiling.close()  # type: ignore[attr-defined]  # waits for the file
    assert [path.name for path in tmp_path.iterdir()] == ["mine-rank0.json.gz"]


def test_a_path_names_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as by_path:
        LLM(tmp_path)
    with pytest.raises(CheckpointError) as by_text:
        LLM(str(tmp_path))
    assert str(by_path.value) == str(by_text.value)
    assert str(tmp_path) in str(by_path.value)
