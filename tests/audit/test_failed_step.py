"""One step raises: only the request that is at fault ends, with a typed error that leaks nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lmkit import LLM, SamplingParams

SECRET = "/home/someone/model at 0x7f00deadbeef"
PROMPTS = ["1 2 3", "What is 2 + 3?", "a b c d", "hello " * 40]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.5)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True, top_p=0.9, logprobs=2)
PARAMS = [GREEDY, SEEDED, GREEDY, SEEDED]
OPTIONS = {"max_length": 256, "kv_memory": "8MiB", "threads": 1, "dtype": "float32", "max_step_tokens": 48}


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad", [None, 0, 3])
@pytest.mark.one_in(2)
def test_only_the_row_at_fault_ends(
    where: str, depth: int, bad: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`bad`: the request whose row always fails from some step on; None: one step fails, by nobody's fault."""
    with LLM("demo", depth=depth, **OPTIONS) as llm:
        expected = [o.token_ids for o in llm.generate(PROMPTS, PARAMS)]
        core: Any = llm._engine.core
        worker = core.executor.worker
        real = getattr(worker, where)
        seen: list[Any] = []  # plans
        forward = worker.forward

        def noted(plan: Any) -> Any:
            seen.append(plan)
            return forward(plan)

        def broken(*args: Any) -> Any:
            result = noted(*args) if where == "forward" else real(*args)  # it was computed: the state has changed
            plan = seen[-1]
            ids = sorted({row.id for p in seen for row in p.rows}, key=lambda id: int(id.split("-")[-2]))
            hit = bad is not None and any(row.id == ids[min(bad, len(ids) - 1)] and row.start > 60 for row in plan.rows)
            if hit or (bad is None and len(seen) == 5):
                raise RuntimeError(SECRET)
            return result

        monkeypatch.setattr(worker, "forward", noted)
        monkeypatch.setattr(worker, where, broken)
        prompts = [p if i != bad else "x y " * 40 for i, p in enumerate(PROMPTS)]
        with caplog.at_level(logging.ERROR, "lmkit.engine"):
            outputs = [o.outputs[0] for o in llm.generate(prompts, PARAMS)]
        assert SECRET in caplog.text  # the operator learns the cause
        for i, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
            if i == bad:
                assert output.finish_reason == "error"
                assert output.error is not None
                assert (output.error.code, SECRET in str(output.error)) == (
                    "plugin",
                    False,
                )  # whose code the executor's is
                assert output.error.fix
            else:
                assert (output.finish_reason, output.token_ids) == ("length", tokens)
        monkeypatch.undo()
        assert [o.token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
        core.scheduler.check()
        stats = core.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
