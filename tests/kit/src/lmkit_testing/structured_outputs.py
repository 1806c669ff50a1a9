"""Conformance of structured output: constrained rows obey, others are as without it, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from lmkit.api import (
    Choice,
    EngineRequest,
    Grammar,
    GrammarError,
    NewRow,
    RowWork,
    SamplingParams,
    SchedLimits,
    StepPlan,
    StructuredOutput,
    StructuredOutputSpec,
    Vocabulary,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.plugins.refs import load_ref
from lmkit.scheduling.scheduler import Scheduler

from lmkit_testing.hash_model import HashExecutor, hash_kv
from lmkit_testing.signatures import wrong_methods
from lmkit_testing.specs import PluginConformance
from lmkit_testing.stepper import ArrivalOrder

END, SIZE = 96, 97
SECONDS = 60.0  # until a grammar is compiled: no measure of speed
STAIRS = Choice("grammar", "", "stairs", "lmkit_testing.grammars:StairsBackend", "lmkit-testing", "0.1.0", "")
Answers = dict[str, tuple[list[int], Any]]


def vocabulary() -> Vocabulary:
    """Bytes 32 to 127, and what ends."""
    return Vocabulary([*(bytes([32 + i]) for i in range(END)), b"<|end|>"], frozenset({END}), (END,), SIZE)


def asked(id: str, period: str | None, **params: Any) -> EngineRequest:
    """A request whose n-th token is n modulo `period`; None: any."""
    grammar = Grammar("regex", period) if period else None
    given = {"max_tokens": 14, "temperature": 1.0, "seed": len(id), "grammar": grammar, **params}
    return EngineRequest(id, [7, 1, len(id)], SamplingParams(**given))


def assert_stairs(tokens: Sequence[int], period: int, finish: str) -> None:
    body = list(tokens[:-1] if tokens and tokens[-1] == END else tokens)
    assert END not in body, "it goes on behind its end"
    assert [t % period for t in body] == [i % period for i in range(len(body))], f"the grammar forbids {body}"
    assert finish != "stop" or len(body) % period == 0, "it ended where the grammar was not complete"


class StructuredOutputConformance(PluginConformance):
    """Runs the plugin in the engine core, on the hash model, with a grammar of the kit."""

    options: ClassVar[Mapping[str, Any]] = {}  # of the plugin
    torch_free_target = True  # it stands in the engine's thread

    @pytest.fixture
    def make(self, target: Any) -> Iterator[Callable[..., StructuredOutput]]:
        made: list[StructuredOutput] = []

        def one(backends: Sequence[Choice] = (STAIRS,), max_rows: int = 0) -> StructuredOutput:
            made.append(target(list(backends), vocabulary, max_rows, **self.options))
            return made[-1]

        yield one
        for output in made:
            output.close()

    @pytest.fixture(scope="class")
    @classmethod
    def output(cls, spec: StructuredOutputSpec) -> Iterator[StructuredOutput]:
        """One for all tests, as an engine has one for all requests."""
        made: StructuredOutput = load_ref(spec.target)([STAIRS], vocabulary, 0, **cls.options)
        yield made
        made.close()

    @staticmethod
    def engine(output: StructuredOutput, num_blocks: int = 40, max_rows: int = 8, lookahead: int = 0) -> EngineCore:
        kv = hash_kv(num_blocks, 4)
        executor = HashExecutor(kv, depth=1, eos_token_ids=(END,), masks_stops=False)
        limits = SchedLimits(
            max_tokens=16, max_rows=max_rows, max_length=64, depth=1, eos_token_ids=(END,), lookahead=lookahead
        )
        return EngineCore(Scheduler(limits, kv, ArrivalOrder()), executor, Intake(SIZE, 64, grammars=output))

    @staticmethod
    def run(engine: EngineCore, requests: Sequence[EngineRequest]) -> Answers:
        """id -> tokens, and the event that it ended with."""
        for request in requests:
            engine.add(request)
        found: Answers = {}
        until = time.monotonic() + SECONDS
        while engine.has_work():
            assert time.monotonic() < until, "requests wait for ever"
            events = engine.step()
            for event in events:
                tokens, _ = found.setdefault(event.id, ([], None))
                tokens += event.tokens
                if event.finish:
                    found[event.id] = (tokens, event)
            engine.scheduler.check()
            if not events:
                time.sleep(0.001)  # while grammars are compiled
        return found

    def test_it_is_what_the_engine_calls(self, output: StructuredOutput) -> None:
        assert not (wrong := wrong_methods(output, StructuredOutput)), wrong
        assert not output.broken

    @pytest.mark.parametrize("num_blocks", [40, 12])
    def test_constrained_and_free_requests_share_steps(self, output: StructuredOutput, num_blocks: int) -> None:
        """With room for all, and where rows are preempted: the free ones say what they say without it."""
        periods = {f"r{i:02}": (None, "2", "3", "7")[i % 4] for i in range(12)}
        found = self.run(self.engine(output, num_blocks), [asked(id, period) for id, period in periods.items()])
        alone = self.run(self.engine(output, num_blocks), [asked(id, None) for id in periods])
        for id, period in periods.items():
            tokens, event = found[id]
            assert event.finish in ("stop", "length"), event.error
            if period:
                assert_stairs(tokens, int(period), event.finish)
            else:
                assert tokens == alone[id][0], f"{id} asked for no grammar and got another text"

    def test_what_cannot_be_compiled_fails_alone(self, output: StructuredOutput) -> None:
        requests = [asked("bad", "no number"), asked("good", "3"), asked("free", None)]
        found = self.run(self.engine(output), requests)
        error = found["bad"][1].error
        assert found["bad"][1].finish == "error"
        assert "not a number" in error.message, f"the reason is missing: {error.message}"
        assert_stairs(found["good"][0], 3, found["good"][1].finish)
        assert found["free"][1].finish in ("stop", "length")

    def test_without_a_backend_a_grammar_is_refused(self, make: Callable[..., StructuredOutput]) -> None:
        """Never ignored."""
        engine = self.engine(make(backends=()))
        found = self.run(engine, [asked("g", "3"), asked("free", None)])
        assert found["g"][1].finish == "error"
        assert found["free"][1].finish in ("stop", "length")

    def test_tokens_that_must_follow_change_none(
        self, output: StructuredOutput, make: Callable[..., StructuredOutput]
    ) -> None:
        requests = [asked(f"r{i:02}", ("70", None, "90", "3")[i % 4], max_tokens=30) for i in range(8)]
        plain = self.run(self.engine(output), requests)
        jumped = self.run(self.engine(make(max_rows=16), max_rows=16, lookahead=16), requests)
        assert {id: (tokens, event.finish) for id, (tokens, event) in jumped.items()} == {
            id: (tokens, event.finish) for id, (tokens, event) in plain.items()
        }

    def test_masks_belong_to_their_rows(self, output: StructuredOutput) -> None:
        """Each row that samples under a grammar has one, in the order of the plan, 32 tokens in each int32."""
        for id, period in (("a", "2"), ("b", "3")):
            self.admitted(output, id, period)
        rows = [
            RowWork(id, 0, 0, 3, [], sample) for id, sample in (("free", True), ("b", True), ("a", True), ("a", False))
        ]
        plan = StepPlan(0, new=[self.row(id) for id in ("free", "a", "b")], rows=rows[:3])
        assert output.concerns(plan)
        masks = output.fill(plan)
        assert masks is not None
        assert list(masks.rows) == [1, 2], f"masks of rows {list(masks.rows)}, not of 1 and 2"
        words = np.frombuffer(masks.bits, np.int32).reshape(2, -1)
        assert words.shape[1] == -(-SIZE // 32), "32 tokens in each int32"
        for word, step in zip(words, (3, 2), strict=True):
            allowed = np.flatnonzero(np.unpackbits(word.view(np.uint8), bitorder="little"))
            assert set(allowed) - {END} == set(range(0, SIZE, step)) - {END}, f"of period {step}: {allowed}"
        assert not output.concerns(StepPlan(1, rows=rows[:1])), "a plan of free rows concerns it"
        output.release(["a", "b"])
        output.release(["a", "b", "unknown"])
        assert not output.concerns(plan), "released requests are followed"

    @staticmethod
    def row(id: str) -> NewRow:
        return NewRow(id, 0, [7, 1, 1], 3, [[1]], 0, SamplingParams())

    @classmethod
    def admitted(cls, output: StructuredOutput, id: str, period: str) -> Any:
        """A request whose gate has opened."""
        from lmkit.scheduling.request import Request

        request = Request(id, asked(id, period).params, 3, [7, 1, 1])
        gate, until = output.gate(request), time.monotonic() + SECONDS
        while not gate.ready():
            assert gate.error() is None
            assert time.monotonic() < until, "the gate never opens"
            time.sleep(0.001)
        return request

    def test_tools_beside_the_engine_compile(self, output: StructuredOutput) -> None:
        assert output.compile(Grammar("regex", "3"), SECONDS).matcher().accept([0, 1, 2]) == 3
        with pytest.raises(GrammarError):
            output.compile(Grammar("regex", "none"), SECONDS)

    def test_close(self, make: Callable[..., StructuredOutput]) -> None:
        output = make()
        output.close()
        output.close()


__all__ = ["StructuredOutputConformance"]
