"""Conformance of pooling models: tiny random checkpoints against `transformers`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import Checkpoint, CheckpointOptions, ModelSpec, WeightMismatch
from lmkit.checkpoint import open_checkpoint
from lmkit.plugins import load_target
from lmkit_worker.loaded import LoadedModel
from torch import Tensor

from lmkit_testing.checkpoints import byte_tokenizer, randomize
from lmkit_testing.model import LENGTH, deviation, load_tiny, prompt
from lmkit_testing.specs import PluginConformance
from lmkit_testing.steps import ModelDriver

COMMON: Mapping[str, Any] = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip


def pooling_checkpoint(
    config: str, model: str, directory: Path | str, *, seed: int = 0, dtype: str = "float32", **values: Any
) -> Path:
    """A random `model` of transformers with a `config` of COMMON and `values`, and a tokenizer of bytes."""
    import transformers

    made = getattr(transformers, config)(**{**COMMON, **values})
    randomize(getattr(transformers, model), made, seed, dtype, 0.2).save_pretrained(directory)
    byte_tokenizer(directory)
    return Path(directory)


def expected(directory: Path, model: str, ids: list[int], dtype: str = "float32", **inputs: Any) -> Tensor:
    """By transformers: hidden states [tokens, D] of a model without a head, else logits as it gives them."""
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, model).from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        out = made(input_ids=torch.tensor([ids]), **inputs)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0].float()


class PoolingConformance(PluginConformance):
    """Set `plugin` ("model:SomeModel"), `config` and `model` (classes of transformers); `values`: their configuration,
    `variants`: name -> more of it."""

    config: ClassVar[str] = ""
    model: ClassVar[str] = ""
    values: ClassVar[Mapping[str, Any]] = {}
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    torch_free_target = True
    tolerance: ClassVar[float] = 1e-4  # float32, relative

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", ["base", *self.variants], scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, variant: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
        values = {**cls.values, **cls.variants.get(variant, {})}
        return pooling_checkpoint(cls.config, cls.model, tmp_path_factory.mktemp(cls.model), **values)

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, directory: Path, spec: ModelSpec) -> LoadedModel:
        return load_tiny(directory, spec.target, "float32")

    def _close(self, got: Tensor, directory: Path, ids: list[int], limit: float) -> None:
        """`got` [tokens, size]: the head on every token; a sequence task of transformers shows the first one's."""
        want = expected(directory, self.model, ids)
        got = got if want.dim() == 2 else got[0]
        assert deviation(got, want) * min(1.0, float(want.abs().max())) < limit  # of numbers below 1: the difference

    def test_float32(self, loaded: LoadedModel, directory: Path) -> None:
        ids = prompt(loaded.info.vocab_size)
        self._close(ModelDriver(loaded, "float32").run(0, ids, LENGTH), directory, ids, self.tolerance)

    @pytest.mark.one_in(3)
    def test_bfloat16(self, directory: Path, spec: ModelSpec, loaded: LoadedModel) -> None:
        """As close to float32 as transformers is in bfloat16, with room for other roundings."""
        ids = prompt(loaded.info.vocab_size)
        theirs = deviation(expected(directory, self.model, ids, "bfloat16"), expected(directory, self.model, ids))
        got = ModelDriver(load_tiny(directory, spec.target, "bfloat16"), "bfloat16").run(0, ids, LENGTH)
        self._close(got, directory, ids, 2 * theirs + 0.02)

    def test_neighbours_do_not_matter(self, loaded: LoadedModel) -> None:
        """A ragged step of four rows gives what each row gives alone."""
        prompts = [prompt(loaded.info.vocab_size, length, seed=length) for length in (5, 1, 17, 9)]
        got = ModelDriver(loaded, "float32").step(list(enumerate(prompts)))
        for row, ids in enumerate(prompts):
            alone = ModelDriver(loaded, "float32", seed=2).run(0, ids, len(ids))
            assert deviation(got[row], alone) < self.tolerance

    def test_number_of_parameters_is_exact(self, loaded: LoadedModel) -> None:
        assert loaded.weight_bytes == 4 * loaded.info.num_parameters

    def test_needs_are_declared(self, loaded: LoadedModel, spec: ModelSpec) -> None:
        for need, _ in loaded.info.kv_groups():
            assert need.features <= spec.features

    def test_loading_is_strict(self, directory: Path, spec: ModelSpec, tmp_path: Path) -> None:
        """A tensor too few or too many is named."""
        from safetensors.torch import load_file, save_file

        found: Checkpoint | None = open_checkpoint(str(directory), CheckpointOptions())
        assert found is not None
        tensors = load_file(found.files[0])
        victim = random.Random(0).choice(sorted(name for name in tensors if ".1." in name))
        for path in directory.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        without = {name: t for name, t in tensors.items() if name != victim}
        stranger = f"{victim}.unheard_of"
        for name, changed in ((victim, without), (stranger, {**tensors, stranger: torch.zeros(1)})):
            save_file(changed, tmp_path / "model.safetensors")
            with pytest.raises(WeightMismatch) as failure:
                load_tiny(tmp_path, spec.target, "float32")
            assert name.rsplit(".", 2)[-2] in failure.value.message

    def test_description_is_plain_data(self, directory: Path, spec: ModelSpec) -> None:
        found = open_checkpoint(str(directory), CheckpointOptions())
        assert found is not None
        first, second = (load_target(spec.target)().describe(found.config) for _ in range(2))
        assert first == second
        assert first.pooler is not None
