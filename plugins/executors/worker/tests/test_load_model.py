"""Strict loading: every way in which weights can fail to fit, damaged files, conversion, ties, ranks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import (
    CannotSplit,
    CheckpointError,
    CheckpointOptions,
    LinearSpec,
    ModelInfo,
    ParamSpec,
    SelectionError,
    WeightMismatch,
    WeightRule,
)
from lmkit.checkpoint import open_checkpoint
from lmkit_decoders import DecoderConfig
from lmkit_decoders.describe import ConfigReader, decoder_info
from lmkit_decoders.weights import decoder_weights
from lmkit_layers.linear import PLAIN, Linear, PlainFormat, ReferenceLinear, shard
from lmkit_testing import PluginConformance
from lmkit_testing.model import choice, load_tiny
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loading.load import places
from lmkit_worker.loading.safetensors import SafetensorsLoader
from safetensors.torch import save_file

TARGET = f"{__name__}:Toy"


class Toy:
    """A two-layer decoder described by its own small configuration."""

    names = ("Toy",)
    rules: ClassVar[Callable[[list[WeightRule]], list[WeightRule]]] = staticmethod(lambda rules: rules)

    def describe(self, config: Any) -> ModelInfo:
        cfg = DecoderConfig(
            vocab_size=31, hidden_size=16, intermediate_size=24, num_q_heads=4, num_kv_heads=2, head_dim=4,
            windows=(None, None), max_length=64, norm_eps=1e-6, activation="silu",
            rope={"rope_type": "default", "theta": 100.0, "partial": config.get("partial", 1.0)},
            tie=config.get("tie", False), qkv_bias=True,
        )  # fmt: skip
        return decoder_info("Toy", ConfigReader(config), cfg)

    def build(self, info: ModelInfo, ctx: Any) -> Any:
        from lmkit_decoders import Decoder

        return Decoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        return Toy.rules(decoder_weights(info))


class TestSafetensors(PluginConformance):
    plugin = "loader:safetensors"


def toy_tensors(tie: bool = False) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (31, 16), "model.norm.weight": (16,)}
    if not tie:
        shapes["lm_head.weight"] = (31, 16)
    for i in range(2):
        p = f"model.layers.{i}"
        shapes |= {f"{p}.self_attn.{x}_proj.weight": (n, 16) for x, n in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {f"{p}.self_attn.{x}_proj.bias": (n,) for x, n in (("q", 16), ("k", 8), ("v", 8))}
        shapes |= {f"{p}.mlp.{x}_proj.weight": s for x, s in (("gate", (24, 16)), ("up", (24, 16)), ("down", (16, 24)))}
        shapes |= {f"{p}.{x}_layernorm.weight": (16,) for x in ("input", "post_attention")}
    return {name: torch.randn(*shape, generator=noise) for name, shape in shapes.items()}


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"architectures": ["Toy"], **config}))
    save_file(tensors, path / "model.safetensors")
    return path


def logits(path: Path, dtype: str = "float32", **kwargs: Any) -> torch.Tensor:
    return ModelDriver(load_tiny(path, TARGET, dtype, **kwargs), dtype).run(0, list(range(3, 20)), 5)


def mismatch(path: Path) -> str:
    with pytest.raises(WeightMismatch) as failure:
        load_tiny(path, TARGET, "float32")
    return failure.value.message


Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"


def test_missing_extra_and_wrong_are_all_named(tmp_path: Path) -> None:
    tensors = toy_tensors()
    del tensors[UP]
    tensors |= {
        Q: torch.zeros(15, 16),
        "model.stranger": torch.zeros(1),
        "model.layers.2.mlp.up_proj.weight": torch.zeros(1),
    }
    message = mismatch(write(tmp_path, tensors))
    assert f"missing (1): {UP}" in message
    assert "extra (2): model.layers.2.mlp.up_proj.weight, model.stranger" in message
    assert f"{Q} has shape [15, 16], needs [16, 16]" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    tensors = toy_tensors()
    message = mismatch(write(tmp_path, {"model.norm.weight": tensors["model.norm.weight"]}))
    assert "and " in message
    assert " more" in message
    assert len(message) < 1000


def test_a_missing_bias_of_one_part_is_named(tmp_path: Path) -> None:
    tensors = toy_tensors()
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    assert "missing (1): model.layers.0.self_attn.k_proj.bias" in mismatch(write(tmp_path, tensors))


def test_dtypes_that_would_need_a_scale_are_refused(tmp_path: Path) -> None:
    tensors = toy_tensors() | {Q: torch.zeros(16, 16, dtype=torch.int8)}
    assert f"{Q} has dtype int8, needs float32" in mismatch(write(tmp_path, tensors))


def test_two_tensors_for_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = WeightRule("again.{p}", "norm.{p}")
    monkeypatch.setattr(Toy, "rules", staticmethod(lambda rules: [*rules, extra]))
    message = mismatch(write(tmp_path, toy_tensors() | {"again.weight": torch.zeros(16)}))
    assert "both fill norm.weight" in message


def test_nothing_is_read_before_everything_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = toy_tensors()
    del tensors[UP]
    write(tmp_path, tensors)
    monkeypatch.setattr(SafetensorsLoader, "read", lambda self, entry: pytest.fail("read"))
    mismatch(tmp_path)


def test_transform_is_checked_from_headers_and_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(write(tmp_path, toy_tensors()))
    turned = toy_tensors()
    turned["model.layers.0.mlp.down_proj.weight"] = turned["model.layers.0.mlp.down_proj.weight"].T.contiguous()
    write(tmp_path, turned)
    assert "down_proj" in mismatch(tmp_path)
    special = WeightRule("model.layers.0.mlp.down_proj.weight", "layers.0.mlp.down.weight", transform=torch.t)
    monkeypatch.setattr(Toy, "rules", staticmethod(lambda rules: [special, *rules]))
    assert torch.equal(logits(tmp_path), expected)


def test_a_rule_that_cannot_transform_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = WeightRule("model.norm.weight", "norm.weight", transform=lambda t: t.reshape(3, 3))
    monkeypatch.setattr(Toy, "rules", staticmethod(lambda rules: [special, *rules]))
    assert "model.norm.weight has shape [16], which its rule cannot transform" in mismatch(
        write(tmp_path, toy_tensors())
    )


def test_names_in_messages_are_cut(tmp_path: Path) -> None:
    message = mismatch(write(tmp_path, toy_tensors() | {"x" * 5000: torch.zeros(1)}))
    assert len(message) < 400


def test_parts_that_share_a_value_must_agree() -> None:
    class Shared(PlainFormat):
        name = "shared"

        def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
            return {**super().params(layer, dtype), "order": ParamSpec((3,), "int32", part_axis=None)}

    spec = LinearSpec("x", 3, (2, 1), parts=("a", "b"))
    for second, fits in (((0, 2, 1), True), ((2, 1, 0), False)):
        layer = Linear(spec, Shared(), ReferenceLinear(), torch.float32).to("meta")
        place = places(layer)[".order"]
        place.put("a", torch.tensor([0, 2, 1]), torch.device("cpu"))
        if fits:
            place.put("b", torch.tensor(second), torch.device("cpu"))
            assert layer.order.tolist() == [0, 2, 1]
        else:
            with pytest.raises(CheckpointError, match="different values"):
                place.put("b", torch.tensor(second), torch.device("cpu"))


def test_floats_are_converted(tmp_path: Path) -> None:
    expected = logits(write(tmp_path, toy_tensors()))
    half = {name: tensor.half() for name, tensor in toy_tensors().items()}
    got = logits(write(tmp_path, half))
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0.05)
    loaded = load_tiny(tmp_path, TARGET, "bfloat16")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    tensors = toy_tensors()
    expected = logits(write(tmp_path, tensors))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}  # parts of merged layers in different files
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, tmp_path / file)
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(tmp_path), expected)

    index["weight_map"][Q] = next(file for file, members in parts.items() if Q not in members)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="where it is not"):
        load_tiny(tmp_path, TARGET, "float32")


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    """One copy in memory; a second copy in the file is ignored; the logits are those of an untied copy."""
    tied = toy_tensors(tie=True)
    write(tmp_path, tied, tie=True)
    loaded = load_tiny(tmp_path, TARGET, "float32")
    assert loaded.weight_bytes == 4 * loaded.info.num_parameters == 4 * sum(t.numel() for t in tied.values())
    expected = logits(tmp_path)
    both = tied | {"lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    assert torch.equal(logits(write(tmp_path, both, tie=True)), expected)
    assert torch.equal(logits(write(tmp_path, both, tie=False)), expected)


def test_partial_rotation_leaves_the_rest_of_each_head(tmp_path: Path) -> None:
    assert not torch.equal(logits(write(tmp_path, toy_tensors(), partial=0.5)), logits(write(tmp_path, toy_tensors())))


def test_not_a_number_is_warned_about_by_name(tmp_path: Path) -> None:
    tensors = toy_tensors()
    tensors[UP][3, 3] = float("nan")
    assert any(UP in warning for warning in load_tiny(write(tmp_path, tensors), TARGET, "float32").warnings)
    assert load_tiny(write(tmp_path, toy_tensors()), TARGET, "float32").warnings == ()


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    write(tmp_path, toy_tensors())
    load_tiny(tmp_path, TARGET, "float32", progress=lambda *args: seen.append(args))
    total = sum(t.nbytes for t in toy_tensors().values())
    assert [s[1] for s in seen] == sorted(s[1] for s in seen)
    assert seen[-1] == ("load weights", total, total, "B")


# ------------------------------------------------------------------------------------------- damaged files


def header(tensors: dict[str, Any]) -> bytes:
    body = json.dumps(tensors).encode()
    return struct.pack("<Q", len(body)) + body


DAMAGED = {
    "empty": b"",
    "short length": b"\x05\x00",
    "huge header": struct.pack("<Q", 1 << 40) + b"{}",
    "header is no JSON": struct.pack("<Q", 4) + b"{{{{",
    "overlapping offsets": header(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        }
    )
    + bytes(12),
    "size does not match shape": header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}) + bytes(8),
    "offsets beyond the end": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + bytes(3),
    "hole": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}) + bytes(16),
    "unknown dtype": header({"a": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
    "negative shape": header({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}) + bytes(8),
}


@pytest.mark.parametrize("kind", list(DAMAGED))
def test_damaged_headers_name_the_file(tmp_path: Path, kind: str) -> None:
    write(tmp_path, toy_tensors())
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[kind])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_tiny(tmp_path, TARGET, "float32")


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_truncated_files_are_found_from_headers(tmp_path: Path, cut: int) -> None:
    file = write(tmp_path, toy_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_tiny(tmp_path, TARGET, "float32")


def test_one_name_in_two_files(tmp_path: Path) -> None:
    tensors = toy_tensors()
    write(tmp_path, tensors)
    save_file(tensors, tmp_path / "other.safetensors")
    found = open_checkpoint(str(tmp_path), CheckpointOptions())
    assert found is not None
    with pytest.raises(CheckpointError, match="both in"):
        SafetensorsLoader().tensors(replace(found, files=(*found.files, tmp_path / "other.safetensors")))


# ------------------------------------------------------------------------------------------- kernels and ranks


class Fussy(ReferenceLinear):
    """Refuses wide layers."""

    name = "fussy"

    def can_run(self, fmt: Any, layer: LinearSpec, device: Any) -> str | None:
        return "too wide" if layer.total_out > 40 else None


def test_a_kernel_that_refuses_a_layer(tmp_path: Path) -> None:
    """By choice of the user: an error. By auto: the reference runs that layer, and a warning says so."""
    write(tmp_path, toy_tensors())
    target = f"{__name__}:Fussy"
    with pytest.raises(SelectionError, match="too wide"):
        load_tiny(tmp_path, TARGET, "float32", kernel=choice("op", target, "linear:plain"))
    loaded = load_tiny(tmp_path, TARGET, "float32", kernel=choice("op", target, "linear:plain", why="auto"))
    assert [w.partition(":")[0] for w in loaded.warnings] == ["layers.0.mlp.gate_up and 1 more"]
    assert loaded.model.layers[0].mlp.gate_up.kernel.name == "linear_reference"
    assert loaded.model.layers[0].attn.o.kernel.name == "fussy"


def test_sizes_that_do_not_divide_are_refused() -> None:
    spec = LinearSpec("x", 6, (4, 3), shard="column")
    with pytest.raises(CannotSplit, match="x: sizes"):
        shard(spec, 0, 2)
    assert shard(replace(spec, shard="row"), 0, 2).in_features == 3
    assert shard(replace(spec, shard="none"), 0, 2) is not None


def test_scales_that_do_not_divide_are_refused() -> None:
    """A stored tensor must split evenly too: three scales cannot be shared by two ranks."""

    class Scaled(PlainFormat):
        name = "scaled"

        def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
            scale = ParamSpec((-(-layer.total_out // 2), 1), "float32", part_sizes=(-(-layer.total_out // 2),))
            return {**super().params(layer, dtype), "scale": scale}

    with pytest.raises(CannotSplit, match="scale"):
        Linear(LinearSpec("x", 4, (6,), shard="column"), Scaled(), ReferenceLinear(), torch.float32, Ranks(2).rank(0))


def test_a_linear_is_a_linear() -> None:
    spec = LinearSpec("x", 3, (2, 1), True, parts=("a", "b"))
    layer = Linear(spec, PLAIN, ReferenceLinear(), torch.float64)
    weight, bias = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    layer.weight.data, layer.bias.data = weight, bias
    layer.pack()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    assert layer.packed is not None
    assert layer.packed.nbytes == 72


def test_large_tensors_stay_mapped(tmp_path: Path) -> None:
    """The embedding is the file's own memory; pages can be let go and come back; writing changes no file."""
    directory = write(tmp_path, toy_tensors())
    expected = toy_tensors()["model.embed_tokens.weight"]
    assert torch.equal(load_tiny(directory, TARGET, "float32").model.embed.weight, expected)

    def read() -> tuple[SafetensorsLoader, torch.Tensor]:
        checkpoint, loader = open_checkpoint(str(directory), CheckpointOptions()), SafetensorsLoader()
        assert checkpoint is not None
        entries = {entry.name: entry for entry in loader.tensors(checkpoint)}
        return loader, loader.read(entries["model.embed_tokens.weight"])

    loader, mapped = read()
    loader.release()
    assert torch.equal(mapped, expected)
    mapped.zero_()
    assert torch.equal(read()[1], expected)


