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
    assert 0 < found["memory"]["weight_bytes"] < found["device"]["total_memory"]

    code, text = run(capsys, "plan", "demo", "--device", gpu)
    assert code == 0
    for word in ("attention", "linear plain", "rowwise", "KV cache", "context"):
        assert word in text


def test_a_model_that_does_not_fit_is_not_selected(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "--model", "demo", "--device", "cuda:9.0:1MB")
    (platform,) = (t for t in found["topics"] if t["kind"] == "platform")
    assert [c["verdict"] for c in platform["candidates"] if c["name"] == "cuda"] == ["usable"]
    assert "weights" in platform["error"]["message"]
    code, _ = run(capsys, "plan", "demo", "--device", "cuda:9.0:1MB")
    assert code != 0


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


def requests(kind: str, device: DeviceInfo) -> SelectRequest | None:
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
        if entry.state == "shadowed" or host.open(entry) is not None or entry.spec is None:
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
            refused = evaluate(
                host, [requests(entry.kind, gpu)], Wanted(spec.name), explicit=True, imports=True
            ).reasons
            assert not {r.code for r in refused} & {"broken", "check-failed", "hooks-import"}, refused
    assert "lmkit-attention-flashinfer" in seen
