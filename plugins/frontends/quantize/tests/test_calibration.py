"""`lmkit quantize --method gptq|awq`: what calibration chose is written. llmcompressor itself where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch
from lmkit.api import CheckpointError, ConfigError
from lmkit.checkpoint import read_directory
from lmkit_cli import run
from lmkit_layouts.words import unpack
from lmkit_quantize import calibration
from lmkit_quantize.calibration import ERRORS, JOB, SAMPLES, WINDOW, Calibration, Job
from lmkit_quantize.rounding import SCHEMES, Scheme
from lmkit_quantize.writing import CALIBRATION, REPORT, Report, quantize
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from safetensors.torch import load_file, save_file

INT4 = replace(SCHEMES["int4"], group=32)
NORM = "model.layers.1.input_layernorm.weight"
TEXT = "".join(f"{a} and {b} are {a + b}. " for a in range(40) for b in range(40))
real = pytest.mark.skipif(find_spec("llmcompressor") is None, reason="needs lmkit-quantize[calibration]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_checkpoint("llama", folder, hidden_size=64, intermediate_size=128, vocab_size=259)
    byte_tokenizer(folder)
    return folder


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands for llmcompressor: turns the signs of weights and doubles the norms. The folders that it ran in."""
    ran: list[Path] = []

    def chosen(folder: Path, advance: Callable[[int], None]) -> None:
        ran.append(folder)
        job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
        tensors, errors = {}, {}
        for name, tensor in load_file(Path(job.model) / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if tensor.dim() == 2 and "layers" in name and layer not in job.ignored:
                stored, meant = job.scheme.round(-tensor)
                scale = stored["weight_scale"]
                zeros = torch.full_like(scale, 2) if not job.scheme.symmetric else torch.zeros_like(scale)
                tensors |= {name: meant, f"{name}_scale": scale.float(), f"{name}_zero_point": zeros.to(torch.int8)}
                errors[layer] = (0.125, 0.25)
            elif "layers" in name:
                tensors[name] = 2 * tensor.float()
        save_file(tensors, folder / "all.safetensors", {ERRORS: json.dumps(errors)})
        advance(len(errors))

    monkeypatch.setattr(calibration, "find_spec", lambda name: True)
    monkeypatch.setattr(calibration, "_run", chosen)
    return ran


def made(model: Path, output: Path, scheme: Scheme, method: str, text: str = TEXT, tokens: int = 1024) -> Report:
    how = msgspec.convert({"method": method, "text": text, "tokens": tokens}, Calibration)
    return quantize(read_directory(str(model), model), output, scheme, [], lambda *said: None, how)


def values(folder: Path, scheme: Scheme) -> dict[str, torch.Tensor]:
    """What the result means, by name of the weight."""
    stored, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        layer = name.removesuffix(".weight_packed")
        if layer != name:
            codes = unpack(tensor, scheme.bits).float() - (1 << scheme.bits - 1)
            parts = codes.unflatten(1, (-1, scheme.group or codes.shape[1]))
            zeros = torch.zeros(())
            if (words := stored.get(f"{layer}.weight_zero_point")) is not None:
                zeros = unpack(words.t().contiguous(), scheme.bits).t()[: codes.shape[0], :, None].float() - 8
            found[f"{layer}.weight"] = ((parts - zeros) * stored[f"{layer}.weight_scale"].float()[..., None]).flatten(1)
        elif name.endswith(("weight", "bias")):
            found[name] = tensor
    return found


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_was_chosen_is_written(model: Path, tmp_path: Path, process: list[Path], symmetric: bool) -> None:
    scheme = replace(INT4, symmetric=symmetric)
    report = made(model, tmp_path / "out", scheme, "gptq")
    before, after = load_file(model / "model.safetensors"), values(tmp_path / "out", scheme)
    assert before.keys() == after.keys()
    assert torch.equal(after[NORM], 2 * before[NORM])
    assert after[NORM].dtype == before[NORM].dtype
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for layer in report.layers:
        expected = scheme.round(-before[f"{layer.name}.weight"])[1]
        if symmetric:
            assert torch.equal(after[f"{layer.name}.weight"], expected)
        assert (layer.output_error, layer.rtn_output_error) == (0.125, 0.25)
        assert layer.error == pytest.approx(2, abs=0.1)  # of weights: all signs are wrong
    assert len(report.layers) == 7 * 2
    assert not (tmp_path / "out" / CALIBRATION).exists()
    assert report.calibration is not None
    assert report.calibration["method"] == "gptq"
    scaled = made(model, tmp_path / "awq", INT4, "awq")
    assert max(layer.error for layer in scaled.layers) < 1e-3  # beside the weights that AWQ has scaled


def test_calibration_is_done_once(
    model: Path, tmp_path: Path, process: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmkit_quantize import writing

    save = writing.save_file
    output = tmp_path / "out"

    def full(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "save_file", full)
    with pytest.raises(KeyboardInterrupt):
        made(model, output, INT4, "gptq")
    assert not (output / "config.json").exists()
    monkeypatch.setattr(writing, "save_file", save)
    for method, text in (("awq", TEXT), ("gptq", TEXT + "."), ("gptq", "")):
        with pytest.raises(ConfigError, match="something else"):
            made(model, output, INT4, method, text)
    made(model, output, INT4, "gptq")
    made(model, output, INT4, "gptq")
    assert len(process) == 1


def test_samples(model: Path, tmp_path: Path, process: list[Path]) -> None:
    """Of a text, pieces from its beginning to its end; without one, what the model writes: the same each time."""
    checkpoint = read_directory(str(model), model)
    size = min(WINDOW, checkpoint.config["max_position_embeddings"])  # type: ignore[call-overload]
    ids = calibration._windows(checkpoint, Calibration("gptq", TEXT, 4 * size))
    whole = calibration._encoded(checkpoint, TEXT)
    places = [next(at for at in range(0, len(whole), size) if whole[at : at + size] == window) for window in ids]
    assert {len(window) for window in ids} == {size}
    assert places == sorted(places)
    assert len(places) == 4
    assert places[0] < size
    assert places[-1] > len(whole) / 2
    written = [calibration._windows(checkpoint, Calibration("awq", "", 2 * size)) for _ in range(2)]
    assert written[0] == written[1]
    assert [len(window) for window in written[0]] == [size, size]
    assert written[0][0] != written[0][1]
    with pytest.raises(ConfigError, match="tokens, and"):
        made(model, tmp_path / "out", INT4, "gptq", "short")
    assert not process


def test_refusals(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="chooses integers"):
        made(model, tmp_path / "out", SCHEMES["fp8"], "gptq")
    command = ["quantize", str(model), "-o", str(tmp_path / "out")]
    assert run([*command, "--method", "awq"]) == 2
    assert 'pip install "lmkit-quantize[calibration]"' in capsys.readouterr().err
    assert run([*command, "--calibration-tokens", "8"]) == 2
    assert "looks at no text" in capsys.readouterr().err
    assert run([*command, "--method", "gptq", "--calibration", str(tmp_path / "none.txt")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_process_that_fails(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words are the error, and the result does not look complete."""
    monkeypatch.setattr(calibration, "find_spec", lambda name: True)
    (tmp_path / "killed.py").write_text("import os\nprint('begins', flush=True)\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module, words in (("no_such_module", "No module named no_such_module"), ("killed", "signal 9")):
        monkeypatch.setattr(calibration, "MODULE", module)
        with pytest.raises(CheckpointError, match=words):
            made(model, tmp_path / "out", INT4, "gptq")
    assert not (tmp_path / "out" / "config.json").exists()


@real
def test_a_run_of_gptq_that_was_cut_off_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made(model, tmp_path / "whole", INT4, "gptq")
    for layer in whole.layers:
        assert layer.output_error is not None
        assert layer.rtn_output_error is not None
    assert sum(layer.output_error < layer.rtn_output_error for layer in whole.layers) >= 12  # type: ignore[operator]
    run_process = calibration._run

    def cut(folder: Path, advance: Callable[[int], None]) -> None:
        def once(number: int) -> None:
            raise KeyboardInterrupt

        run_process(folder, once)

    output = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(calibration, "_run", cut)
        with pytest.raises(KeyboardInterrupt):
            made(model, output, INT4, "gptq")
    assert (output / CALIBRATION / SAMPLES).is_file()
    first = sorted((output / CALIBRATION).glob("*.safetensors"))[0]
    changed = first.stat().st_mtime_ns
    seen: list[int] = []

    def watched(folder: Path, advance: Callable[[int], None]) -> None:
        run_process(folder, lambda number: seen.append(number))
        assert first.stat().st_mtime_ns == changed

    with monkeypatch.context() as patched:
        patched.setattr(calibration, "_run", watched)
        made(model, output, INT4, "gptq")
    assert sum(seen) < 14
    assert {f.name: f.read_bytes() for f in output.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "whole").iterdir()
    }


@real
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_result_is_the_model(model: Path, tmp_path: Path, method: str) -> None:
    """With 8 bits, and norms and linears that AWQ has scaled, logits are nearly those of before."""
    import transformers

    scheme = replace(SCHEMES["int8"], group=32)
    made(model, tmp_path / "out", scheme, method)
    tokens = torch.tensor([[3 + byte for byte in TEXT.encode()[:48]]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        before = plain(tokens).logits[0]
        plain.load_state_dict({k: v.float() for k, v in values(tmp_path / "out", scheme).items()}, strict=False)
        after = plain(tokens).logits[0]
    assert (after - before).norm() < 0.1 * before.norm()  # to the nearest: 0.04
    changed = values(tmp_path / "out", scheme)[NORM]
    assert torch.equal(changed, load_file(model / "model.safetensors")[NORM]) == (method == "gptq")
    report = msgspec.json.decode((tmp_path / "out" / REPORT).read_bytes(), type=Report)
    assert all(layer.output_error < 0.02 for layer in report.layers if layer.output_error is not None)


@real
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_are_calibrated(tmp_path: Path, method: str) -> None:
    """Under the names that the checkpoint has for them, and all of them: those that no token chose, too."""
    folder = tiny_checkpoint(
        "Qwen3MoeForCausalLM", tmp_path / "model", hidden_size=64, moe_intermediate_size=64, num_attention_heads=4,
        head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=259,
    )  # fmt: skip
    byte_tokenizer(folder)
    report = made(folder, tmp_path / "out", INT4, method)
    experts = [layer for layer in report.layers if ".experts." in layer.name]
    assert len(experts) == 2 * 4 * 3
    assert all(layer.output_error is not None for layer in experts)
    assert {f"model.layers.{i}.mlp.gate" for i in range(2)} < set(report.ignored)


@real
def test_names_that_transformers_changes(tmp_path: Path) -> None:
    """Are refused before anything is calibrated."""
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path / "model", hidden_size=64, intermediate_size=64)
    byte_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"it has no model\.layers\.0\.block_sparse_moe\.experts\.0\.w1"):
        made(folder, tmp_path / "out", INT4, "gptq")
