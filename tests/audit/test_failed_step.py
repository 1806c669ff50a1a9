"""One step raises: its requests fail with a typed error that leaks nothing, all others get the right answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lmkit import LLM, SamplingParams

SECRET = "/home/someone/model at 0x7f00deadbeef"
PROMPTS = ["1 2 3", "What is 2 + 3?", "a b c d", "hello"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.5)


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("depth", [1, 2])
def test_only_running_requests_fail(
    where: str, depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_length": 256, "kv_memory": "8MiB", "threads": 1, "dtype": "float32", "max_rows": 2}
    with LLM("demo", depth=depth, **options) as llm:
        expected = [o.token_ids for o in llm.generate(PROMPTS, GREEDY)]
        core: Any = llm._engine.core
        worker = core.executor.worker
        real, calls = getattr(worker, where), []

        def broken(*args: Any) -> Any:
            result = real(*args)  # the step was computed, so the worker's state has changed
            calls.append(args)
            if len(calls) == 4:
                raise RuntimeError(SECRET)
            return result

        monkeypatch.setattr(worker, where, broken)
        with caplog.at_level(logging.ERROR, "lmkit.engine"):
            outputs = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
        failed = [o for o in outputs if o.finish_reason == "error"]
        assert 1 <= len(failed) <= 2
        for output in failed:
            assert output.error is not None
            assert output.error.code == "engine"
            assert output.error.fix
            assert SECRET not in str(output.error)
        assert SECRET in caplog.text  # the operator learns the cause
        for output, tokens in zip(outputs, expected, strict=True):
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert output in failed or output.token_ids == tokens
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected
        core.scheduler.check()
        assert core.stats().num_running == 0
