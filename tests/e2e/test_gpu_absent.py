"""GPUs where there are none: described ones are explained and planned, and what needs one says why it cannot run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lmkit_cli
import pytest
from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo, OpRequest, PlatformSpec, SelectRequest, Unavailable
from lmkit.plugins.host import PluginHost
from lmkit.plugins.platforms import choose_platform
from lmkit.plugins.refs import load_ref
from lmkit.plugins.select import Wanted, evaluate
from lmkit_testing.checkpoints import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [
    ROOT / "README.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("plugins/*/*/README.md"),
    *ROOT.glob("plugins/frontends/cli/src/*/*.py"),
]
CPU = DeviceInfo("cpu", "cpu", dtypes=("bfloat16", "float32"))
GPUS = ("cuda:9.0:141GB", "rocm:gfx942:192GB")


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return PluginHost()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = lmkit_cli.run(arguments)
    out, err = capsys.readouterr()
    return code, out + err


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, text = run(capsys, "explain", "--json", *arguments)
    assert code == 0
    return json.loads(text)


def test_every_device_that_documents_name_is_described(host: PluginHost) -> None:
    named = {name for path in TEXTS for name in re.findall(r"--device \"?([a-z]+:[\w.:]+\w)", path.read_text())}
    assert named >= {"cuda:9.0:80GB", "rocm:gfx942:192GB"}
    for name in named:
        _, device = choose_platform(host, "auto", name)
        assert device.described
        assert device.total_memory, name


@pytest.mark.parametrize("gpu", GPUS)
def test_everything_is_explained_and_planned(capsys: pytest.CaptureFixture[str], gpu: str) -> None:
    found = explained(capsys, "--model", "demo", "--device", gpu)
    topics = {(t["kind"], t["component"]): t for t in found["topics"]}
    assert not [t for t in topics.values() if t["error"]]
    for kind, component in [("attention", "text"), ("op", "linear:plain"), ("op", "rowwise")]:
        chosen = [c["name"] for c in topics[kind, component]["candidates"] if c["verdict"] == "selected"]
        assert len(chosen) == 1, f"{kind} {component}: {chosen}"
    memory = found["memory"]
    assert 0 < memory["weight_bytes"] < memory["device_bytes"] == found["device"]["total_memory"]
    parts = [memory[f"{part}_bytes"] for part in ("process", "weight", "activation", "kv")]
    assert all(parts), "a context on the device takes memory, too"
    assert sum(parts) <= memory["device_bytes"]

    code, text = run(capsys, "plan", "demo", "--device", gpu)
    assert code == 0
    for word in ("attention", "linear plain", "rowwise", "KV cache", "context"):
        assert word in text


# A decoder with attention, recurrent layers and experts
MIXED = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_act": "silu", "vocab_size": 97,
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    "max_position_embeddings": 256, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 32, "dtype": "bfloat16",
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
    "eos_token_id": 2, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture
def layers_of_all_kinds(tmp_path: Path) -> Path:
    """A checkpoint without weights, which nobody reads here."""
    (tmp_path / "config.json").write_text(json.dumps(MIXED))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    byte_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kind_of_layer_has_its_kernel(
    capsys: pytest.CaptureFixture[str], layers_of_all_kinds: Path, gpu: str
) -> None:
    code, text = run(capsys, "plan", str(layers_of_all_kinds), "--device", gpu)
    assert code == 0
    named = {line.split("  ")[0] for line in text.splitlines()}
    assert named >= {"attention", "linear plain", "moe plain", "rowwise", "recurrent"}
    code, text = run(capsys, "explain", "op", "--model", str(layers_of_all_kinds), "--device", gpu)
    assert code == 0
    told = text.partition("op moe:plain")[2].partition("op rowwise")[0]
    (chosen,) = (line for line in told.splitlines() if "SELECTED" in line)
    assert "moe_triton" in chosen


def test_a_model_that_does_not_fit_is_not_selected(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "--model", "demo", "--device", "cuda:9.0:1MB")
    (platform,) = (t for t in found["topics"] if t["kind"] == "platform")
    assert [c["verdict"] for c in platform["candidates"] if c["name"] == "cuda"] == ["usable"]
    assert "weights" in platform["error"]["message"]
    code, _ = run(capsys, "plan", "demo", "--device", "cuda:9.0:1MB")
    assert code != 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scheme", ["int4", "int8"])
def test_memory_is_that_of_the_kernel(capsys: pytest.CaptureFixture[str], scheme: str) -> None:
    """Integers that the chosen kernel dequantizes as it loads them take the memory of what they become."""
    model = ("--model", "demo", "--device", GPUS[0])
    plain = explained(capsys, *model)["memory"]["weight_bytes"]
    found = explained(capsys, *model, "--quantization", scheme)
    tiers = {
        c["tier"]
        for t in found["topics"]
        if t["component"] == f"linear:{scheme}"
        for c in t["candidates"]
        if c["verdict"] == "selected"
    }
    weights = found["memory"]["weight_bytes"]
    assert weights == plain if tiers == {"reference"} else weights < plain


FORMS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                   "fmt": "e4m3"},
    "mxfp4": {"quant_method": "mxfp4"},
}  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("gpu", ["cuda:9.0:80GB", "cuda:8.0:80GB", GPUS[1]])
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_few_bits_have_kernels(
    capsys: pytest.CaptureFixture[str], layers_of_all_kinds: Path, form: str, gpu: str
) -> None:
    """None of them is dequantized as it is loaded, be it of linears or of experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    changed = {**MIXED, **sizes, "quantization_config": FORMS[form]}
    (layers_of_all_kinds / "config.json").write_text(json.dumps(changed))
    found = explained(capsys, "--model", str(layers_of_all_kinds), "--device", gpu)
    chosen = {
        t["component"]: [c["name"] for c in t["candidates"] if c["verdict"] == "selected"]
        for t in found["topics"]
        if t["kind"] == "op"
    }
    quantized = {name: names for name, names in chosen.items() if name.split(":")[-1] not in ("plain", "rowwise")}
    assert {name.split(":")[0] for name in quantized} >= {"linear", "moe"}
    for name, (kernel,) in quantized.items():
        assert "triton" in kernel or kernel == "fp8_scaled_mm", f"{name} by {kernel}"


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_gpu_that_is_not_here_is_one_screen(capsys: pytest.CaptureFixture[str], host: PluginHost, name: str) -> None:
    entry, _ = host.find("platform", name)
    assert entry is not None
    assert host.open(entry) is None
    assert isinstance(entry.spec, PlatformSpec)
    if not isinstance(load_ref(entry.spec.probe)(), Unavailable):
        pytest.skip("there is one")
    code, text = run(capsys, "complete", "hello", "--platform", name)
    assert code != 0
    assert "driver" in text  # why
    assert "install the driver" in text or "load the amdgpu driver" in text  # and what to do
    assert "these would work: cpu" in text
    assert "Traceback" not in text
    assert len(text.splitlines()) <= 12
    code, text = run(capsys, "explain", "platform", "--platform", name)
    assert code == 0
    assert "driver" in text
    assert "REFUSED" in text
    found = explained(capsys, "--platform", name)
    assert not [t for t in found["topics"] if t["kind"] == "platform" and not t["candidates"]]


