"""lmkit inspect, overrides of config.json, and what `plan` says against what an engine takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lmkit import LLM
from lmkit.api import ConfigError, LmkitError, SelectionError, UnsupportedModel, WeightMismatch
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
from lmkit_cli.estimate import planned
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), vocab_size=259)
    byte_tokenizer(path)
    return path


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lmkit", *args], capture_output=True, text=True, timeout=120)


def test_inspect_says_what_it_is_and_what_would_run_it(model: Path) -> None:
    found = json.loads(run("inspect", str(model), "--context", "100", "--json").stdout)
    assert found["architecture"] == "LlamaForCausalLM"
    assert (found["format"], found["files"], found["context"], found["tasks"]) == ("safetensors", 1, 256, ["generate"])
    assert found["bytes"] == (model / "model.safetensors").stat().st_size
    parts = found["memory"]
    assert parts["weights"] == 4 * found["parameters"]
    assert parts["kv"] == 7 * 16 * parts["kv_per_token"]  # 100 tokens in blocks of 16
    assert parts["total"] == parts["process"] + parts["weights"] + parts["activations"] + parts["kv"]
    assert {"model", "attention", "platform", "loader"} <= {c["kind"] for c in found["run_by"]}
    assert found["problems"] == []
    shown = run("inspect", str(model)).stdout
    for words in ("LlamaForCausalLM", "256 tokens", "4 query and 2 KV heads of 12", "attention"):
        assert words in shown


@pytest.mark.full("lmkit-cli")
def test_inspect_of_what_cannot_run_says_why(model: Path, tmp_path: Path) -> None:
    path = altered(model, tmp_path, rope_scaling={"rope_type": "yarm", "factor": 2.0}, rope_parameters=None)
    done = run("inspect", str(path), "--json")
    assert done.returncode == 0
    (problem,) = json.loads(done.stdout)["problems"]
    assert "yarm" in problem["message"]
    assert problem["fix"] == "nearest: yarn"


@pytest.mark.full("lmkit-cli")
def test_overrides(model: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    text = json.dumps({"rope_parameters": rope, "max_position_embeddings": 1024})
    plan, checkpoint, info = resolve(from_options({"model": str(model), "hf_overrides": text}))
    assert info.max_length == 1024
    assert checkpoint.config["rope_parameters"] == rope
    assert plan.value("hf_overrides") == text
    with LLM(str(model), hf_overrides=text, dtype="float32", kv_memory="8MiB") as changed:
        long = list(range(3, 103)) * 4
        assert changed.generate([long])[0].token_ids
    with pytest.raises(ConfigError, match="JSON object"):
        resolve(from_options({"model": str(model), "hf_overrides": "[1]"}))
    with pytest.raises(UnsupportedModel, match="pretraining_tp"):
        resolve(from_options({"model": str(model), "hf_overrides": '{"pretraining_tp": 2}'}))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_is_within_five_percent_of_what_an_engine_takes(model: Path, dtype: str) -> None:
    config = from_options({"model": str(model), "dtype": dtype, "kv_memory": "8MiB"})
    said = planned(config, *resolve(config))
    with LLM(config=config) as llm:
        runner = llm._engine.core.executor.worker.runner
        kv = sum(tensor.nbytes for tensor in runner.blocks.kv)
        took = llm.facts.weight_bytes + llm.facts.activation_bytes + kv
        assert said.weight_bytes == pytest.approx(llm.facts.weight_bytes, rel=0.05)
        assert said.kv_bytes == pytest.approx(kv, rel=0.05)
        assert said.weight_bytes + said.activation_bytes + said.kv_bytes == pytest.approx(took, rel=0.05)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "options", "kind", "words"),
    [
        ({}, {"quantization": "fp9"}, SelectionError, "did you mean 'fp8'"),
        ({"hidden_act": "silo"}, {}, UnsupportedModel, "nearest: silu"),
        (
            {"architectures": ["LlamaForCausalML"]},
            {"model_impl": "native"},
            SelectionError,
            "nearest: LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForCausalML"]}, {}, LmkitError, "own families: LlamaForCausalLM"),
        ({"head_dim": 7}, {}, UnsupportedModel, "head_dim"),
        ({"num_hidden_layers": 3}, {}, WeightMismatch, "layers.2"),
        ({"num_hidden_layers": 1}, {}, WeightMismatch, "extra"),
        ({"vocab_size": 300}, {}, WeightMismatch, "[259, 48], needs [300, 48]"),
    ],
)
def test_bad_input_is_named(
    model: Path, tmp_path: Path, changes: dict, options: dict, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as failure:
        LLM(str(altered(model, tmp_path, **changes)), dtype="float32", kv_memory="8MiB", **options)
    assert words in f"{failure.value.message} {failure.value.fix}"
    assert ("would work" in failure.value.fix) == ("quantization" in options)  # others stand in for what was named


def test_names_are_hinted_at_only_where_nobody_knows_them(model: Path, tmp_path: Path) -> None:
    path = altered(model, tmp_path, architectures=["BartForConditionalGeneration"], is_encoder_decoder=True)
    with pytest.raises(UnsupportedModel) as failure:
        resolve(from_options({"model": str(path)}))
    assert "cross attention" in failure.value.fix
    assert "nearest" not in failure.value.fix


def altered(model: Path, folder: Path, **changes: object) -> Path:
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((model / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder
