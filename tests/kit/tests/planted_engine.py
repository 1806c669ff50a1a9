"""Plugins of the engine that are wrong on purpose, each a good one with one fault: the kit must find it.

Not collected as such: test_planted.py runs of each the check that must fail. `tools/sync.py` makes
docs/reference/kits.md of this file. What the good ones are is shown by their own tests, which pass the same checks.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import StepResult
from lmkit.scheduling.scheduler import Scheduler
from lmkit_layers.experts import Experts
from lmkit_testing import (
    AttentionConformance,
    ExecutorConformance,
    GrammarConformance,
    KVConnectorConformance,
    LinearConformance,
    LoaderConformance,
    LogitsProcessorConformance,
    ModelConformance,
    PlatformConformance,
    ProposerConformance,
    QuantizationConformance,
    SchedulerConformance,
)
from lmkit_testing.model import load_tiny
from lmkit_testing.planted import Planted, good

# -------------------------------------------------------------------------------------------------------- attention


class TorchAttention(Planted, AttentionConformance):
    plugin = "attention:torch"


class WrongMask(TorchAttention):
    """A token sees those that follow it"""

    fails = "test_declared_grid"

    class Fault:
        def planner(self, need: Any, limits: Any, platform: Any) -> Any:
            return super().planner(replace(need, causal=False), limits, platform)


class WindowIgnored(TorchAttention):
    """The window of a layer is ignored"""

    fails = "test_declared_grid"

    class Fault:
        def planner(self, need: Any, limits: Any, platform: Any) -> Any:
            return super().planner(replace(need, window=None, chunked=False), limits, platform)


class SlotOffByOne(TorchAttention):
    """Keys and values are written one slot too far"""

    fails = "test_declared_grid"

    class Fault:
        def write_kv(self, k: Any, v: Any, kv: Any, slots: Any) -> None:
            super().write_kv(k, v, kv, slots + 1)


class PaddingIsWritten(TorchAttention):
    """Slot -1 is written into the last block, as Python counts"""

    fails = "test_slot_minus_one_is_nobodys"

    class Fault:
        def write_kv(self, k: Any, v: Any, kv: Any, slots: Any) -> None:
            super().write_kv(k, v, kv, slots % (kv.shape[0] * kv.shape[1]))


class RefusedLate(TorchAttention):
    """Declares float16, and refuses it once it is loaded"""

    fails = "test_selection_knows_what_cannot_run"

    class Fault:
        def can_run(self, need: Any, device: Any) -> str | None:
            return "float16 is not for me" if need.dtype == "float16" else super().can_run(need, device)


class WithoutOut(TorchAttention):
    """`forward` returns its result, and takes no `out`"""

    fails = "test_signatures_are_those_of_the_protocol"

    class Fault:
        def forward(self, q: Any, kv: Any, plan: Any, scale: float) -> Any:
            return q


# ------------------------------------------------------------------------- platform, operators, quantization, loader


class CpuPlatform(Planted, PlatformConformance):
    plugin = "platform:cpu"


class AllPushed:
    """A buffer that pushes more than it was asked to."""

    def __init__(self, buffer: Any) -> None:
        self.host, self.device = buffer.host, buffer.device
        self._all = lambda: buffer.push(len(buffer.host))

    def push(self, n: int) -> Any:
        return self._all()


class PushesAll(CpuPlatform):
    """`Buffer.push(n)` gives all rows, not n"""

    fails = "test_buffer_contract"

    class Fault:
        def buffer(self, shape: Any, dtype: Any) -> Any:
            return AllPushed(super().buffer(shape, dtype))


class UnknownDefault(CpuPlatform):
    """Proposes a key that no configuration has"""

    fails = "test_defaults_are_configuration_keys"

    class Fault:
        def defaults(self, model: Any, device: Any) -> Any:
            return {**super().defaults(model, device), "cache.blocksize": 16}


class Reference(Planted, LinearConformance):
    plugin = "op:linear_reference"


class BiasForgotten(Reference):
    """The bias is left out"""

    fails = "test_products"

    class Fault:
        def apply(self, x: Any, weight: Any, bias: Any) -> Any:
            return super().apply(x, weight, None)


class WritesItsInput(Reference):
    """The input is scaled in place"""

    fails = "test_inputs_stay_as_they_are"

    class Fault:
        def apply(self, x: Any, weight: Any, bias: Any) -> Any:
            return super().apply(x.mul_(2), weight, bias) / 2


class HidesNaN(Reference):
    """What is no number becomes zero"""

    fails = "test_what_is_not_finite_shows"

    class Fault:
        def apply(self, x: Any, weight: Any, bias: Any) -> Any:
            return super().apply(x.nan_to_num(), weight, bias)


class Fp8(Planted, QuantizationConformance):
    plugin = "quantization:fp8"
    configs = {"online": {}}
    kernels = ("fp8_weights",)


class WrongScale(Fp8):
    """Weights are half of what the scales say"""

    fails = "test_kernel_equals_dequantized_matmul"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        def halved(fmt: Any) -> Any:
            class Wrong(type(fmt)):  # type: ignore[misc]
                __slots__ = ()

                def dequantize(self, params: Any, dtype: Any) -> Any:
                    return super().dequantize(params, dtype) / 2

            made = copy.copy(fmt)
            object.__setattr__(made, "__class__", Wrong)
            return made

        class Scheme(base):  # type: ignore[misc]
            def for_layer(self, layer: Any) -> Any:
                return halved(super().for_layer(layer))

        return Scheme


class LaxScheme(Fp8):
    """Keys of the configuration that it does not know are ignored"""

    fails = "test_parse_is_strict"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        class Wrong(base):  # type: ignore[misc]
            @classmethod
            def parse(cls, config: Any) -> Any:
                return base.parse({key: value for key, value in config.items() if key != "key_of_the_future"})

        return Wrong


class Safetensors(Planted, LoaderConformance):
    plugin = "loader:safetensors"

    def loader(self) -> Any:
        return self.wrong(good(self.plugin))()


class SwapsTensors(Safetensors):
    """Keys and values, which have the same shape, are swapped"""

    fails = "test_same_tensors"

    class Fault:
        def read(self, entry: Any) -> Any:
            name = entry.name.replace("k_proj", "v_proj") if "k_proj" in entry.name else entry.name
            other = next((e for e in self.all if e.name == name), entry)
            return super().read(other)

        def tensors(self, checkpoint: Any) -> Any:
            self.all = super().tensors(checkpoint)
            return self.all


class OneBuffer(Safetensors):
    """Every tensor is read into the same memory"""

    fails = "test_tensors_outlive_their_loader"

    class Fault:
        memory = torch.empty(1 << 20, dtype=torch.uint8)

        def read(self, entry: Any) -> Any:
            value = super().read(entry)
            if not value.numel():
                return value
            out = self.memory[: value.nbytes].view(value.dtype).view(value.shape)
            return out.copy_(value)


# ------------------------------------------------------------------------------- proposer, processor, connector


class Ngram(Planted, ProposerConformance):
    plugin = "proposer:ngram"


class TooMany(Ngram):
    """Proposes one token more than was asked for"""

    fails = "test_rows_come_grow_and_leave"

    class Fault:
        def propose(self, texts: Any, most: Any) -> Any:
            return [[*guess, 1] for guess in super().propose(texts, most)]


class WritesTexts(Ngram):
    """Writes into the text of a row"""

    fails = "test_rows_come_grow_and_leave"

    class Fault:
        def propose(self, texts: Any, most: Any) -> Any:
            found = super().propose(texts, most)
            texts[0][-1] += 1
            return found


class Dice(Ngram):
    """What it says depends on how often it was asked"""

    fails = "test_what_is_seen_decides"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        calls = count()

        class Wrong(base):  # type: ignore[misc]
            def propose(self, texts: Any, most: Any) -> Any:
                return [[next(calls) % 7] for _ in texts]

        return Wrong


class NoRepeat(Planted, LogitsProcessorConformance):
    plugin = "logits_processor:no_repeat_ngram"
    asked = ({"size": 1}, {"size": 3})
    refused = ({"size": 0},)


class LeaksBetweenRows(NoRepeat):
    """All rows get what the first one has said"""

    fails = "test_rows_stand_alone"

    class Fault:
        def apply(self, logits: Any, ctx: Any) -> None:
            super().apply(logits, replace(ctx, tokens=lambda row: ctx.tokens(0)))


class SlotRemembered(NoRepeat):
    """What a slot's last row said counts for the next one"""

    fails = "test_a_slot_is_forgotten"

    class Fault:
        def __init__(self) -> None:
            super().__init__()
            self.said: dict[int, list[int]] = {}

        def apply(self, logits: Any, ctx: Any) -> None:
            for row, slot in enumerate(ctx.slots):
                self.said[slot] = [*self.said.get(slot, []), *ctx.tokens(row)]
            super().apply(logits, replace(ctx, tokens=lambda row: self.said[ctx.slots[row]]))