def test_one_tensor_for_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused projections load like separate ones, also over two ranks; a second source for a part is refused."""
    tensors = toy_tensors()
    expected = logits(write(tmp_path, tensors))
    for i in range(2):
        p = f"model.layers.{i}.self_attn"
        for kind in ("weight", "bias"):
            tensors[f"{p}.qkv.{kind}"] = torch.cat([tensors.pop(f"{p}.{x}_proj.{kind}") for x in "qkv"])
    fused = WeightRule("model.layers.{i}.self_attn.qkv.{p}", "layers.{i}.attn.qkv.{p}", part="*")
    monkeypatch.setattr(Toy, "rules", staticmethod(lambda rules: [fused, *rules]))
    assert torch.equal(logits(write(tmp_path, tensors)), expected)

    def rank(collectives: Any) -> torch.Tensor:
        loaded = load_tiny(tmp_path, TARGET, "float32", collectives=collectives)
        return ModelDriver(loaded, "float32").run(0, list(range(3, 20)), 5)

    for got in Ranks(2).run(rank):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    write(tmp_path, {**tensors, Q: torch.zeros(16, 16)})
    assert "both fill layers.0.attn.qkv.weight" in mismatch(tmp_path)


def test_parts_named_by_numbers() -> None:
    from lmkit_worker.loading.rules import Rules

    rules = Rules(
        [
            WeightRule("l.{i}.e.{e}.w{p}", "", ignore=True),
            WeightRule("l.{i}.e.{e}.up.{p}", "layers.{i}.up.{p}", part="{e}.up"),
            WeightRule("mtp.{any}", "", ignore=True),
        ]
    )
    match = rules.match("l.3.e.12.up.weight")
    assert match is not None
    assert (match.target, match.part) == ("layers.3.up.weight", "12.up")
    assert [source for source, _ in rules.sources("layers.3.up.weight", "5.up")] == ["l.3.e.5.up.weight"]
    assert rules.sources("layers.3.up.weight", "5.gate") == []
    extra = rules.match("mtp.0.self_attn.q.weight")
    assert extra is not None
    assert extra.rule.ignore
