"""Pickled checkpoints become those that load; what is more than tensors is refused and does nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from lmkit.api import CheckpointError, CheckpointOptions, ConfigError
from lmkit.checkpoint import open_checkpoint
from lmkit.plugins.host import PluginHost
from lmkit_convert.command import convert
from lmkit_convert.unpickled import main
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import drive_default
from safetensors.torch import load_file

TOKENS = [3, 17, 10, 42]


def pickled(folder: Path, parts: int) -> Path:
    """A tiny model as files of that kind. Its output head shares the memory of the embedding."""
    tiny_checkpoint("LlamaForCausalLM", folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = list(tensors)
    files = [f"pytorch_model-{i}.bin" for i in range(parts)] if parts > 1 else ["pytorch_model.bin"]
    for i, file in enumerate(files):
        torch.save({name: tensors[name] for name in names[i::parts]}, folder / file)
    if parts > 1:
        index = {"weight_map": {name: files[i % parts] for i, name in enumerate(names)}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "training_args.bin").write_bytes(b"not weights")
    os.rename(folder / "model.safetensors", folder.parent / "expected.safetensors")
    return folder


@pytest.mark.parametrize("parts", [1, pytest.param(3, marks=pytest.mark.full("lmkit-convert"))])
def test_the_result_is_the_checkpoint(parts: int, tmp_path: Path) -> None:
    source = pickled(tmp_path / "old", parts)
    with pytest.raises(CheckpointError, match="only pickled weights") as e:
        open_checkpoint(str(source), CheckpointOptions())
    assert "lmkit convert" in e.value.fix
    convert(source, tmp_path / "new")
    logits = drive_default(tmp_path / "new", "float32", "native").run(0, TOKENS, 4)
    plain = tiny_checkpoint("LlamaForCausalLM", tmp_path / "plain", tie_word_embeddings=True)
    assert torch.equal(logits, drive_default(plain, "float32", "native").run(0, TOKENS, 4))
    with pytest.raises(ConfigError, match="is there already"):
        convert(source, tmp_path / "new")


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "content", [{"a": Bomb()}, [torch.zeros(2)], {"a": 1}, {}, {"a": torch.zeros(2).to_sparse()}, {1: torch.zeros(2)}]
)
def test_what_is_more_than_tensors_is_refused(
    content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "x.bin")
    main("x.bin", "x.safetensors")
    assert isinstance(json.loads(capsys.readouterr().out)["error"], str)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"], "nothing exploded, and nothing was written"


def test_what_is_no_pickle_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        convert(tmp_path / "none", tmp_path / "new")
    with pytest.raises(CheckpointError, match="has no"):
        convert(tmp_path, tmp_path / "new")
    torch.save({"a": Bomb()}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"x\.bin cannot be read: it needs posix\.mkdir, which is no tensor"):
        convert(tmp_path, tmp_path / "new")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../x.bin"}}))
    with pytest.raises(CheckpointError, match="not beside it"):
        convert(tmp_path, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [index.name, "x.bin"], "nothing is left behind"


def tensorized(tensors: dict[str, torch.Tensor], path: Path) -> None:
    written = pytest.importorskip("tensorizer").TensorSerializer(path)
    written.write_state_dict(tensors)
    written.close()


def test_files_of_tensorizer(tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path / "old", dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    tensorized(tensors, folder / "model.tensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as e:
        open_checkpoint(str(folder), CheckpointOptions())
    assert "lmkit convert" in e.value.fix
    convert(folder, tmp_path / "new")
    made = load_file(tmp_path / "new" / "model.safetensors")
    assert set(made) == set(tensors)
    assert all(torch.equal(made[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("change", ["cut", "turned", "objects"])
def test_damaged_files_of_tensorizer(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.tensors"
    b = torch.randn(4)
    tensorized({"a": torch.randn(8, 2), "b": b}, file)
    content, stored = file.read_bytes(), b.numpy().tobytes()
    assert content.count(stored) == 1
    changed = {
        "cut": content[: content.index(stored) + 9],
        "turned": content.replace(stored, bytes(16)),
        "objects": content.replace(b"<f4", b"|O8"),
    }
    file.write_bytes(changed[change])
    main(str(file), str(tmp_path / "x.safetensors"))
    assert isinstance(json.loads(capsys.readouterr().out)["error"], str)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_dist_with_a_command_is_no_unknown_plugin() -> None:
    host = PluginHost()
    host.scan()
    assert not [warning for warning in host.warnings if warning.startswith("lmkit-")]
