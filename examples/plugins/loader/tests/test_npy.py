import numpy as np
import pytest
import torch
from lmkit.api import Checkpoint, CheckpointError
from lmkit_loader_npy.convert import convert
from lmkit_loader_npy.hooks import lmkit_resolve_checkpoint
from lmkit_loader_npy.loader import NpyLoader
from lmkit_testing import LoaderConformance
from safetensors.torch import save_file

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


class TestNpy(LoaderConformance):
    plugin = "loader:npy"

    def write(self, folder, tensors):
        """The kit checks that what is written here is found, read back, and refused where it is damaged."""
        (folder / "from").mkdir()
        save_file(tensors, folder / "from" / "model.safetensors")
        convert(folder / "from", folder / "to")
        (folder / "to" / "tensors").rename(folder / "tensors")


@pytest.fixture
def made(tmp_path):
    """Tensors of all kinds, and the folder that has them as NumPy files."""
    (tmp_path / "from").mkdir()
    tensors = {f"t.{i}": (torch.arange(12).reshape(3, 4) % 3).to(kind) for i, kind in enumerate(KINDS)}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "from" / "model.safetensors")
    (tmp_path / "from" / "config.json").write_text('{"architectures": ["X"]}')
    convert(tmp_path / "from", tmp_path / "to")
    return tensors, lmkit_resolve_checkpoint(str(tmp_path / "to"), None)


def test_same_tensors(made):
    tensors, checkpoint = made
    assert checkpoint.format == "npy"
    loader = NpyLoader()
    entries = {entry.name: entry for entry in loader.tensors(checkpoint)}
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = loader.read(entries[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) == (found.dtype, entries[name].shape)
        assert torch.equal(found.float(), tensor.float())


def test_damage_is_the_checkpoints_fault(made):
    _, checkpoint = made
    for content in (b"", b"garbage", checkpoint.files[0].read_bytes()[:-1]):
        checkpoint.files[0].write_bytes(content)
        with pytest.raises(CheckpointError, match=checkpoint.files[0].name):
            NpyLoader().tensors(checkpoint)


def test_objects_are_refused(tmp_path):
    """A pickle would be executed when it is read."""
    file = tmp_path / "x.npy"
    np.save(file, np.array([{}]), allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"x\.npy"):
        NpyLoader().tensors(Checkpoint(str(tmp_path), tmp_path, "npy", {}, files=(file,)))
