"""Every hook a plugin can implement, with an example that runs: the tests extract each one, install it and use it.

Registration hooks (one per kind) take no arguments, return specs, and are pure: the host may call them again. Behaviour
hooks belong to the group `lmkit.extension`, and to any plugin that was selected. No hook is called per step or per
token: such work goes through the selected object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from pathlib import Path

    from lmkit.api import (
        AttentionSpec,
        BenchmarkSpec,
        Checkpoint,
        CheckpointOptions,
        CommandSpec,
        ConfigProposal,
        DoctorCheck,
        ExecutorSpec,
        GrammarBackendSpec,
        KVConnectorSpec,
        LoaderSpec,
        ModelInfo,
        ModelSpec,
        OpSpec,
        PlatformSpec,
        ProposerSpec,
        QuantizationSpec,
        ReasoningParserSpec,
        ResolvedPlan,
        SchedulerSpec,
        Tokenizer,
        ToolParserSpec,
    )
    from lmkit.config import EngineConfig

hookspec = HookspecMarker("lmkit")

REGISTRATION: Mapping[str, str] = {
    "platform": "lmkit_platforms",
    "attention": "lmkit_attention_backends",
    "quantization": "lmkit_quantization_methods",
    "model": "lmkit_models",
    "tool_parser": "lmkit_tool_parsers",
    "reasoning_parser": "lmkit_reasoning_parsers",
    "scheduler": "lmkit_schedulers",
    "loader": "lmkit_loaders",
    "op": "lmkit_ops",
    "executor": "lmkit_executors",
    "grammar": "lmkit_grammars",
    "proposer": "lmkit_proposers",
    "kv_connector": "lmkit_kv_connectors",
}
KINDS: tuple[str, ...] = (*REGISTRATION, "extension")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What observers learn of an engine. Set by the engine's builder."""

    model: str
    plan: ResolvedPlan
    num_kv_tokens: int = 0
    max_length: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One finished request. Times are seconds of a monotonic clock since arrival."""

    id: str
    finish: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token: float | None = None
    total: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict)


class LmkitSpecs(Protocol):
    """The hooks. Entry-point group and hook name of each kind are in `REGISTRATION`."""

    # ------------------------------------------------------------------------------------------- registration

    @hookspec
    def lmkit_platforms(self) -> Iterable[PlatformSpec]:
        """Kinds of device. `probe` says, without torch and without a device context, which devices are here.

        Example, entry point `[project.entry-points."lmkit.platform"] toy = "toy_platform.hooks"`::

            from lmkit.api import DeviceInfo, PlatformSpec, Tier, hookimpl


            def probe():
                return [DeviceInfo(platform="toy", device_type="cpu", dtypes=("float32",))]


            @hookimpl
            def lmkit_platforms():
                yield PlatformSpec(
                    name="toy", summary="A pretend device", target="toy_platform.device:ToyPlatform",
                    probe=f"{__name__}:probe", device_type="cpu", tier=Tier.REFERENCE,
                )
        """

    @hookspec
    def lmkit_attention_backends(self) -> Iterable[AttentionSpec]:
        """Paged attention. What a spec does not declare (a dtype, a feature) is refused, never tried.

        Example, entry point `[project.entry-points."lmkit.attention"] toy = "toy_attention.hooks"`::

            from lmkit.api import AttentionSpec, Tier, hookimpl, multiple_of


            @hookimpl
            def lmkit_attention_backends():
                yield AttentionSpec(
                    name="toy", summary="Attention by the book", target="toy_attention.backend:ToyAttention",
                    tier=Tier.REFERENCE, dtypes=frozenset({"float32", "bfloat16"}),
                    head_dims=multiple_of(8, max=256), features=frozenset({"causal", "sliding_window"}),
                )
        """

    @hookspec
    def lmkit_quantization_methods(self) -> Iterable[QuantizationSpec]:
        """Checkpoint formats of quantized weights, claimed by `quantization_config.quant_method`.

        Example, entry point `[project.entry-points."lmkit.quantization"] toy4 = "toy_quant.hooks"`::

            from lmkit.api import QuantizationSpec, Tier, hookimpl


            @hookimpl
            def lmkit_quantization_methods():
                yield QuantizationSpec(
                    name="toy4", summary="Four bits, toy layout", target="toy_quant.scheme:Toy4",
                    tier=Tier.PORTABLE, checkpoint_methods=("toy4",), weight_formats=("toy4_packed",),
                )
        """

    @hookspec
    def lmkit_models(self) -> Iterable[ModelSpec]:
        """Model families. One entry point per architecture string; its name must be in `architectures`.

        Example, entry point `[project.entry-points."lmkit.model"] ToyForCausalLM = "toy_model.hooks"`::

            from lmkit.api import ModelSpec, hookimpl


            @hookimpl
            def lmkit_models():
                yield ModelSpec(
                    name="toy", summary="Toy decoder", target="toy_model.model:Toy",
                    architectures=("ToyForCausalLM",),
                )
        """

    @hookspec
    def lmkit_tool_parsers(self) -> Iterable[ToolParserSpec]:
        """How a model family writes tool calls. `models` and `markers` let `auto` find the format.

        Example, entry point `[project.entry-points."lmkit.tool_parser"] toy = "toy_parser.hooks"`::

            from lmkit.api import ToolParserSpec, hookimpl


            @hookimpl
            def lmkit_tool_parsers():
                yield ToolParserSpec(
                    name="toy", summary="<call>{...}</call>", target="toy_parser.formats:TOY",
                    models=("Toy*",), markers=("<call>",),
                )
        """

    @hookspec
    def lmkit_reasoning_parsers(self) -> Iterable[ReasoningParserSpec]:
        """How a model family marks its reasoning.

        Example, entry point `[project.entry-points."lmkit.reasoning_parser"] toy = "toy_parser.hooks"`::

            from lmkit.api import ReasoningParserSpec, hookimpl


            @hookimpl
            def lmkit_reasoning_parsers():
                yield ReasoningParserSpec(
                    name="toy", summary="<mull>...</mull>", target="toy_parser.formats:MULL", markers=("<mull>",),
                )
        """

    @hookspec
    def lmkit_schedulers(self) -> Iterable[SchedulerSpec]:
        """Order policies (two key functions), or, rarely, whole schedulers.

        Example, entry point `[project.entry-points."lmkit.scheduler"] shortest = "shortest.hooks"`::

            from lmkit.api import SchedulerSpec, Tier, hookimpl


            @hookimpl
            def lmkit_schedulers():
                yield SchedulerSpec(
                    name="shortest", summary="Shortest prompt first", target="shortest.policy:Shortest",
                    tier=Tier.PORTABLE, provides="policy",
                )
        """

    @hookspec
    def lmkit_loaders(self) -> Iterable[LoaderSpec]:
        """Readers of checkpoint files. `formats` are values of `Checkpoint.format`.

        Example, entry point `[project.entry-points."lmkit.loader"] toyfile = "toy_loader.hooks"`::

            from lmkit.api import LoaderSpec, hookimpl


            @hookimpl
            def lmkit_loaders():
                yield LoaderSpec(
                    name="toyfile", summary="Reads .toy files", target="toy_loader.loader:ToyLoader",
                    formats=("toy",),
                )
        """

    @hookspec
    def lmkit_ops(self) -> Iterable[OpSpec]:
        """Kernels of one operation: `op="linear"` runs a weight format on a device.

        Example, entry point `[project.entry-points."lmkit.op"] toy_linear = "toy_ops.hooks"`::

            from lmkit.api import OpSpec, Tier, hookimpl


            @hookimpl
            def lmkit_ops():
                yield OpSpec(
                    name="toy_linear", summary="Linear for toy4 weights", target="toy_ops.linear:ToyLinear",
                    op="linear", formats=frozenset({"toy4_packed"}), tier=Tier.OPTIMIZED,
                )
        """

    @hookspec
    def lmkit_executors(self) -> Iterable[ExecutorSpec]:
        """Where workers run: in this process, in others, on other hosts.

        Example, entry point `[project.entry-points."lmkit.executor"] threads = "toy_executor.hooks"`::

            from lmkit.api import ExecutorSpec, hookimpl


            @hookimpl
            def lmkit_executors():
                yield ExecutorSpec(
                    name="threads", summary="One worker per thread", target="toy_executor.run:Threads", max_ranks=8,
                )
        """

    @hookspec
    def lmkit_grammars(self) -> Iterable[GrammarBackendSpec]:
        """Compilers of constraints on the output; chosen per request by `Grammar.kind`.

        Example, entry point `[project.entry-points."lmkit.grammar"] tiny = "toy_grammar.hooks"`::

            from lmkit.api import GrammarBackendSpec, hookimpl


            @hookimpl
            def lmkit_grammars():
                yield GrammarBackendSpec(
                    name="tiny", summary="Choices only", target="toy_grammar.backend:Tiny",
                    kinds=frozenset({"choice"}),
                )
        """

    @hookspec
    def lmkit_proposers(self) -> Iterable[ProposerSpec]:
        """Sources of draft tokens for speculative decoding.

        Example, entry point `[project.entry-points."lmkit.proposer"] echo = "toy_proposer.hooks"`::

            from lmkit.api import ProposerSpec, hookimpl


            @hookimpl
            def lmkit_proposers():
                yield ProposerSpec(
                    name="echo", summary="Proposes the last token again", target="toy_proposer.echo:Echo",
                )
        """

    @hookspec
    def lmkit_kv_connectors(self) -> Iterable[KVConnectorSpec]:
        """Movers of KV blocks between engines or to storage: two halves joined by opaque data.

        Example, entry point `[project.entry-points."lmkit.kv_connector"] shelf = "toy_connector.hooks"`::

            from lmkit.api import KVConnectorSpec, hookimpl


            @hookimpl
            def lmkit_kv_connectors():
                yield KVConnectorSpec(
                    name="shelf", summary="KV blocks in local files", target="toy_connector.shelf:Shelf",
                )
        """

    # ---------------------------------------------------------------------------------------------- behaviour

    @hookspec
    def lmkit_configure(
        self, config: EngineConfig, plan: ResolvedPlan, info: ModelInfo
    ) -> Iterable[ConfigProposal] | None:
        """Propose configuration values once device, model and implementations are known; the user's values win.

        `plan` holds the choices made so far. Keys that can be proposed: `lmkit.plugins.proposals.PROPOSABLE`.

        Example, entry point `[project.entry-points."lmkit.extension"] big_steps = "big_steps.hooks"`::

            from lmkit.api import ConfigProposal, hookimpl


            @hookimpl
            def lmkit_configure(config, plan, info):
                if info.num_parameters < 10_000_000:
                    yield ConfigProposal("sched.max_tokens", 1024, "a small model has time for long steps")
        """

    @hookspec(firstresult=True)
    def lmkit_resolve_checkpoint(self, ref: str, options: CheckpointOptions) -> Checkpoint | None:
        """Find a checkpoint by what the user wrote; None = not mine, ask the next. Nothing heavy is read.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_store = "toy_store.hooks"`::

            from pathlib import Path

            from lmkit.api import Checkpoint, hookimpl


            @hookimpl
            def lmkit_resolve_checkpoint(ref, options):
                if not ref.startswith("toy://"):
                    return None
                config = {"architectures": ["ToyForCausalLM"]}
                return Checkpoint(ref=ref, path=Path(), format="toy", config=config)
        """

    @hookspec(firstresult=True)
    def lmkit_load_tokenizer(self, checkpoint: Checkpoint) -> Tokenizer | None:
        """A tokenizer for a checkpoint whose files the core does not know; None = not mine.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_tokens = "toy_tokens.hooks"`::

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_load_tokenizer(checkpoint):
                if checkpoint.format != "toy":
                    return None
                from toy_tokens.tokenizer import ToyTokenizer

                return ToyTokenizer(checkpoint.path)
        """

    @hookspec(firstresult=True)
    def lmkit_chat_template(self, checkpoint: Checkpoint) -> str | None:
        """The Jinja chat template of a checkpoint that carries none, or a better one; None = not mine.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_chat = "toy_chat.hooks"`::

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_chat_template(checkpoint):
                if checkpoint.architecture != "ToyForCausalLM":
                    return None
                return "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"
        """

    @hookspec(firstresult=True)
    def lmkit_read_template(self, file: Path) -> str | None:
        """The Jinja chat template in a file that is not a template itself (--chat-template FILE); None = not mine.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_file = "toy_file.hooks"`::

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_read_template(file):
                if file.suffix != ".toy":
                    return None
                return file.read_bytes()[4:].decode()
        """

    @hookspec
    def lmkit_engine_started(self, info: EngineInfo) -> None:
        """An engine is ready. An observer: exceptions are logged, never fatal.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_log = "toy_log.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_engine_started(info):
                logging.getLogger("toy_log").info("engine for %s is up", info.model)
        """

    @hookspec
    def lmkit_request_finished(self, stats: RequestStats) -> None:
        """A request finished. An observer; called only if somebody implements it.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_stats = "toy_stats.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_request_finished(stats):
                logging.getLogger("toy_stats").info("%s: %d tokens", stats.id, stats.num_output_tokens)
        """

    @hookspec
    def lmkit_engine_stopping(self, info: EngineInfo) -> None:
        """An engine is about to stop. An observer.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_bye = "toy_bye.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_engine_stopping(info):
                logging.getLogger("toy_bye").info("engine for %s stops", info.model)
        """

    @hookspec
    def lmkit_commands(self) -> Iterable[CommandSpec]:
        """Subcommands of `lmkit`. The target is imported when the command runs.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_cli = "toy_cli.hooks"`::

            from lmkit.api import CommandSpec, hookimpl


            @hookimpl
            def lmkit_commands():
                yield CommandSpec(name="toy", summary="Plays with toys", target="toy_cli.commands:app")
        """

    @hookspec
    def lmkit_benchmarks(self) -> Iterable[BenchmarkSpec]:
        """Kernels that `lmkit bench kernels` measures beside the registered linear and attention kernels.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_speed = "toy_speed.hooks"`::

            from lmkit.api import BenchmarkCase, BenchmarkSpec, hookimpl


            def cases():
                data = bytes(1 << 20)
                yield BenchmarkCase(name="count zeros", run=lambda: data.count(0), bytes=len(data))


            @hookimpl
            def lmkit_benchmarks():
                yield BenchmarkSpec(name="toy", summary="Counting", target=f"{__name__}:cases")
        """

    @hookspec
    def lmkit_doctor_checks(self) -> Iterable[DoctorCheck]:
        """Health checks run by `lmkit plugins doctor`: a function that returns None or the problem as a string.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_health = "toy_health.hooks"`::

            from lmkit.api import DoctorCheck, hookimpl


            def battery():
                return None


            @hookimpl
            def lmkit_doctor_checks():
                yield DoctorCheck(name="battery", summary="The toy has power", target=f"{__name__}:battery")
        """
