"""LoaderConformance: a reader of weights gives the same tensors, in any order and as often as asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from lmkit.api import Checkpoint, CheckpointError, CheckpointOptions, Loader, LoaderSpec
from lmkit.checkpoint import INDEX, open_checkpoint
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import load_ref
from lmkit_worker.loading.safetensors import SafetensorsLoader
from safetensors.torch import load_file, save_file

from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import deviation, drive_default
from lmkit_testing.specs import PluginConformance, find_plugin

TOKENS = [3, 17, 10, 42, 8, 27, 20, 5]


def in_two_files(folder: Path) -> None:
    """Splits a checkpoint; its second file has dtypes of all sizes, and an empty tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


class LoaderConformance(PluginConformance):
    """A loader of safetensors files is compared with lmkit's own. For one of other formats override `write`."""

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors into a folder that has config.json, in the format that the plugin reads."""
        pytest.fail("override `write(folder, tensors)`: without it nothing is known of what this loader reads")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, spec: LoaderSpec, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        if "safetensors" not in spec.formats:
            pytest.skip("it reads no safetensors files: test_a_format_of_its_own tests it with `write`")
        folder = tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("loader"))
        in_two_files(folder)
        found = open_checkpoint(str(folder), CheckpointOptions())
        assert found is not None
        return found

    def loader(self) -> Loader:
        made: Loader = load_ref(find_plugin(self.plugin)[2].target)()
        return made

    def test_a_format_of_its_own(self, host: PluginHost, spec: LoaderSpec, tmp_path: Path) -> None:
        """Files made by `write` are found by lmkit_resolve_checkpoint and read back; damage is a CheckpointError."""
        if "safetensors" in spec.formats:
            pytest.skip("it is tested with files of safetensors")
        kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
        tensors = {f"t.{i}": (torch.arange(12).reshape(3, 4) % 5).to(kind) for i, kind in enumerate(kinds)}
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        self.write(tmp_path, tensors)
        found = host.first("lmkit_resolve_checkpoint", Checkpoint, ref=str(tmp_path), options=CheckpointOptions())
        if found is None or found.format not in spec.formats:
            fix = 'implement lmkit_resolve_checkpoint in a module with an entry point of the group "lmkit.extension"'
            pytest.fail(f"it is found as {found and found.format!r}, the loader reads {spec.formats}: {fix}")
        loader = self.loader()
        entries = {entry.name: entry for entry in loader.tensors(found)}
        assert entries.keys() == tensors.keys()
        for name in [*entries, *reversed(entries)]:
            value, entry = loader.read(entries[name]), entries[name]
            assert (value.dtype, tuple(value.shape)) == (getattr(torch, entry.dtype), entry.shape)
            assert value.dtype == tensors[name].dtype, name
            assert torch.equal(value, tensors[name]), name
        kept = {name: loader.read(entry) for name, entry in entries.items()}
        loader.release()
        del loader
        assert all(torch.equal(value, tensors[name]) for name, value in kept.items()), "tensors outlive their loader"
        file = max(found.files, key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        damaged = self.loader()
        with pytest.raises(CheckpointError, match=re.escape(file.name)):
            [damaged.read(entry) for entry in damaged.tensors(found)]

    def test_same_tensors(self, checkpoint: Checkpoint) -> None:
        reference, loader = SafetensorsLoader(), self.loader()
        expected = reference.tensors(checkpoint)
        entries = list(loader.tensors(checkpoint))
        assert entries == expected
        for entry in [*entries, *random.Random(0).sample(entries, len(entries))]:
            value = loader.read(entry)
            assert (value.dtype, tuple(value.shape)) == (getattr(torch, entry.dtype), entry.shape)
            assert torch.equal(value, reference.read(entry))
        loader.release()
        assert torch.equal(loader.read(entries[0]), reference.read(entries[0]))

    def test_tensors_outlive_their_loader(self, checkpoint: Checkpoint) -> None:
        loader, reference = self.loader(), SafetensorsLoader()
        kept = [(entry, loader.read(entry)) for entry in loader.tensors(checkpoint)]
        del loader
        reference.tensors(checkpoint)
        assert all(torch.equal(value, reference.read(entry)) for entry, value in kept)

    @pytest.mark.usefixtures("checkpoint")
    def test_other_types(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        kinds = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16]
        kinds += [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
        made = {f"t{i}": (torch.arange(1, 8 + i) % 5).to(kind) for i, kind in enumerate(kinds)}
        save_file({**made, "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}, file)
        checkpoint = Checkpoint(str(tmp_path), tmp_path, "safetensors", {}, files=(file,))
        loader, reference = self.loader(), SafetensorsLoader()
        reference.tensors(checkpoint)
        for entry in loader.tensors(checkpoint):
            value, expected = loader.read(entry), reference.read(entry)
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
            assert torch.equal(value.float(), expected.float())

    def test_logits(self, checkpoint: Checkpoint) -> None:
        name = self.plugin.partition(":")[2]
        expected = drive_default(checkpoint.path, "float32", "native").run(0, TOKENS, 5)
        got = drive_default(checkpoint.path, "float32", "native", loader=name).run(0, TOKENS, 5)
        assert deviation(got, expected) == 0

    def test_damage(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        content = checkpoint.files[0].read_bytes()
        damaged = Checkpoint(str(tmp_path), tmp_path, "safetensors", {}, files=(file,))
        for length in (0, 5, 100, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                self.loader().tensors(damaged)
        file.write_bytes(content)
        loader = self.loader()
        entries = loader.tensors(damaged)
        file.write_bytes(content[: len(content) // 2])  # between the look at the header and the reading
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            [loader.read(entry) for entry in entries]