class PlusInfinity(NoRepeat):
    """Forces a token with plus infinity"""

    fails = "test_logits_stay_numbers"

    class Fault:
        def apply(self, logits: Any, ctx: Any) -> None:
            logits[:, 0] = torch.inf


class Offload(Planted, KVConnectorConformance):
    plugin = "kv_connector:offload"


class StaleBlocks(Offload):
    """A block that is asked for is the one that was saved before it"""

    fails = "test_what_is_saved_is_found"

    class Fault:
        def save(self, blocks: Any) -> None:
            contents = [content for _, content in blocks]
            super().save([(key, old) for (key, _), old in zip(blocks, contents[-2:] + contents, strict=False)])


class OneFingerprint(Offload):
    """Engines with other layouts share its blocks"""

    fails = "test_fingerprint"

    class Fault:
        fingerprint = property(lambda self: "the same", lambda self, value: None)


class EndsOnce(Offload):
    """`close` may be called once only"""

    fails = "test_close"

    class Fault:
        closed = False

        def close(self) -> None:
            if self.closed:
                raise RuntimeError("closed already")
            self.closed = True
            super().close()


# ----------------------------------------------------------------------------------- executor, scheduler, grammar


class Uniproc(Planted, ExecutorConformance):
    plugin = "executor:uniproc"


