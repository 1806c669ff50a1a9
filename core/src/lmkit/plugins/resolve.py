"""The resolver: everything that can be chosen, chosen once, in the parent process, without torch.

The order is that of knowledge: device, checkpoint, model, dtypes, attention, quantization and kernels, the rest, then
the values that follow. `Resolver` keeps the story of every selection for `explain`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec

from lmkit.api import (
    AttentionSpec,
    Checkpoint,
    CheckpointError,
    CheckpointOptions,
    Choice,
    ConfigError,
    ConfigProposal,
    Derived,
    DeviceInfo,
    Dims,
    Draft,
    LinearSpec,
    LmkitError,
    ModelInfo,
    ModelRequest,
    ModelSpec,
    OpRequest,
    OpSpec,
    ParserRequest,
    PlatformSpec,
    PluginError,
    PoolingTask,
    QuantizationSpec,
    QuantScheme,
    Refusal,
    Refused,
    ResolvedPlan,
    SelectionError,
    SelectRequest,
    Spec,
    Tier,
    UnknownArchitecture,
    UnknownKey,
    UnknownName,
    blaming,
    canonical,
    itemsize,
    make_target,
    nearest,
    owner_of,
)
from lmkit.config import STEP_TOKENS, EngineConfig
from lmkit.contracts.describe import described, joined
from lmkit.contracts.specs import NAME
from lmkit.files import chat_templates
from lmkit.generation import end_ids, recommended
from lmkit.kinds import BY_NAME, KINDS, Kind, Known, in_order, op, proposer, template
from lmkit.plugins.catalog import install_command
from lmkit.plugins.chat_templates import chosen_template
from lmkit.plugins.host import PluginHost
from lmkit.plugins.naming import architecture_of
from lmkit.plugins.options import parse_options
from lmkit.plugins.overrides import overlay, parse_overrides
from lmkit.plugins.parsers import ParserChooser
from lmkit.plugins.platforms import choose_platform, consider_platforms, measured
from lmkit.plugins.pooling import complete_pooler, find_head, max_length
from lmkit.plugins.proposals import PROPOSABLE, merge
from lmkit.plugins.refs import ask, load_ref, load_target
from lmkit.plugins.select import Candidate, Outcome, Wanted, consider, failure, parse_selection

log = logging.getLogger("lmkit.plugins")

END_TOKENS = "lmkit.text.ends:find_ends"  # it renders, which this layer cannot
TOKENIZER_FOLDER = "lmkit.text.side:tokenizer_directory"  # it may be downloaded
CHECK_HEADERS = "lmkit.checkpoint:check_headers"
PARSERS = ("tool_parser", "reasoning_parser")
FACTS = {"checkpoint": (), "files": ("checkpoint",), "dtype": ("model", "platform")}  # steps that choose no plugin
NEEDS: Mapping[str, Sequence[str]] = {kind.name: kind.needs for kind in KINDS} | FACTS
STEPS = in_order(NEEDS)
DRAFT_STEPS = ("checkpoint", "platform", "model", "dtype", "quantization", "loader", "op")


def resolve(
    config: EngineConfig, host: PluginHost | None = None, *, imports: bool = False
) -> tuple[ResolvedPlan, Checkpoint, ModelInfo]:
    """Choose everything for `config`. Raises SelectionError, ConfigError, CheckpointError or PluginError.

    With `imports`, implementations are imported (which loads torch), so that `auto` can pass over one whose import
    fails; without it such a failure surfaces in the worker, as an error that names the plugin.
    """
    resolver = Resolver(config, host or PluginHost(), imports=imports)
    resolver.run()
    return resolver.plan(), resolver.known.checkpoint, resolver.known.info


class Resolver:
    """One resolution. After `run`: `known`, `outcomes`, and `plan()`.

    With `tolerant`, a step that fails is recorded in `errors` and the steps that need its answer are skipped.
    """

    def __init__(
        self, config: EngineConfig, host: PluginHost, *, imports: bool = False, tolerant: bool = False
    ) -> None:
        self.config, self.host, self.imports, self.tolerant = config, host, imports, tolerant
        self.known = Known(config)
        self.outcomes: list[Outcome] = []
        self.ends: Sequence[Any] = ()  # lmkit.text.ends.EndToken: id, token, sources
        self.errors: dict[str, LmkitError] = {}  # step -> why it failed, or why one it needs failed
        self.roots: dict[str, str] = {}  # skipped step -> the step that failed
        self._platform: PlatformSpec | None = None
        self._measured: Mapping[str, tuple[str, ...]] = {}
        self._choices: list[Choice] = []
        self._specs: list[Spec] = []
        self._used_ops: set[Wanted] = set()
        self._stored: set[str] = set()  # formats of weights that some layer has, where kernels are named
        self._parsers: ParserChooser | None = None
        self._derived: list[Derived] = []
        self._warnings: list[str] = []
        self._draft: Draft | None = None

    def run(self, only: Container[str] = STEPS) -> None:
        """All steps, or those of a draft, in order."""
        own: dict[str, Callable[[], None]] = {
            "checkpoint": self._find_checkpoint,
            "files": self._list_files,
            "dtype": self._settle_dtypes,
            "platform": self._choose_platform,
            "model": self._choose_model,
            "op": self._choose_ops,
            "template": self._choose_template,
            "proposer": self._choose_proposer,
        }
        for name in (name for name in STEPS if name in only):
            kind = BY_NAME.get(name)
            if name in own:
                self._step(name, own[name], NEEDS[name])
            elif kind is not None and kind.ask is not None:
                self._step(name, partial(self._choose, kind), NEEDS[name])
        if only is not STEPS:
            return
        self._step("ends", self._find_ends, needs=("model", "platform", "tokenizer", *PARSERS))
        self._step("options", self._check_options)
        self._step("values", self._settle_values, needs=("model", "platform", "attention"))
        for choice in self._choices:
            if choice.kind in ("platform", "attention", "quantization", "model"):
                log.info("%s", describe(choice))

    def plan(self) -> ResolvedPlan:
        """What has been chosen. Needs a device."""
        warnings = dict.fromkeys((*self.host.warnings, *self._warnings))
        choices, derived = tuple(self._choices), tuple(self._derived)
        return ResolvedPlan(self._device(), choices, derived, tuple(warnings), self._draft)

    def _device(self) -> DeviceInfo:
        assert self.known.device is not None
        return self.known.device

    # ------------------------------------------------------------------------------------------------- the steps

    def _choose_platform(self) -> None:
        user, described = self.config.wants("platform"), self.config.device
        if self.tolerant:
            self.outcomes.append(consider_platforms(self.host, user, described)[0])
        outcome, self.known.device = choose_platform(self.host, user, described)
        self._keep(outcome)
        spec = outcome.chosen.spec if outcome.chosen else None
        self._platform = spec if isinstance(spec, PlatformSpec) else None
        self._measured = measured(self._device())

    def _find_checkpoint(self) -> None:
        model = self.config.model
        options = CheckpointOptions(model.revision, model.cache_dir, model.offline, self.config.wants("loader"))
        hint = ""
        if model.model not in self.host.names("extension"):
            hint = install_command("extension", model.model)  # a checkpoint that comes with a plugin
        try:
            found = self.host.first("lmkit_resolve_checkpoint", Checkpoint, ref=model.model, options=options)
        except CheckpointError as e:
            e.fix = hint or e.fix
            raise
        if found is None:
            like = nearest(model.model, self.host.names("extension"))
            raise CheckpointError(
                f"no checkpoint {model.model!r}: neither a directory nor a name that an installed plugin knows",
                fix=hint
                or (f"did you mean {like!r}?" if like else "")
                or "give a directory with config.json, or the id of a hub repository",
            )
        if found.format == "safetensors":
            load_ref(CHECK_HEADERS)(found.files)
        self.known.checkpoint = found
        if text := self.config.model.overrides:
            config = overlay(found.config, parse_overrides(text))
            self.known.checkpoint = replace(found, config=config)
            self._derive("hf_overrides", text, "user")
        checkpoint = self.known.checkpoint
        if not checkpoint.architecture and (name := architecture_of(checkpoint.config, self.host.names("model"))):
            self._name_architecture(name)

    def _name_architecture(self, name: str) -> None:
        """Goes on as if config.json, which names none, named this one."""
        checkpoint = self.known.checkpoint
        self.known.checkpoint = replace(checkpoint, config={**checkpoint.config, "architectures": [name]})
        self._derive(
            "architecture", name, f"model_type {checkpoint.config.get('model_type')!r}: config.json names none"
        )

    def _choose_model(self) -> None:
        checkpoint, parallel = self.known.checkpoint, self.config.parallel
        task, kind = self.config.model.task, checkpoint.config.get("model_type")
        known = self.host.names("model")
        architecture = checkpoint.architecture or (kind if _general(known) and isinstance(kind, str) else "")
        if not architecture:
            missing = "nor a model_type" if kind is None else f"and no installed model is of model_type {kind!r:.80}"
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'} names no architecture, {missing}", fix="add 'architectures'"
            )
        native, head = find_head(checkpoint, known, task)
        native = native or architecture
        name, why = self._implementation(native, known), f"the checkpoint is a {architecture}"
        if name.rpartition("/")[2] != native:
            why = f"{why}, run by {name}"
        request = ModelRequest(architecture=native, device=self.known.device, tp=parallel.tp, pp=parallel.pp)
        outcome = self._consider(request, name)
        choice = outcome.choice(why=why)
        choice = self._keep(outcome, choice)
        spec = outcome.chosen.spec if outcome.chosen else None
        self.known.quantization = spec.quantization if isinstance(spec, ModelSpec) else None
        if head is not None:
            self._derive("head", head, f"made of a {native}")
        try:
            info: ModelInfo = ask(
                f"{owner_of(choice)}: describe", _described, choice, checkpoint.config, head, gives=ModelInfo
            )
        except UnknownArchitecture as e:
            families = {_family(architecture): architecture for architecture in known}
            if name != native and (like := families.get(nearest(_family(native), families) or "")):
                e.fix = f"{e.fix}; nearest of lmkit's own families: {like}"
            raise
        if not checkpoint.architecture:
            self._name_architecture(info.architecture)
        self.known.info = replace(info, pooler=complete_pooler(info, checkpoint, task))
        if self.known.info.pooler is not None:
            why = "the checkpoint's modules and configuration"
            self._derive("pooler", msgspec.to_builtins(self.known.info.pooler), why)

    def _implementation(self, native: str, known: Sequence[str]) -> str:
        """Name of the model plugin: the family's own, or one that runs any. Raises UnknownName for another family's."""
        dist, slash, impl = self.config.model.impl.rpartition("/")
        general = _general(known)
        if impl == "auto" and native not in known and general:
            return general[0]
        if impl in known and impl not in (native, *general):
            raise UnknownName("model implementation", impl, ["auto", "native", *general])
        return dist + slash + (native if impl in ("auto", "native") else impl)

    def _settle_dtypes(self) -> None:
        info, device = self.known.info, self._device()
        asked = canonical(self.config.model.dtype)
        if asked == "auto":
            native = info.dtype in device.dtypes
            self.known.dtype = info.dtype if native else device.dtypes[0]
            source = "the checkpoint's" if native else f"{device.platform} has no {info.dtype} (user: auto)"
        else:
            self.known.dtype, source = asked, "user"
            if asked not in device.dtypes:
                reason = Refusal("dtype", "{" + ",".join(device.dtypes) + "}", asked, f"--dtype {device.dtypes[0]}")
                refused = Refused("platform", device.platform, None, 7, (reason,))
                raise SelectionError(f"dtype {asked!r} cannot be used on {device.platform}", [refused], fix=reason.fix)
        asked = canonical(self.config.cache.dtype)
        self.known.kv_dtype = self.known.dtype if asked == "auto" else asked
        self._derive("dtype", self.known.dtype, source)
        self._derive("kv_dtype", self.known.kv_dtype, "the model's dtype" if asked == "auto" else "user")

    def _choose(self, kind: Kind) -> None:
        """What a kind asks for, as its file says."""
        requests, user = kind.ask(self.known) if kind.ask else (), self.config.wants(kind.name)
        if not requests:
            if user not in ("auto", "none"):
                raise ConfigError(f"{kind.name}: {user!r}: the model has none", fix=f"--{kind.name} auto")
        elif kind.takes == "one" or user not in ("auto", "none"):
            outcome = self._consider(requests, user)
            self._keep(outcome)
            self._warn_reference(outcome)
        elif user == "auto" and self.host.names(kind.name):
            outcome = self._offered(requests[0])
            for candidate in outcome.survivors if kind.takes == "all" else outcome.survivors[:1]:
                self._keep(outcome, outcome.choice(candidate), candidate)

    def _choose_ops(self) -> None:
        """Kernels for each format that the weights may be in; each that the user names has to run some."""
        quantized = [spec for spec in self._specs if isinstance(spec, QuantizationSpec)]
        self.known.formats += tuple(fmt for spec in quantized for fmt in spec.weight_formats)
        self._stored = self._formats_of_layers() if self._wanted_ops() else set()
        for request in op.ask(self.known):
            self._choose_op(request)
        if idle := [str(w) for w in self._wanted_ops() if w not in self._used_ops]:
            needed = (c for c in self._choices if c.kind == "op" and not c.why.startswith("fallback"))
            runs = ", ".join(c.component for c in needed if (c.component.partition(":")[2] or "plain") in self._stored)
            raise ConfigError(
                f"op {', '.join(idle)} has nothing to run: the model needs {runs}", fix="lmkit explain op"
            )

    def _formats_of_layers(self) -> set[str]:
        """What the scheme says that the weights of each layer are in, of a single expert too."""
        info, choice = self.known.info, next((c for c in self._choices if c.kind == "quantization"), None)
        if choice is None:
            return {"plain"}
        declared = self.known.checkpoint.config.get("quantization_config")
        scheme: QuantScheme = load_target(choice).parse(declared or choice.options)
        head = () if declared else (LinearSpec("lm_head", info.hidden_size, (info.vocab_size,)),)
        stacks = [spec for spec in info.linears if spec.experts]
        alone = [replace(s, out_features=s.out_features[: len(s.out_features) // s.experts], experts=0) for s in stacks]
        found = (scheme.for_layer(spec) for spec in (*info.linears, *head, *alone))
        return {"plain"} | {fmt.name for fmt in found if fmt is not None}

    def _wanted_ops(self) -> tuple[Wanted, ...]:
        return parse_selection(self.config.wants("op"))

    def _asked_op(self, request: OpRequest) -> str:
        """Picks among the kernels that the user named those for the request; without one, auto."""
        asked = []
        for wanted in self._wanted_ops():
            entry, _ = self.host.find("op", wanted.name, wanted.dist)
            if entry is None:
                raise UnknownName("op", str(wanted), self.host.names("op"))
            self.host.open(entry)
            spec = entry.spec  # none when it is broken: then this says so
            if not isinstance(spec, OpSpec) or (
                spec.op == request.op and (not spec.formats or request.format in spec.formats)
            ):
                asked.append(wanted)
        if request.format in self._stored and not (request.op == "moe" and self.config.lora.on):  # which it cannot show
            self._used_ops.update(asked)
        return ",".join(map(str, asked)) or "auto"

    def _choose_op(self, request: OpRequest) -> None:
        """All survivors, best first: a kernel may still refuse single layers, which then go to the next.

        Without a kernel for experts, each of them runs on one for linears.
        """
        asked = self._asked_op(request)
        outcome = self._consider(
            request,
            asked,
            only=lambda spec: isinstance(spec, OpSpec) and spec.op == request.op,
            needed=request.op != "moe" or asked != "auto",
        )
        for i, candidate in enumerate(outcome.survivors):
            self._keep(outcome, outcome.choice(candidate, f"fallback {i}" if i else ""), candidate)
        best = outcome.chosen.spec if outcome.chosen else None
        if request.op == "linear" and isinstance(best, OpSpec):
            bits = best.bits.get(request.format) if isinstance(best.bits, Mapping) else best.bits
            if bits is None and best.tier == Tier.REFERENCE:
                bits = 8 * itemsize(self.known.dtype)
            if bits is not None:
                self._derive(f"{request.format}_bits", bits, best.name)

    def _list_files(self) -> None:
        """Names in the tokenizer's folder, or the suffix where it is a file: by them its reader is chosen."""
        folder = load_ref(TOKENIZER_FOLDER)(self.known.checkpoint, self.config.model)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else [folder.suffix.lower()]
        self.known.files = frozenset(names)

    def _choose_proposer(self) -> None:
        """Where it runs a draft, that is resolved like the model, for the same device and in the same dtype."""
        self._choose(proposer.KIND)
        spec, known = self._specs[-1], self.known
        if not isinstance(spec, proposer.ProposerSpec) or spec.draft is None:
            return
        ref, changes = ask(spec.draft, load_ref(spec.draft), known.checkpoint, known.info, self._choices[-1].options)
        model = replace(self.config.model, model=ref, overrides=json.dumps(changes), dtype=known.dtype, impl="auto")
        wanted = {"platform": self.config.wants("platform")}
        draft = Resolver(replace(self.config, model=model, wanted=wanted), self.host, imports=self.imports)
        draft.run(DRAFT_STEPS)
        proposer.check_draft(draft.known.info, known.info, self.config.model.max_length or known.info.max_length)
        self._draft = Draft(draft.plan(), draft.known.checkpoint)
        known.info = joined(known.info, draft.known.info)

    def _choose_template(self) -> None:
        """A plugin's, for the file that the user names or for the checkpoint; without one, files are read as text."""
        checkpoint, num_outcomes = self.known.checkpoint, len(self.outcomes)
        self._choose(template.KIND)
        if not any(choice.kind == "template" for choice in self._choices):
            for outcome in self.outcomes[num_outcomes:]:
                self._check_template_readers(outcome)
        found = chosen_template(self._choices, self.config.model.chat_template, checkpoint)
        self.known.templates = {"default": found} if found is not None else chat_templates(checkpoint.path)

    def _check_template_readers(self, outcome: Outcome) -> None:
        """Where no reader is left: one that is meant for the file or the model, and refused, is not passed over.

        Without it the file would be read as a template's text, or the checkpoint's own template would be used. Raises
        SelectionError. Of a plugin that cannot be loaded nobody knows what it reads: files that usually are a
        template's text are read, with a warning.
        """
        request = outcome.request
        assert isinstance(request, template.TemplateRequest)
        suffix = None if request.suffix is None else request.suffix.lower()
        for candidate in outcome.candidates:
            if candidate.ok or (suffix is None and [r.code for r in candidate.reasons] == ["experimental"]):
                continue
            if isinstance(candidate.spec, template.TemplateSpec):
                meant = not any(template.refusals(candidate.spec, request))
                what = f"reads {suffix} files" if suffix is not None else "brings the template of this model"
            else:
                meant, what = suffix is not None, f"may read {suffix or 'such'} files"
            if not meant:
                continue
            reason = candidate.reasons[0]
            said = (
                f"template plugin {candidate.name!r} ({candidate.dist} {candidate.version}) {what} and cannot be used"
            )
            without = f"start without it: LMKIT_PLUGINS_DISABLE=template:{candidate.name}"
            if candidate.spec is None and suffix in template.TEXT_SUFFIXES:
                self._warnings.append(f"{said}: {reason}")
            else:
                fix = f"{reason.fix}; or {without}" if reason.fix else without
                raise SelectionError(f"{said}: {reason.code}, needs {reason.needed}, has {reason.offered}",
                                     [candidate.refused("template")], fix=fix)  # fmt: skip

    def _find_ends(self) -> None:
        """What the files name, and what the chat template ends a turn with."""
        checkpoint, info = self.known.checkpoint, self.known.info
        if info.pooler is None:
            self._warnings.extend(recommended(checkpoint.generation_config)[1])
        ids = {
            "config": info.eos_token_ids,
            "generation_config": end_ids(checkpoint.generation_config)[0],
        }
        self.ends = load_ref(END_TOKENS)(checkpoint, self.plan(), self.config, info, ids)
        self._derive("eos_token_ids", [end.id for end in self.ends], "; ".join(map(str, self.ends)) or "none is named")

    def _check_options(self) -> None:
        """Options of chosen plugins go into their choices; those of others are checked for existence, or when used."""
        chosen = {f"{c.kind}.{c.name}" for c in self._choices}
        known = {f"{e.kind}.{e.name}" for e in self.host.entries()} | chosen
        later = {kind.name for kind in KINDS if kind.ask is None} - {c.kind for c in self._choices}
        for key in self.config.plugins:
            if key not in known:
                raise UnknownKey(key, known, "options of plugins")
            if key not in chosen and key.partition(".")[0] not in later:
                self._warnings.append(f"options of {key} are not used: it was not chosen")

    def _settle_values(self) -> None:
        config, info = self.config, self.known.info
        attention = [s for s in self._specs if isinstance(s, AttentionSpec)]
        user = {key: attrgetter(key)(config) for key in PROPOSABLE}
        proposals = self.host.gather("lmkit_configure", config=config, plan=self.plan(), info=info)
        for module, proposal in proposals:
            if not isinstance(proposal, ConfigProposal):
                said = f"lmkit_configure of {module} returned {proposal!r:.80}, not a ConfigProposal"
                raise PluginError(said, fix=self.host.without(module))
        proposals += self._platform_defaults()
        proposals = [*self._pooling_defaults(proposals), *proposals]
        dims = attention[0].block_sizes if attention else Dims()
        proposals = [
            (module, p) for module, p in proposals
            if p.key != "cache.block_size" or p.strength == "require" or p.value in dims
        ]  # fmt: skip
        fallback = [Derived("max_step_tokens", STEP_TOKENS, "the core's default (user: auto)")]
        if attention:
            name, size = attention[0].name, attention[0].preferred_block_size
            if size not in dims:
                size = min(dims.values) if dims.values else max(dims.multiple, 1)
            fallback.append(Derived("block_size", size, f"{name} prefers {size} (user: auto)"))
        values = merge(user, proposals, fallback)
        length, block = values.get("model.max_length"), values.get("cache.block_size")
        if length is not None and not 0 < int(length.value) <= info.max_length:
            raise ConfigError(
                f"max_length is {length.value}, the model "
                + (f"runs with at most {info.max_length} here: " if info.length_note else "was made for at most ")
                + (info.length_note or str(info.max_length)),
                fix=f"--max-length {info.max_length}",
            )
        if block is not None and block.value not in dims:
            raise ConfigError(f"block_size is {block.value} ({block.source}), {attention[0].name} needs {dims}")
        if (tokens := config.cache.block_size) is not None and not attention:
            raise ConfigError(f"block_size is {tokens}, the model has no attention", fix="leave it out")
        self._derived.extend(values.values())
        self._settle_cache()

    def _settle_cache(self) -> None:
        """Prefixes can be reused where each position's KV stays what it is; drafts can be taken back there too.

        Of recurrent state copies are kept, which costs memory, and prompts a step more: where that is asked for.
        """
        info, asked = self.known.info, self.config.cache.prefix_cache
        reason = "" if info.causal else "the model's tokens see those that follow"
        state = f"{len(info.recurrent)} layers keep recurrent state, which is that of the last token only"
        if info.recurrent and not info.kv_groups():
            reason = "no layer has attention, so there are no blocks to find"
        if reason and asked:
            raise ConfigError(f"the prefix cache cannot be used: {reason}", fix="leave --prefix-cache out")
        usual = "user" if asked is not None else state if info.recurrent else "the default"
        wanted = not info.recurrent if asked is None else asked
        self._derive("prefix_cache", wanted and not reason, reason or usual)

    def _platform_defaults(self) -> list[tuple[str, ConfigProposal]]:
        """What the platform suggests; its module loads torch in the worker only."""
        choice = next(c for c in self._choices if c.kind == "platform")
        environment, owner = f"{owner_of(choice)}: worker_env", f"{owner_of(choice)}: defaults"
        ask(environment, partial(_environment, choice, self.config), gives=Mapping)  # it may refuse options
        suggested = ask(owner, _defaults, choice, self.known.info, self._device(), gives=Mapping)
        return [(choice.name, ConfigProposal(key, value, "the platform's default")) for key, value in suggested.items()]

    def _pooling_defaults(self, proposals: Sequence[tuple[str, ConfigProposal]]) -> list[tuple[str, ConfigProposal]]:
        """The checkpoint's own length, and steps that hold a whole prompt where tokens see those that follow."""
        info, found = self.known.info, []
        length = max_length(self.known.checkpoint)
        if info.pooler is not None and length is not None and length < info.max_length:
            found.append(("the checkpoint", ConfigProposal("model.max_length", length, "its max_seq_length")))
        if not info.causal:
            others = [int(str(p.value)) for _, p in proposals if p.key == "sched.max_tokens"]
            longest = self.config.model.max_length or min(length or info.max_length, info.max_length)
            reason = "a prompt is computed in one step"
            found.append(("the model", ConfigProposal("sched.max_tokens", max([longest, *others]), reason)))
        return found

    # --------------------------------------------------------------------------------------------------- helpers

    def _step(self, topic: str, work: Callable[[], None], needs: Sequence[str] = ()) -> None:
        """Run a step; with `tolerant`, record its failure, and skip it when one that it needs has failed."""
        if not self.tolerant:
            with blaming(self._choices, in_full=True):
                work()
            return
        for needed in needs:
            if needed in self.errors:
                self.errors[topic] = cause = self.errors[needed]
                self.roots[topic] = self.roots.get(needed, needed)
                log.debug("%s is skipped: %s", topic, cause)
                return
        try:
            with blaming(self._choices, in_full=True):
                work()
        except LmkitError as e:
            self.errors[topic] = e

    def _consider(
        self,
        request: SelectRequest | Sequence[SelectRequest],
        user: str = "auto",
        *,
        only: Callable[[Spec], bool] | None = None,
        needed: bool = True,
    ) -> Outcome:
        """`select.consider` with what was measured here and the platform's preferences; raises when nothing is left."""
        kind = (request if isinstance(request, SelectRequest) else request[0]).kind
        prefers = (*self._measured.get(kind, ()), *(self._platform.prefers.get(kind, ()) if self._platform else ()))
        how: dict[str, Any] = {"prefers": prefers, "only": only, "imports": self.imports}
        outcome = consider(self.host, request, user, **how)
        if needed or outcome.candidates:
            self.outcomes.append(outcome)
        self._warnings.extend(f"{kind}: {text}" for text in outcome.warnings)
        if needed and outcome.chosen is None:
            raise failure(self.host, outcome, lambda: consider(self.host, request, "auto", **how))
        return outcome

    def _offered(self, request: SelectRequest) -> Outcome:
        """The selection for a kind that the plan can be without. Parsers are tried on the model's chat template."""
        if isinstance(request, ParserRequest):
            self._parsers = self._parsers or ParserChooser(
                self.host, self.plan(), self.known.templates, self.known.checkpoint.path, imports=self.imports
            )
            outcome = self._parsers.choose(request)
            self.outcomes.append(outcome)
            return outcome
        return self._consider(request, needed=False)

    def _keep(self, outcome: Outcome, choice: Choice | None = None, candidate: Candidate | None = None) -> Choice:
        """Add a choice to the plan, with its options, and let its module's behaviour hooks take part."""
        choice = choice or outcome.choice()
        spec = (candidate or outcome.chosen).spec  # type: ignore[union-attr]
        assert spec is not None
        options = parse_options(choice.kind, spec, self.config.plugins.get(f"{choice.kind}.{choice.name}", {}))
        here = choice.why == "auto" and choice.name in self._measured.get(choice.kind, ())
        why = "auto, by what was measured here" if here else choice.why
        choice = msgspec.structs.replace(choice, options={**options, **choice.options}, why=why)
        self._choices.append(choice)
        self._specs.append(spec)
        self.host.activate(choice.module)
        return choice

    def _warn_reference(self, outcome: Outcome) -> None:
        """`auto` that lands on a reference implementation although an accelerator is there is worth a warning."""
        spec = outcome.chosen.spec if outcome.chosen else None
        if outcome.wanted or spec is None or spec.tier != Tier.REFERENCE:
            return
        if self._platform is not None and not self._platform.fallback:
            why = "; ".join(f"{c.name}: {c.reasons[0]}" for c in outcome.candidates if not c.ok)
            self._warnings.append(
                f"{outcome.request.kind} is the slow reference {spec.name!r}; refused: {why or 'none installed'}"
            )

    def _derive(self, key: str, value: Any, source: str) -> None:
        self._derived.append(Derived(key, value, source))


def describe(choice: Choice) -> str:
    """One line: `attention[text]=torch (auto; refused: flashinfer platform, requirement-missing)`."""
    part = f"[{choice.component}]" if choice.component else ""
    refused = ", ".join(f"{r.name} {'/'.join(x.code for x in r.reasons)}" for r in choice.refused)
    return f"{choice.kind}{part}={choice.name} ({choice.why}{'; refused: ' + refused if refused else ''})"


def _described(choice: Choice, config: Mapping[str, Any], head: PoolingTask | None) -> ModelInfo:
    return described(make_target(choice), config, head)


def _defaults(choice: Choice, *args: Any) -> Any:
    return make_target(choice).defaults(*args)


def _environment(choice: Choice, config: EngineConfig) -> Any:
    return make_target(choice).worker_env(config, 0)


def _general(known: Sequence[str]) -> list[str]:
    """Model plugins that run any architecture. All others are named as an architecture is."""
    return [name for name in known if NAME.match(name)]


def _family(architecture: str) -> str:
    """What an architecture's name begins with: LlamaForCausalLM -> Llama."""
    return architecture.partition("For")[0]
