"""Finding checkpoints: directories, hub ids, and everything that is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lmkit.api import CheckpointError, CheckpointOptions
from lmkit.checkpoint import INDEX, PATTERNS, UNNEEDED, check_headers, open_checkpoint, read_index
from lmkit_worker.loading.safetensors import SafetensorsLoader
from safetensors.torch import save_file

NOWHERE = CheckpointOptions(offline=True)
Directory = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """directory(**files): config.json, and what is given: dicts as JSON, sets as tensor names, bytes as they are."""

    def make(**files: Any) -> Path:
        (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            if isinstance(content, set):
                save_file({n: torch.zeros(2) for n in content}, path)
            else:
                path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return tmp_path

    return make


def test_single_file(directory: Directory) -> None:
    path = directory(model__safetensors={"a"}, generation_config__json={"top_k": 5})
    found = open_checkpoint(str(path), NOWHERE)
    assert found is not None
    assert (found.format, found.architecture, found.name) == ("safetensors", "X", path.name)
    assert found.files == (path / "model.safetensors",)
    assert found.nbytes == (path / "model.safetensors").stat().st_size
    assert found.generation_config == {"top_k": 5}


def test_shards_come_from_the_index(directory: Directory) -> None:
    path = directory(b__safetensors={"b"}, a__safetensors={"a"}, stray__safetensors={"c"})
    (path / INDEX).write_text(json.dumps({"weight_map": {"b": "b.safetensors", "a": "a.safetensors"}}))
    found = open_checkpoint(str(path), NOWHERE)
    assert found is not None
    assert [f.name for f in found.files] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("own", [{"bits": 4}, {"bits": 4, "quant_method": "toy4"}])
def test_a_file_of_the_producer_says_how_weights_are_stored(directory: Directory, own: dict[str, Any]) -> None:
    """By its name, unless it names the method; config.json comes first."""
    folder = directory(model__safetensors={"a"}, toy_quantize_config__json=own)
    found = open_checkpoint(str(folder), NOWHERE)
    assert found is not None
    assert found.config["quantization_config"] == {"quant_method": "toy_quantize_config.json"} | own
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "toy8"}}')
    found = open_checkpoint(str(folder), NOWHERE)
    assert found is not None
    assert found.config["quantization_config"] == {"quant_method": "toy8"}


def test_unknown_words_are_left_to_others() -> None:
    assert open_checkpoint("demo", NOWHERE) is None
    assert open_checkpoint("", NOWHERE) is None


@pytest.mark.parametrize("ref", ["./nowhere", "/nowhere/at/all", "~/no-such-checkpoint"])
def test_paths_that_do_not_exist(ref: str) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(ref, NOWHERE)


@pytest.mark.parametrize(("revision", "option"), [(None, ""), ("v1", " --revision v1")])
def test_a_hub_repository_with_pickles_only_says_how_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None, option: str
) -> None:
    (tmp_path / "config.json").write_text("{}")  # what a download brings, which leaves pickles out
    monkeypatch.setattr("lmkit.checkpoint.download", lambda *_, **__: tmp_path)
    with pytest.raises(CheckpointError, match=r"some-org/some-model has no \*\.safetensors files") as caught:
        open_checkpoint("some-org/some-model", CheckpointOptions(revision=revision))
    assert f"hf download some-org/some-model{option} --local-dir DIRECTORY" in caught.value.fix
    assert "lmkit convert DIRECTORY -o NEW" in caught.value.fix


@pytest.mark.parametrize(
    "damage", [b"", b"\x01", bytes(8) + b"{}", b"\x02" + bytes(7) + b"{", b"\x02" + bytes(7) + b"[]"]
)
def test_headers_that_cannot_be_read(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cannot be read"):
        check_headers([file])
    file.write_bytes(b"\x02" + bytes(7) + b"{}")
    check_headers([file])


def test_offline_hub_id_that_is_not_cached(tmp_path: Path) -> None:
    options = CheckpointOptions(cache_dir=str(tmp_path), offline=True)
    with pytest.raises(CheckpointError, match="not in the cache") as failure:
        open_checkpoint("some-org/some-model", options)
    assert failure.value.fix


@pytest.mark.parametrize("name", ["pytorch_model__bin", "consolidated__00__pth", "model__pt"])
def test_pickles_are_refused(directory: Directory, name: str) -> None:
    path = directory(**{name: b"\x80\x04."})
    with pytest.raises(CheckpointError, match="execute code") as failure:
        open_checkpoint(str(path), NOWHERE)
    assert "safetensors" in failure.value.fix
    with pytest.raises(CheckpointError, match="execute code"):
        open_checkpoint(str(path / name.replace("__", ".")), NOWHERE)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no .*safetensors"),
        ({"a__safetensors": {"a"}, "b__safetensors": {"b"}}, "no model.safetensors.index.json"),
        ({INDEX: {"weight_map": {"a": "gone.safetensors"}}}, "gone.safetensors, which is missing"),
        ({INDEX: {"weight_map": {"a": "../up.safetensors"}}}, "not a safetensors file beside it"),
        ({INDEX: {"weight_map": {"a": "model.bin"}}}, "not a safetensors file beside it"),
        ({INDEX: {"weight_map": {}}}, "no weight_map"),
        ({INDEX: {"weight_map": ["a"]}}, "no weight_map"),
        ({INDEX: b"{"}, "cannot be read"),
        ({"config__json": b"[1]"}, "JSON object"),
        ({"config__json": b"\xff\xfe"}, "cannot be read"),
        ({"config__json": b"[" * 100_000}, "cannot be read"),
    ],
)
def test_unusable_directories(directory: Directory, files: dict[str, Any], words: str) -> None:
    files = {"model__safetensors": {"a"}, **files} if "config__json" in files else files
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(directory(**files)), NOWHERE)


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 64), 10**400])
def test_numbers_of_any_size_can_be_sent(directory: Directory, number: int) -> None:
    """A checkpoint crosses processes, and what is sent holds 64 bits."""
    path = directory(model__safetensors={"a"}, generation_config__json={"x": [{"y": number}]})
    found = open_checkpoint(str(path), NOWHERE)
    assert found is not None
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(found.generation_config))
    assert back["x"][0]["y"] == (number if -(1 << 63) <= number < 1 << 64 else float(str(number)))


def test_a_name_that_stands_twice_is_refused(directory: Directory) -> None:
    one = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    for head in (
        "{" + ", ".join([one, one.replace("a", "b", 1).replace("[0, 8]", "[8, 16]"), one]) + "}",
        "{" + one.replace('"shape"', '"shape": [2], "shape"') + "}",
        '{"__metadata__": {"x": "1", "x": "2"}, ' + one + "}",
    ):
        data = bytes(16 if '"b"' in head else 8)
        path = directory(model__safetensors=struct.pack("<Q", len(head)) + head.encode() + data)
        found = open_checkpoint(str(path), NOWHERE)
        assert found is not None
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            SafetensorsLoader().tensors(found)


def test_directory_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path), NOWHERE)


def test_index_is_read(directory: Directory) -> None:
    path = directory(**{INDEX: {"metadata": {}, "weight_map": {"a": "x.safetensors"}}})
    assert read_index(path / INDEX) == {"a": "x.safetensors"}


def test_finding_a_checkpoint_does_not_import_torch() -> None:
    code = "import sys, lmkit.checkpoint, lmkit_decoders.describe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_downloads_are_one_copy_of_the_weights_and_no_code() -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.model",
              "tokenizer.json", "chat_template.jinja", "merges.txt"]  # fmt: skip
    other = ["consolidated.safetensors", "original/consolidated.safetensors", "modeling_x.py", "pytorch_model.bin",
             "onnx/config.json", "model.gguf"]  # fmt: skip
    assert list(filter_repo_objects([*wanted, *other], allow_patterns=PATTERNS, ignore_patterns=UNNEEDED)) == wanted
