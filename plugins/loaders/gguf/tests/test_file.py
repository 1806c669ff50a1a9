"""Files of strangers: whatever is in them, they are read or refused with their name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import CheckpointError, LmkitError
from lmkit_loader_gguf.config import open_gguf
from lmkit_loader_gguf.file import OTHERS, TYPES, GgufFile, open_all
from lmkit_loader_gguf.loader import GgufLoader
from lmkit_testing.checkpoints import tiny_checkpoint

gguf = pytest.importorskip("gguf", reason="files are written with the library gguf")
from lmkit_testing.gguf_files import write  # noqa: E402


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def whole(pairs: list[bytes], tensors: list[bytes], data: bytes = bytes(256), version: int = 3) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def read(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    found = GgufFile(path)
    assert found.tensors is not None
    return found


GOOD = [pair("a.text", 8, text("yes")), pair("a.list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)), pair("b", 7, b"\1")]


def test_values_and_tensors(tmp_path: Path) -> None:
    found = read(tmp_path, whole(GOOD, [tensor("x", (2, 32), 8, 0), tensor("y", (3,), 0, 96)]))
    assert found.metadata == {"a.text": "yes", "a.list": [1, -2, 3], "b": True}
    x, y = found.tensors.values()
    assert (x.shape, x.type.name, x.nbytes) == ((2, 32), "Q8_0", 68)
    assert y.offset - x.offset == 96


@pytest.mark.parametrize(("number", "name"), [(16, "IQ2_XXS"), (40, "NVFP4"), (31, "Q4_0_4_4"), (250, "250")])
def test_a_type_that_is_not_read_is_called_by_its_name(tmp_path: Path, number: int, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"x is of type {name}; those that are read are F32, "):
        read(tmp_path, whole(GOOD, [tensor("x", (2, 64), number, 0)]))


def test_every_type_of_the_format_has_a_name() -> None:
    assert {kind.value for kind in gguf.GGMLQuantizationType} <= TYPES.keys() | OTHERS.keys()


HUGE = 1 << 62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "another magic": (b"GGML" + bytes(60), "beginning of"),
    "version 1": (whole(GOOD, [], version=1), "version 1"),
    "version 0x03000000, of the other byte order": (whole(GOOD, [], version=3 << 24), "version 50331648"),
    "empty": (b"", "cannot be read"),
    "a key twice": (whole([GOOD[0], GOOD[0]], []), "'a.text' twice"),
    "a text past the end": (whole([pair("x", 8, struct.pack("<Q", HUGE))], []), "bytes follow"),
    "an array past the end": (whole([pair("x", 9, struct.pack("<IQ", 10, HUGE))], []), "bytes follow"),
    "an array of texts past the end": (whole([pair("x", 9, struct.pack("<IQ", 8, HUGE))], []), "bytes follow"),
    "an array of arrays": (whole([pair("x", 9, struct.pack("<IQ", 9, 1))], []), "array of values of type 9"),
    "a value of no type": (whole([pair("x", 13, b"")], []), "value of type 13"),
    "no UTF-8": (whole([pair("x", 8, struct.pack("<Q", 1) + b"\xff")], []), "damaged"),
    "a tensor twice": (whole([], [tensor("x", (8,), 0, 0), tensor("x", (8,), 0, 32)]), "'x' twice"),
    "no axes": (whole([], [tensor("x", (), 0, 0)]), "0 axes"),
    "five axes": (whole([], [tensor("x", (1,) * 5, 0, 0)]), "5 axes"),
    "no numbers": (whole([], [tensor("x", (0, 32), 0, 0)]), "shape"),
    "an overflowing product": (whole([], [tensor("x", (1 << 32, 1 << 32), 0, 0)]), "shape"),
    "no whole blocks": (whole([], [tensor("x", (2, 31), 2, 0)]), "in blocks of 32"),
    "a type that is not read": (whole([], [tensor("x", (256,), 16, 0)]), "IQ2_XXS"),
    "a type of nobody": (whole([], [tensor("x", (256,), 99, 0)]), "type 99"),
    "an offset between": (whole([], [tensor("x", (8,), 0, 4)]), "no multiple of 32"),
    "an offset past the end": (whole([], [tensor("x", (8,), 0, 1 << 40)]), "past the end"),
    "an offset that overflows": (whole([], [tensor("x", (8,), 0, (1 << 64) - 32)]), "past the end"),
    "overlapping tensors": (whole([], [tensor("x", (16,), 0, 0), tensor("y", (8,), 0, 32)]), "overlap"),
    "an alignment of 3": (whole([pair("general.alignment", 4, struct.pack("<I", 3))], []), "power of two"),
    "pairs without end": (struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE) + bytes(64), "pairs of metadata"),
    "tensors without end": (struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0) + bytes(64), "tensors"),
}


@pytest.mark.parametrize("what", list(DAMAGED))
def test_damaged_files_are_refused_by_name(what: str, tmp_path: Path) -> None:
    data, says = DAMAGED[what]
    with pytest.raises(CheckpointError, match=r"x\.gguf") as e:
        read(tmp_path, data)
    assert says in e.value.message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write(tiny_checkpoint("LlamaForCausalLM", folder, **sizes), folder / "model.gguf", "llama", "Q4_0")


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A good file with some bytes changed, or cut: what opens is read to the end."""
    content = bytearray(model.read_bytes())
    header = content.find(b"output_norm.weight") + 400  # most of what can go wrong is before the data
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(header, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:size])
    try:
        checkpoint = open_gguf(str(path))
        assert checkpoint is not None
        loader = GgufLoader()
        for entry in loader.tensors(checkpoint):
            assert loader.read(entry).nbytes in (entry.nbytes, 4 * entry.nbytes // 18 * 32)
    except LmkitError:
        pass


def split(model: Path, folder: Path, change: Callable[[int], tuple[int, int]] = lambda i: (i, 2)) -> Path:
    """The model in two files; `change` gives what the metadata say of the number of each and of all."""
    content = GgufFile(model)
    names = list(content.tensors)
    for i, some in enumerate((names[:5], names[5:])):
        writer = gguf.GGUFWriter(folder / f"m-{i + 1:05}-of-00002.gguf", "llama")
        number, count = change(i)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        if i == 0:
            for key, value in content.metadata.items():
                if key.startswith(("llama.", "tokenizer.")):
                    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
                    add(key, value)
        for name in some:
            tensor = content.tensors[name]
            raw = content.data[tensor.offset : tensor.offset + tensor.nbytes]
            rows = np.frombuffer(raw, np.uint8).reshape(*tensor.shape[:-1], -1)
            kind = gguf.GGMLQuantizationType[tensor.type.name]
            writer.add_tensor(name, rows if kind else rows.view(np.float32), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return folder / "m-00002-of-00002.gguf"


def test_split_files(model: Path, tmp_path: Path) -> None:
    """Any part names all; a folder with them too. A missing or foreign one is refused."""
    last = split(model, tmp_path)
    whole_one = open_gguf(str(model))
    for ref in (last, last.with_name("m-00001-of-00002.gguf"), tmp_path):
        found = open_gguf(str(ref))
        assert found is not None
        assert whole_one is not None
        assert dict(found.config) == dict(whole_one.config)
        assert len(found.files) == 2
        names = {entry.name for entry in GgufLoader().tensors(found)}
        assert names == {entry.name for entry in GgufLoader().tensors(whole_one)}
    split(model, tmp_path, lambda i: (i, 3))
    with pytest.raises(CheckpointError, match="part 0 of 3"):
        open_all(last)
    last.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        open_gguf(str(tmp_path / "m-00001-of-00002.gguf"))


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    assert open_gguf("demo") is None
    assert open_gguf(str(tmp_path)) is None
    with pytest.raises(CheckpointError, match="no such file"):
        open_gguf("./none.gguf")
