"""Conformance of model plugins: a tiny random checkpoint of the family against `transformers`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import (
    CannotSplit,
    Checkpoint,
    CheckpointOptions,
    Choice,
    Collectives,
    Derived,
    DeviceInfo,
    ModelInfo,
    ModelSpec,
    ResolvedPlan,
    WeightMismatch,
)
from lmkit.checkpoint import open_checkpoint
from lmkit.config import from_options
from lmkit.memory import info_of_rank, stage
from lmkit.plugins import load_target
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit_decoders import multimodal
from lmkit_layers.experts import Experts
from lmkit_worker.chosen import make
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.loading import load_model
from torch import Tensor

from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.specs import PluginConformance, find_plugin
from lmkit_testing.steps import ModelDriver, Ranks, plain_platform

DENSE = "lmkit_testing.dense:DenseAttention"
OTHER_MEDIA = re.compile("|".join(multimodal.OTHER_MEDIA))  # in names of tensors that are not those of the text part
OF_PUBLISHED = ("test_float32", "test_default_choices", "test_bfloat16_logits")  # what `published` may break
LENGTH = 29  # tokens of a test prompt: no multiple of block or chunk sizes


def load_tiny(
    directory: Path,
    target: str,
    dtype: str,
    *,
    attention: str = DENSE,
    choices: Sequence[Choice] = (),
    kernel: Choice | None = None,
    kv_dtype: str = "",
    **kwargs: Any,
) -> LoadedModel:
    """Load a checkpoint with the architecture `target`, without the resolver; `kv_dtype` is that of its cache.

    `kernel` goes before the reference, or takes its place if it is an explicit choice.
    """
    reference = choice("op", "lmkit_layers.linear:ReferenceLinear", "linear:plain", why="auto")
    checkpoint = open_checkpoint(str(directory), CheckpointOptions())
    assert checkpoint is not None
    info: ModelInfo = load_target(target)().describe(checkpoint.config)
    if (ranks := kwargs.get("collectives")) is not None:
        info = info_of_rank(info, ranks.size, ranks.rank)
    if kv_dtype:
        layers = (replace(layer, attn=layer.attn and replace(layer.attn, kv_dtype=kv_dtype)) for layer in info.layers)
        info = replace(info, layers=tuple(layers))
    resolved = ResolvedPlan(
        DeviceInfo("cpu", "cpu", dtypes=(dtype,)),
        (
            choice("model", target),
            choice("attention", attention, "text"),
            choice("loader", "lmkit_worker.loading.safetensors:SafetensorsLoader"),
            *([kernel] if kernel else []),
            *([reference] if kernel is None or kernel.why == "auto" else []),
            *choices,
        ),
        (Derived("dtype", dtype, "test"),),
    )
    return load_model(resolved, checkpoint, info, plain_platform(), torch.device("cpu"), **kwargs)


@cache
def installed() -> PluginHost:
    """What is installed, looked at once."""
    return PluginHost()


def drive_default(directory: Path | str, dtype: str, impl: str, **options: object) -> ModelDriver:
    """The checkpoint with everything that `auto` chooses: what a user gets who says nothing, or those options."""
    config = from_options({"model": str(directory), "dtype": dtype, "model_impl": impl, **options})
    resolved, checkpoint, info = resolve(config, installed())
    chosen = resolved.choice("platform")
    assert chosen is not None
    platform = make(chosen)
    loaded = load_model(resolved, checkpoint, info, platform, platform.bind(0), platform.collectives(0, 1))
    block_size, kv_dtype = resolved.value("block_size", 16), resolved.value("kv_dtype", dtype)
    return ModelDriver(loaded, dtype, block_size=block_size, num_blocks=32, kv_dtype=kv_dtype, platform=platform)


def heads(num_q: int, num_kv: int, size: int, **other: Any) -> dict[str, Any]:
    """Configuration values of attention heads, in the words of most configurations."""
    return {"num_attention_heads": num_q, "num_key_value_heads": num_kv, "head_dim": size, **other}


def llama3(factor: float, theta: float) -> dict[str, Any]:
    """Rotary positions as the third Llama stretches them, in the words of most configurations."""
    return {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def choice(kind: str, target: str, component: str = "", why: str = "explicit") -> Choice:
    """A Choice of something in the current environment."""
    return Choice(kind, component, target.rpartition(":")[2].lower(), target, "lmkit-core", "0", "test", why=why)


def reference(directory: Path, dtype: str, family: str = "") -> Any:
    """The same checkpoint in `transformers`: in the class `family`, where it has that, else in the one called like the
    architecture, or that of its model type.

    A folder "transformers" in `directory` is read instead: the same weights under the names that it knows.
    """
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    known = directory / "transformers"
    directory = known if known.exists() else directory
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model_name = family if hasattr(transformers, family) else name
    model_class = getattr(transformers, model_name, transformers.AutoModelForCausalLM)
    return model_class.from_pretrained(directory, dtype=getattr(torch, dtype))


def prompt(vocab_size: int, length: int = LENGTH, seed: int = 0) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, vocab_size) for _ in range(length)]


def prompts(vocab_size: int) -> list[list[int]]:
    return [prompt(vocab_size, seed=seed) for seed in range(3)]


def reference_logits(model: Any) -> Tensor:
    """Logits [3, LENGTH, V] of `prompts` by a model of transformers."""
    with torch.no_grad():
        size = model.config.get_text_config().vocab_size
        return torch.cat([model(torch.tensor([ids])).logits for ids in prompts(size)])


def deviation(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value of `want`."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def drift(got: Tensor, want: Tensor) -> float:
    """Relative error of the middle token of [T, V]: unlike the largest one, not a matter of luck. A router that chooses
    another expert after a rounding changes single tokens."""
    errors = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    return float(errors.median())


class ArchitectureConformance:
    """One architecture against transformers. Set `plugin` ("model:SomeForCausalLM"; where one plugin serves many, the
    `architecture` too), where its tiny configuration needs them `values`, and for configurations that take other paths
    `variants`: name -> configuration values. `family` is that of `lmkit_testing.checkpoints`; "" is the architecture
    itself. `published` are the sizes of heads, their ratio and the positions of a released checkpoint, of which few
    layers of a small hidden size remain: on them depend layouts, and which attention is chosen."""

    plugin: ClassVar[str] = ""
    architecture: ClassVar[str] = ""  # "": the plugin's name
    family: ClassVar[str] = ""
    values: ClassVar[Mapping[str, Any]] = {}
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    published: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-4  # float32, relative
    first_position: ClassVar[int] = 0  # of a text; the library's generate() does not know where it is another

    @classmethod
    def name(cls) -> str:
        """The architecture's."""
        return cls.architecture or cls.plugin.partition(":")[2]

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls) -> ModelSpec:
        spec = find_plugin(cls.plugin)[2]
        assert isinstance(spec, ModelSpec)
        return spec

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "variant" in metafunc.fixturenames:
            variants = ["base", *self.variants]
            if self.published and metafunc.function.__name__ in OF_PUBLISHED:
                variants.append("published")
            metafunc.parametrize("variant", variants, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        family = cls.family or cls.name()
        values = {**cls.values, **(cls.published if variant == "published" else cls.variants.get(variant, {}))}
        folder = tiny_checkpoint(family, tmp_path_factory.mktemp(f"{family}-{variant}"), **values)
        cls.name_architecture(folder)
        return folder

    @classmethod
    def name_architecture(cls, directory: Path) -> None:
        """Released files may call an architecture otherwise than transformers: let the configuration say `name`."""
        config = json.loads((directory / "config.json").read_text())
        config["architectures"] = [cls.name()]
        (directory / "config.json").write_text(json.dumps(config))

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, directory: Path) -> Checkpoint:
        found = open_checkpoint(str(directory), CheckpointOptions())
        assert found is not None
        return found

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, directory: Path, spec: ModelSpec) -> LoadedModel:
        return load_tiny(directory, spec.target, "float32")

    @pytest.fixture(scope="class")
    @classmethod
    def theirs(cls, directory: Path) -> Any:
        """The model of transformers, in float32."""
        return reference(directory, "float32", cls.family)

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, theirs: Any) -> Tensor:
        """Logits [3, LENGTH, V] of three prompts by transformers in float32."""
        return reference_logits(theirs)

    def test_float32(self, loaded: LoadedModel, expected: Tensor) -> None:
        got = ModelDriver(loaded, "float32").step(list(enumerate(prompts(loaded.info.vocab_size))))
        assert deviation(torch.stack(got), expected) < self.tolerance

    @pytest.mark.parametrize("chunk", [7, 1])
    @pytest.mark.one_in(3)
    def test_chunks_equal_the_whole(self, loaded: LoadedModel, chunk: int) -> None:
        ids = prompt(loaded.info.vocab_size)
        whole = ModelDriver(loaded, "float32").run(0, ids, LENGTH)
        assert deviation(ModelDriver(loaded, "float32", seed=1).run(0, ids, chunk), whole) < self.tolerance

    def test_neighbours_do_not_matter(self, loaded: LoadedModel) -> None:
        """A ragged step of four rows gives what each row gives alone."""
        size = loaded.info.vocab_size
        prompts = [prompt(size, length, seed=length) for length in (5, 1, 17, 9)]
        together = ModelDriver(loaded, "float32")
        got = together.step(list(enumerate(prompts)))
        for row, ids in enumerate(prompts):
            alone = ModelDriver(loaded, "float32", seed=2).run(0, ids, len(ids))
            assert deviation(got[row], alone) < self.tolerance

    @pytest.mark.parametrize("read", [[21], [0, 5, 21, 31], []])
    @pytest.mark.one_in(4)
    def test_hidden_states_that_are_read_are_the_same(self, loaded: LoadedModel, read: list[int]) -> None:
        """A model that leaves others out computes these as before, and leaves the same behind for the next step."""
        size = loaded.info.vocab_size
        work = [(row, prompt(size, length, seed=length)) for row, length in enumerate((5, 17, 10))]
        whole, less = ModelDriver(loaded, "float32"), ModelDriver(loaded, "float32")
        expected, got = whole.hidden(work), less.hidden(work, read)
        assert len(got) in (len(expected), len(read))
        got = got if len(got) == len(read) else got[read]
        assert not read or deviation(got, expected[read]) < self.tolerance
        following = [(row, prompt(size, 1, seed=row)) for row in range(3)]
        assert deviation(torch.cat(less.step(following)), torch.cat(whole.step(following))) < self.tolerance

    @pytest.mark.one_in(3)
    def test_two_ranks_equal_one(self, directory: Path, loaded: LoadedModel, spec: ModelSpec) -> None:
        """Tensor parallel over two ranks: the same logits, or a refusal of what does not divide."""
        if not spec.supports_tp:
            pytest.skip("does not claim tensor parallelism")
        self._check_ranks(directory, loaded, spec)

    @pytest.mark.one_in(6)
    def test_two_ranks_with_half_of_the_experts_equal_one(
        self, directory: Path, loaded: LoadedModel, spec: ModelSpec
    ) -> None:
        """Experts dealt out to two ranks: the same logits, of weights that are on one rank each."""
        if not spec.supports_tp or not any(linear.experts for linear in loaded.info.linears):
            pytest.skip("does not claim tensor parallelism" if not spec.supports_tp else "has no experts")
        for rank in self._check_ranks(directory, loaded, spec, deals=2):
            assert isinstance(rank.model, torch.nn.Module)
            experts = [module for module in rank.model.modules() if isinstance(module, Experts)]
            assert experts
            assert all(2 * module.up.local.experts == module.up.spec.experts for module in experts)

    def _check_ranks(
        self, directory: Path, loaded: LoadedModel, spec: ModelSpec, size: int = 2, **options: Any
    ) -> list[LoadedModel]:
        """Ranks against one, or a refusal of what does not divide. Returns their models."""
        ids = prompt(loaded.info.vocab_size)

        def run(collectives: Collectives) -> tuple[LoadedModel, Tensor]:
            mine = load_tiny(directory, spec.target, "float32", collectives=collectives, **options)
            return mine, ModelDriver(mine, "float32").run(0, ids, 9)

        try:
            ranks = Ranks(size).run(run)
        except CannotSplit as refusal:
            pytest.skip(refusal.message)
        whole = ModelDriver(loaded, "float32").run(0, ids, 9)
        for _, logits in ranks:
            assert deviation(logits, whole) < self.tolerance
        return [mine for mine, _ in ranks]

    @pytest.mark.one_in(3)
    def test_two_stages_equal_one_rank(self, directory: Path, loaded: LoadedModel, spec: ModelSpec) -> None:
        """The first layers on one rank, the last on another, which has no weights of the first."""
        num = len(loaded.info.layers)
        if not spec.supports_pp or num < 2:
            pytest.skip("does not claim pipeline parallelism")
        ranks = Ranks(2)  # one after another in this thread: what is sent waits until it is received
        stages = [
            load_tiny(directory, spec.target, "float32", stage=(stage(num, i, 2), ranks.rank(i))) for i in range(2)
        ]
        assert max(one.weight_bytes for one in stages) < loaded.weight_bytes
        first, second = (ModelDriver(one, "float32") for one in stages)
        ids, logits = prompt(loaded.info.vocab_size), []
        for i in range(0, len(ids), 9):
            work = [(0, ids[i : i + 9])]
            first.hidden(work)
            logits += second.step(work)
        assert ranks.sent[0][1].empty()
        whole = ModelDriver(loaded, "float32").run(0, ids, 9)
        assert torch.equal(torch.cat(logits), whole)

    @pytest.fixture(scope="class")
    @classmethod
    def rounding(cls, directory: Path, expected: Tensor) -> float:
        """How far from float32 logits in bfloat16 may be: a little further than those of transformers.

        Compared by the prompt that does best: in a mixture, a rounding can make a router choose another expert.
        """
        theirs = reference_logits(reference(directory, "bfloat16", cls.family))
        return 1.25 * min(map(drift, theirs, expected)) + 0.002

    @pytest.mark.one_in(3)
    def test_bfloat16_logits(self, directory: Path, spec: ModelSpec, expected: Tensor, rounding: float) -> None:
        """As close to float32 as transformers is in bfloat16, with room for other roundings."""
        driver = ModelDriver(load_tiny(directory, spec.target, "bfloat16"), "bfloat16")
        got = driver.step(list(enumerate(prompts(expected.shape[-1]))))
        assert min(map(drift, got, expected)) < rounding

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.one_in(4)
    def test_default_choices(
        self, directory: Path, expected: Tensor, dtype: str, request: pytest.FixtureRequest
    ) -> None:
        """The same through the kernels that `auto` chooses: prompts in one step, and the last again in chunks."""
        impl = "native" if self.plugin == f"model:{self.name()}" else self.plugin.partition(":")[2]
        driver = drive_default(directory, dtype, impl)
        asked = prompts(expected.shape[-1])
        got = [*driver.step(list(enumerate(asked))), driver.run(len(asked), asked[-1], 7)]
        if dtype == "float32":
            for mine, theirs in zip(got, [*expected, expected[-1]], strict=True):
                found = deviation(mine, theirs)
                assert found < self.tolerance, found
        else:
            rounding = request.getfixturevalue("rounding")
            assert min(map(drift, got, expected)) < rounding
            assert torch.isfinite(got[-1]).all()

    def test_number_of_parameters_is_exact(self, theirs: Any, loaded: LoadedModel) -> None:
        """Buffers that are saved, as those of routers, may count."""
        saved = [t for name, t in theirs.state_dict(keep_vars=True).items() if not OTHER_MEDIA.search(name)]
        parameters = sum(p.numel() for p in {id(t): t for t in saved if isinstance(t, torch.nn.Parameter)}.values())
        buffers = sum(b.numel() for b in saved if not isinstance(b, torch.nn.Parameter))
        assert parameters <= loaded.info.num_parameters <= parameters + buffers
        assert loaded.weight_bytes == 4 * loaded.info.num_parameters

    def test_description_is_plain_data(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """Equal for equal configurations; layers and groups agree."""
        first, second = (load_target(spec.target)().describe(checkpoint.config) for _ in range(2))
        assert first == second
        assert {need for need, _ in first.kv_groups()} == {layer.attn for layer in first.layers if layer.attn}

    @pytest.mark.one_in(4)
    def test_loading_is_strict(self, checkpoint: Checkpoint, spec: ModelSpec, tmp_path: Path) -> None:
        """A tensor too few or too many is named."""
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint.files[0])
        names = sorted(name for name in tensors if ".1." in name and not OTHER_MEDIA.search(name))
        victim = random.Random(0).choice(names)
        stranger = victim.replace(".1.", ".1.unheard_of.", 1)
        for path in checkpoint.path.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        without = {name: t for name, t in tensors.items() if name != victim}
        for word, name, changed in (
            ("missing", victim, without),
            ("extra", stranger, {**tensors, stranger: torch.zeros(1)}),
        ):
            save_file(changed, tmp_path / "model.safetensors")
            with pytest.raises(WeightMismatch) as failure:
                load_tiny(tmp_path, spec.target, "float32")
            assert word in failure.value.message
            assert name in failure.value.message

    def test_needs_are_declared(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        """Every attention feature the model asks for is in the spec's `features`."""
        info = load_target(spec.target)().describe(checkpoint.config)
        for need, _ in info.kv_groups():
            assert need.features <= spec.features


class ModelConformance(ArchitectureConformance, PluginConformance):
    """A model plugin: what every plugin must do, and its architecture."""

    torch_free_target = True
