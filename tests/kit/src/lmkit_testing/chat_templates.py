"""Conformance of readers of chat templates: what they read is a template, and what is damaged is refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import Checkpoint, CheckpointError, ConfigError, SelectRequest, TemplateRequest, TemplateSpec
from lmkit.kinds import BY_NAME

from lmkit_testing.specs import PluginConformance

GARBAGE = (b"", b"\xff" * 200, b"GGUF", b"{", bytes(1000))


def checkpoint_at(path: Path, architecture: str = "ToyForCausalLM") -> Checkpoint:
    return Checkpoint(str(path), path, "safetensors", {"architectures": [architecture]})


class TemplateConformance(PluginConformance):
    """Override `file`: it writes a file with a template, and says what is read out of it. Plugins that bring templates
    of their own are asked for each model that they declare."""

    def file(self, folder: Path) -> tuple[Path, str]:
        """A file that the plugin reads, and the template in it."""
        pytest.skip("`file` is not overridden: the class of the test writes what the plugin reads")

    def test_something_is_declared(self, spec: TemplateSpec) -> None:
        assert spec.suffixes or spec.models, "files or models: it would never be asked"
        assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in spec.suffixes), "'.toy'"

    def test_others_files_are_refused(self, spec: TemplateSpec) -> None:
        """Selection refuses what is not declared."""
        requests: list[SelectRequest] = [TemplateRequest(suffix=".of-the-future")]
        if not any(fnmatchcase("NobodysForCausalLM", glob) for glob in spec.models):
            requests.append(TemplateRequest(architecture="NobodysForCausalLM", model="nobody"))
        for request in requests:
            assert list(BY_NAME["template"].refusals(spec, request)), "what is not declared is refused"

    def test_the_template_of_a_file(self, target: Any, spec: TemplateSpec, tmp_path: Path) -> None:
        if not spec.suffixes:
            pytest.skip("reads no files")
        path, expected = self.file(tmp_path)
        assert path.suffix.lower() in spec.suffixes
        for _ in range(2):
            assert target(path, checkpoint_at(path)) == expected

    def test_damage(self, target: Any, spec: TemplateSpec, tmp_path: Path) -> None:
        """Garbage is refused by the name of the file, or holds none; and so is a file that is not there."""
        for suffix in spec.suffixes:
            path = tmp_path / f"model{suffix}"
            for content in (*GARBAGE, None):
                path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
                try:
                    found = target(path, checkpoint_at(path))
                except (CheckpointError, ConfigError) as error:
                    if path.name not in error.message:
                        pytest.fail(f"the message does not name the file: {error.message}")
                else:
                    assert isinstance(found, str), f"{found!r:.60} is no text"
                    assert content is not None, "a file that is not there has a template"

    def test_templates_of_models(self, target: Any, spec: TemplateSpec, tmp_path: Path) -> None:
        """Each renders what a user says, and is the same every time."""
        if not spec.models:
            pytest.skip("brings no templates")
        from lmkit_tokenizer_json.render import Renderer

        for glob in spec.models:
            checkpoint = checkpoint_at(tmp_path, glob.replace("*", "Some").replace("?", "x"))
            found = target(tmp_path, checkpoint)
            assert isinstance(found, str), f"{glob}: {found!r:.60} is no text"
            assert found == target(tmp_path, checkpoint), f"{glob}: another one each time"
            if found:
                prompt = Renderer(found, {"bos_token": "<s>", "eos_token": "</s>"}).render(
                    [{"role": "user", "content": "lmkitprobe"}]
                )
                assert "lmkitprobe" in prompt, f"{glob}: the template drops what a user says"


__all__ = ["TemplateConformance", "checkpoint_at"]
