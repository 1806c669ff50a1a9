"""A world of pretend plugins, written as dists into a folder: enough to resolve a whole plan without any real one."""

from __future__ import annotations

from lmkit_testing.host import DistDir

PLATFORM = """
from lmkit.api import DeviceInfo, PlatformSpec, Unavailable, hookimpl

def probe():
    return {probe}

class Device:
    def worker_env(self, config, rank):
        return {{}}

    def defaults(self, model, device):
        return {defaults}

@hookimpl
def lmkit_platforms():
    yield PlatformSpec(
        name="{name}", summary="A pretend device", target="{module}:Device", probe="{module}:probe",
        device_type="cpu", stability={stability!r}, fallback={fallback}, prefers={prefers},
    )
"""

ATTENTION = """
from lmkit.api import AttentionSpec, Dims, Range, Tier, hookimpl, multiple_of, one_of

@hookimpl
def lmkit_attention_backends():
    yield AttentionSpec(
        name="{name}", summary="Pretend attention", target="{target}",
        dtypes=frozenset({{"float32", "bfloat16"}}), {extra}
    )
"""

MODEL = """
from lmkit.api import AttnNeed, LayerInfo, LinearSpec, ModelInfo, ModelSpec, hookimpl

class Toy:
    names = ("ToyForCausalLM",)

    def describe(self, config):
        window = config.get("sliding_window")
        full = AttnNeed(head_dim=64, num_q_heads=4, num_kv_heads=2)
        local = AttnNeed(head_dim=64, num_q_heads=4, num_kv_heads=2, window=window)
        return ModelInfo(
            architecture="ToyForCausalLM", vocab_size=100, hidden_size=256,
            layers=(LayerInfo(0, full), LayerInfo(1, local)), max_length=128,
            dtype=config.get("dtype", "bfloat16"), num_parameters=1000, eos_token_ids=(2,),
            linears=(LinearSpec("layers.0.up", 256, (512,)), LinearSpec("layers.0.down", 512, (256,))),
        )

@hookimpl
def lmkit_models():
    yield ModelSpec(
        name="toy", summary="Toy decoder", target="toy_model.hooks:Toy", architectures=("ToyForCausalLM",),
    )
"""

CHECKPOINT = """
from pathlib import Path
from lmkit.api import Checkpoint, TemplateSpec, hookimpl

@hookimpl
def lmkit_resolve_checkpoint(ref, options):
    if not ref.startswith("toy"):
        return None
    config = {"architectures": ["ToyForCausalLM"]}
    if ref == "toy-window":
        config["sliding_window"] = 16
    if ref == "toy-quantized":
        config["quantization_config"] = {"quant_method": "toy4"}
    return Checkpoint(
        ref=ref, path=Path("."), format="safetensors", config=config, generation_config={"eos_token_id": [2, 3]},
    )

def template(path, checkpoint):
    return "{% if tools %}<toy_call>{% endif %}"

@hookimpl
def lmkit_templates():
    yield TemplateSpec(name="toy", summary="Toy calls", target="toy_store.hooks:template", models=("Toy*",),
        interface=2)
"""

SCHEDULER = """
from lmkit.api import SchedulerSpec, hookimpl

@hookimpl
def lmkit_schedulers():
    yield SchedulerSpec(name="order", summary="In order", target="toy_scheduler.hooks:lmkit_schedulers")
"""

CORE = """
from lmkit.api import ExecutorSpec, LoaderSpec, OpSpec, hookimpl

@hookimpl
def lmkit_executors():
    yield ExecutorSpec(name="one", summary="One process", target="toy_core.hooks:lmkit_ops")

@hookimpl
def lmkit_loaders():
    yield LoaderSpec(name="files", summary="Files", target="toy_core.hooks:lmkit_ops", formats=("safetensors",))

@hookimpl
def lmkit_ops():
    yield OpSpec(name="matmul", summary="Any format", target="toy_core.hooks:lmkit_ops", op="linear")
    yield OpSpec(name="rows", summary="Row-wise operators", target="toy_core.hooks:lmkit_ops", op="rowwise")
"""

DEVICE = 'DeviceInfo(platform="{name}", device_type="cpu", dtypes=("bfloat16", "float32"), capability={cc})'


class World(DistDir):
    """A DistDir with shorthands for fake plugins."""

    def platform(
        self,
        name: str,
        *,
        probe: str | None = None,
        fallback: bool = False,
        prefers: object = None,
        cc: object = None,
        defaults: object = None,
        stability: str = "beta",
    ) -> None:
        module = f"toy_platform_{name}.hooks"
        answer = probe or f"[{DEVICE.format(name=name, cc=cc)}]"
        source = PLATFORM.format(
            name=name, module=module, probe=answer, fallback=fallback, prefers=prefers or {}, defaults=defaults or {},
            stability=stability,
        )  # fmt: skip
        self.add(f"toy-platform-{name}", {"platform": {name: module}}, {module: source})

    def attention(
        self, name: str, extra: str = "", dist: str | None = None, target: str | None = None, **kwargs: object
    ) -> None:
        dist = dist or f"toy-attention-{name}"
        module = f"{dist.replace('-', '_')}.hooks"
        source = ATTENTION.format(name=name, target=target or f"{module}:lmkit_attention_backends", extra=extra)
        self.add(dist, {"attention": {name: module}}, {module: source}, **kwargs)

    def everything(self) -> World:
        """A world in which everything resolves."""
        self.basics()
        self.platform("plain", fallback=True)
        self.attention("ref", "tier=Tier.REFERENCE, features=frozenset({'causal', 'sliding_window'})")
        return self

    def basics(self) -> None:
        """All that a plan needs but platform and attention."""
        self.add("toy-model", {"model": {"ToyForCausalLM": "toy_model.hooks"}}, {"toy_model.hooks": MODEL})
        store = "toy_store.hooks"
        self.add("toy-store", {"extension": {"toy_store": store}, "template": {"toy": store}}, {store: CHECKPOINT})
        self.add("toy-scheduler", {"scheduler": {"order": "toy_scheduler.hooks"}}, {"toy_scheduler.hooks": SCHEDULER})
        core = "toy_core.hooks"
        points = {"executor": {"one": core}, "loader": {"files": core}, "op": {"matmul": core, "rows": core}}
        self.add("toy-core", points, {core: CORE})