def requests(kind: str, device: DeviceInfo) -> SelectRequest:
    """Something that is asked of a plugin of this kind."""
    if kind == "attention":
        return AttentionRequest(need=AttnNeed(128, 32, 8), device=device, dtype="bfloat16")
    if kind == "op":
        return OpRequest(op="linear", device=device, dtype="bfloat16")
    return SelectRequest(kind=kind, device=device)


def test_plugins_of_gpus_are_refused_with_a_reason(host: PluginHost) -> None:
    """On a processor as on a described GPU, whatever of their needs is not installed; none of them raises."""
    seen = set()
    for entry in host.entries():
        unopened = host.open(entry) if entry.state != "shadowed" else None
        assert unopened is None or unopened.code != "broken", unopened
        if entry.spec is None:
            continue
        spec = entry.spec
        if isinstance(spec, PlatformSpec):
            found = load_ref(spec.probe)()
            assert found, f"{spec.name}: neither devices nor a reason"
            assert not isinstance(found, Unavailable) or found.reason
        if set(spec.platforms) & {"*", "cpu"}:
            continue
        seen.add(entry.dist)
        (reason, *_) = evaluate(host, [requests(entry.kind, CPU)], Wanted(spec.name), explicit=True).reasons
        assert reason.code
        for text in GPUS:
            _, gpu = choose_platform(host, "auto", text)
            asked = [requests(entry.kind, gpu)]
            refused = evaluate(host, asked, Wanted(spec.name), explicit=True, imports=True).reasons
            assert not {r.code for r in refused} & {"broken", "check-failed"}, refused
    assert "lmkit-attention-flashinfer" in seen