class Reorders(Uniproc):
    """The rows of a result stand in another order than those of the plan"""

    fails = "test_tokens_are_those_of_one_process"

    class Fault:
        def sample(self, step: int, masks: Any) -> Any:
            future = super().sample(step, masks)
            result: StepResult = future.result()
            result.tokens.reverse()
            return future


class Fcfs(Planted, SchedulerConformance):
    plugin = "scheduler:fcfs"


class Starves(Fcfs):
    """Requests of low priority are never begun"""

    fails = "test_same_story_same_plans"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        class Wrong(Scheduler):
            def __init__(self, limits: Any, kv: Any, **_: Any) -> None:
                super().__init__(limits, kv, base())

            def add(self, request: Any) -> Any:
                return None if request.id.endswith("3") else super().add(request)

        return Wrong


class MovingKeys(Fcfs):
    """The place of a request is another one each time it is asked for"""

    fails = "test_keys_are_stable_and_comparable"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        asked = count()

        class Wrong(base):  # type: ignore[misc]
            def admit_key(self, request: Any) -> Any:
                return (next(asked),)

        return Wrong


class Matched:
    """A matcher that does what another one does."""

    def __init__(self, matcher: Any) -> None:
        self.m = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.m, name)


class LlGuidance(Planted, GrammarConformance):
    plugin = "grammar:llguidance"
    matcher: ClassVar[Callable[[Any], Any]]

    def backend(self, vocabulary: Any) -> Any:
        made, matcher = good(self.plugin)(vocabulary), type(self).matcher

        class Compiled:
            def __init__(self, compiled: Any) -> None:
                self._compiled, self.nbytes = compiled, compiled.nbytes

            def matcher(self) -> Any:
                return matcher(self._compiled.matcher())

        class Backend:
            kinds = made.kinds
            compile = staticmethod(made.compile)

            def load(self, compiled: bytes) -> Any:
                return Compiled(made.load(compiled))

        return Backend()


class AcceptsTooMuch(LlGuidance):
    """The matcher says that it took all, whatever came"""

    fails = "test_accept_stops_at_the_first_that_does_not_fit"

    class matcher(Matched):  # noqa: N801
        def accept(self, ids: Any) -> int:
            self.m.accept(ids)
            return len(ids)


class MaskTooWide(LlGuidance):
    """The mask allows all bytes"""

    fails = "test_masks_say_what_is_accepted"

    class matcher(Matched):  # noqa: N801
        def fill(self, row: Any) -> None:
            row[:] = -1


class TakesNothingBack(LlGuidance):
    """Tokens that are taken back stay"""

    fails = "test_rollback_is_as_if_it_had_not_been"

    class matcher(Matched):  # noqa: N801
        def rollback(self, n: int) -> None:
            """Nothing."""


# ------------------------------------------------------------------------------------------------------------ model


class Llama(ModelConformance):
    plugin = "model:LlamaForCausalLM"


class AnotherBase(Llama):
    """Rotary positions turn with another base than the checkpoint's"""

    fails = "test_float32"

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, directory: Path, spec: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
        folder = shutil.copytree(directory, tmp_path_factory.mktemp("wrong") / "model")
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"] = {**config.get("rope_parameters", {}), "rope_type": "default", "rope_theta": 100.0}
        (folder / "config.json").write_text(json.dumps(config))
        return load_tiny(folder, spec.target, "float32")


class Mixtral(ModelConformance):
    plugin = "model:MixtralForCausalLM"
    place: ClassVar[int]  # where both ranks believe the first expert to be

    @pytest.fixture(autouse=True)
    def fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def here(experts: Any, ids: Any) -> Any:
            numbers = experts.numbers.clone()
            numbers[0] = self.place
            return numbers[ids]

        monkeypatch.setattr(Experts, "here", lambda self, ids: ids if self.numbers is None else here(self, ids))


class ExpertTwice(Mixtral):
    """Of experts that are dealt out to ranks, one is counted twice"""

    fails = "test_two_ranks_with_half_of_the_experts_equal_one"
    place = 0


class ExpertNowhere(Mixtral):
    """Of experts that are dealt out to ranks, one is on none of them"""

    fails = "test_two_ranks_with_half_of_the_experts_equal_one"
    place = -1
