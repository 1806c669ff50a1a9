"""The whole plan, against pretend plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from lmkit.api import (
    CheckpointError,
    ConfigError,
    ConfigProposal,
    PluginError,
    ResolvedPlan,
    SelectionError,
    UnknownKey,
    UnknownName,
)
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.plugins.proposals import merge
from lmkit.plugins.refs import load_ref, load_target, verify
from lmkit.plugins.resolve import describe, resolve
from lmkit_testing.world import World

TOY = EngineConfig(model=ModelConfig(model="toy"))


def with_model(quantization: str = "auto", **fields: object) -> EngineConfig:
    model = replace(TOY.model, **fields)  # type: ignore[arg-type]
    return replace(TOY, model=model, wanted={"quantization": quantization})


def values(world: World, config: EngineConfig = TOY) -> dict[str, object]:
    return {d.key: d.value for d in resolve(config, world.host())[0].derived}


def test_everything_is_chosen(whole: World) -> None:
    plan, checkpoint, info = resolve(TOY, whole.host())
    assert {(c.kind, c.component): c.name for c in plan.choices} == {
        ("platform", ""): "plain",
        ("model", ""): "ToyForCausalLM",
        ("attention", "text"): "ref",
        ("op", "linear:plain"): "matmul",
        ("op", "rowwise"): "rows",
        ("loader", ""): "files",
        ("template", ""): "toy",
        ("scheduler", ""): "order",
        ("executor", ""): "one",
    }
    assert {d.key: d.value for d in plan.derived} == {
        "eos_token_ids": [2, 3],
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 16,
        "max_step_tokens": 512,
        "prefix_cache": True,
    }
    assert all(d.source for d in plan.derived)
    assert checkpoint.ref == "toy"
    assert info.architecture == "ToyForCausalLM"
    attention = plan.choice("attention", "text")
    assert attention is not None
    assert (attention.dist, attention.version, attention.module) == (
        "toy-attention-ref", "0.1.0", "toy_attention_ref.hooks",
    )  # fmt: skip
    assert describe(attention) == "attention[text]=ref (only candidate)"


def test_plan_round_trips(whole: World) -> None:
    whole.attention("other", "head_dims=one_of(8)")
    plan, _, _ = resolve(TOY, whole.host())
    again = msgspec.json.decode(plan.to_json(), type=ResolvedPlan)
    assert again == plan
    assert again.hash == plan.hash
    refused = again.choice("attention").refused  # type: ignore[union-attr]
    assert [(r.name, r.reasons[0].code) for r in refused] == [("other", "head-dim")]


READ_PLAN = """
import sys
import msgspec
sys.path.insert(0, sys.argv[1])
from lmkit.api import ResolvedPlan
from lmkit.plugins import load_target, verify
plan = msgspec.json.decode(sys.stdin.buffer.read(), type=ResolvedPlan)
verify(plan)
target = load_target(plan.choice("attention", "text"))
print(plan.hash, target.__name__, "toy_scheduler" in sys.modules)
"""


def test_plan_goes_through_a_spawned_process(whole: World) -> None:
    """It decodes, verifies and imports the chosen target there, and nothing that was not chosen."""
    plan, _, _ = resolve(TOY, whole.host())
    command = [sys.executable, "-c", READ_PLAN, str(whole.path)]
    done = subprocess.run(command, input=plan.to_json(), capture_output=True, timeout=60, check=False)
    assert done.stdout.decode().split() == [plan.hash, "lmkit_attention_backends", "False"], done.stderr.decode()


def test_a_worker_verifies_versions(whole: World) -> None:
    plan, _, _ = resolve(TOY, whole.host())
    verify(plan)
    info = next(whole.path.glob("toy_attention_ref-*/METADATA"))
    info.write_text(info.read_text().replace("Version: 0.1.0", "Version: 0.2.0"))
    with pytest.raises(PluginError, match=r"toy-attention-ref 0\.1\.0, here it is 0\.2\.0"):
        verify(plan)


def test_target_errors_name_the_plugin_and_the_cause(whole: World) -> None:
    plan, _, _ = resolve(TOY, whole.host())
    choice = plan.choice("attention", "text")
    assert choice is not None
    whole.add("bad-impl", {}, {"bad_impl": "1 / 0", "exiting_impl": "raise SystemExit"})
    with pytest.raises(PluginError, match=r"attention 'ref' .*toy-attention-ref 0\.1\.0.*ZeroDivisionError") as caught:
        load_target(msgspec.structs.replace(choice, target="bad_impl:It"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(PluginError, match="AttributeError"):
        load_ref("lmkit.plugins.refs:nothing")
    with pytest.raises(PluginError, match="SystemExit"):
        load_ref("exiting_impl:x")


def test_resolving_twice_gives_equal_plans(whole: World) -> None:
    whole.attention("other")
    assert resolve(TOY, whole.host())[0].to_json() == resolve(TOY, whole.host())[0].to_json()


# ---------------------------------------------------------------------------------------- checkpoint and model


def test_unknown_checkpoint(whole: World) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint 'nothing'"):
        resolve(with_model(model="nothing"), whole.host())


def test_a_checkpoint_that_comes_with_a_plugin_gets_its_command(whole: World, monkeypatch) -> None:
    from lmkit.plugins import resolve as module

    monkeypatch.setattr(module, "install_command", lambda kind, name: f"pip install lmkit-{kind}-{name}")
    with pytest.raises(CheckpointError) as caught:
        resolve(with_model(model="shipped"), whole.host())
    assert caught.value.fix == "pip install lmkit-extension-shipped"


def test_answers_of_plugins_are_checked(whole: World) -> None:
    """A hook that answers nonsense, or code that raises, is named; nothing surfaces as a bare exception."""
    source = "from lmkit.api import hookimpl\n@hookimpl\ndef lmkit_resolve_checkpoint(ref):\n    return {answer}\n"
    whole.add("bad-store", {"extension": {"bad": "bad_store.hooks"}}, {"bad_store.hooks": source.format(answer="ref")})
    with pytest.raises(PluginError, match=r"lmkit_resolve_checkpoint of bad_store\.hooks gave 'toy', no Checkpoint"):
        resolve(TOY, whole.host(), imports=False)


def test_an_architecture_that_raises_is_named(whole: World) -> None:
    file = whole.path / "toy_model" / "hooks.py"
    file.write_text(file.read_text().replace('window = config.get("sliding_window")', 'window = config["absent"]'))
    with pytest.raises(
        PluginError, match=r"model 'ToyForCausalLM' \(toy-model 0.1.0\): describe raised KeyError: 'absent'"
    ) as caught:
        resolve(TOY, whole.host())
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_is_no_eos_id_is_left_out_and_named(whole: World) -> None:
    file = whole.path / "toy_store" / "hooks.py"
    file.write_text(file.read_text().replace("[2, 3]", "['2', 3]"))
    plan, _, _ = resolve(TOY, whole.host())
    assert 3 in plan.value("eos_token_ids", ())
    assert any("eos_token_id ['2']" in warning for warning in plan.warnings)


def test_unknown_architecture(whole: World) -> None:
    whole.add(
        "other-store",
        {"extension": {"other": "other_store.hooks"}},
        {
            "other_store.hooks": "from pathlib import Path\nfrom lmkit.api import Checkpoint, hookimpl\n@hookimpl\n"
            "def lmkit_resolve_checkpoint(ref, options):\n    return Checkpoint(ref=ref, path=Path(), format='x', "
            "config={'architectures': ['ToiForCausalLM']}) if ref == 'other' else None\n"
        },
    )
    with pytest.raises(SelectionError, match="model 'ToiForCausalLM' cannot be used") as caught:
        resolve(with_model(model="other"), whole.host())
    assert "did you mean 'ToyForCausalLM'?" in caught.value.fix


# --------------------------------------------------------------------------------------------- dtypes and sizes


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", "bfloat16"), ("float32", "float32"), ("bf16", "bfloat16"), ("float", "float32")]
)
def test_dtype(whole: World, asked: str, expected: str) -> None:
    found = values(whole, with_model(dtype=asked))
    assert (found["dtype"], found["kv_dtype"]) == (expected, expected)


def test_a_dtype_the_device_lacks(world: World) -> None:
    world.basics()
    world.platform("old", probe='[DeviceInfo(platform="old", device_type="cpu", dtypes=("float32",))]', fallback=True)
    world.attention("ref", "features=frozenset({'causal', 'sliding_window'})")
    plan, _, _ = resolve(TOY, world.host())
    assert plan.value("dtype") == "float32"
    assert "old has no bfloat16 (user: auto)" in next(d.source for d in plan.derived if d.key == "dtype")
    with pytest.raises(SelectionError, match="dtype 'bfloat16' cannot be used on old") as caught:
        resolve(with_model(dtype="bfloat16"), world.host())
    assert caught.value.fix == "--dtype float32"
    assert caught.value.refused[0].reasons[0].code == "dtype"


def test_kv_dtype_must_be_declared(whole: World) -> None:
    with pytest.raises(SelectionError, match="kv-dtype"):
        resolve(replace(TOY, cache=CacheConfig(dtype="fp8")), whole.host())


def test_block_size_comes_from_user_then_proposal_then_attention(whole: World) -> None:
    assert values(whole)["block_size"] == 16
    assert values(whole, replace(TOY, cache=CacheConfig(block_size=32)))["block_size"] == 32


def test_attention_that_needs_another_block_size(world: World) -> None:
    world.basics()
    world.platform("plain", fallback=True, defaults={"cache.block_size": 16, "sched.max_tokens": 2048})
    world.attention("wide", "block_sizes=one_of(64, 128)")
    found = values(world)
    assert found["block_size"] == 64
    assert found["max_step_tokens"] == 2048
    with pytest.raises(SelectionError, match="block-size"):
        resolve(replace(TOY, cache=CacheConfig(block_size=16)), world.host())


def test_user_beats_the_platforms_default(world: World) -> None:
    world.basics()
    world.platform("plain", fallback=True, defaults={"sched.max_tokens": 2048})
    world.attention("ref")
    assert values(world, replace(TOY, sched=SchedConfig(max_tokens=100)))["max_step_tokens"] == 100


@pytest.mark.parametrize("length", [129, 0, -1])
def test_max_length_is_limited_by_the_model(whole: World, length: int) -> None:
    with pytest.raises(ConfigError, match=f"max_length is {length}"):
        resolve(with_model(max_length=length), whole.host())
    assert values(whole, with_model(max_length=128))["max_length"] == 128


# -------------------------------------------------------------------------------------------- attention and ops


def test_groups_of_layers_need_one_backend(whole: World) -> None:
    whole.attention("plain_only", "tier=Tier.OPTIMIZED")
    plan, _, _ = resolve(TOY, whole.host())
    assert plan.choice("attention").name == "plain_only"  # type: ignore[union-attr]
    plan, _, _ = resolve(with_model(model="toy-window"), whole.host())
    assert plan.choice("attention").name == "ref"  # type: ignore[union-attr]


def test_reference_on_an_accelerator_is_a_warning(world: World) -> None:
    world.basics()
    world.platform("chip", cc=(8, 0))
    world.attention("ref", "tier=Tier.REFERENCE")
    world.attention("fast", "capability=Range((9, 0), None)")
    plan, _, _ = resolve(TOY, world.host())
    assert plan.warnings == ("attention is the slow reference 'ref'; refused: fast: capability: needs >= 9.0, has 8.0",)
    assert resolve(replace(TOY, wanted={"attention": "ref"}), world.host())[0].warnings == ()


QUANT = """
from types import SimpleNamespace
from lmkit.api import OpSpec, QuantizationSpec, hookimpl

class Scheme:
    @classmethod
    def parse(cls, config):
        return cls()

    def for_layer(self, layer):
        return SimpleNamespace(name="packed4") if layer.name.endswith("up") else None

@hookimpl
def lmkit_quantization_methods():
    yield QuantizationSpec(
        name="toy4", summary="Four bits", target="toy_quant.hooks:Scheme", checkpoint_methods=("toy4",),
        weight_formats=("packed4",),
    )

@hookimpl
def lmkit_ops():
    yield OpSpec(
        name="fast4", summary="Fast", target="toy_quant.hooks:lmkit_ops", op="linear", formats=frozenset({"packed4"}),
    )
"""

TWO_FORMATS = (
    QUANT.replace('("packed4",)', '("packed4", "packed8")')
    + """
    yield OpSpec(
        name="bytes8", summary="Fast", target="toy_quant.hooks:lmkit_ops", op="linear", formats=frozenset({"packed8"}),
    )
"""
)


def test_quantization_follows_the_checkpoint(whole: World) -> None:
    config = with_model(model="toy-quantized")
    with pytest.raises(SelectionError, match="no quantization plugin"):
        resolve(config, whole.host())
    whole.add(
        "toy-quant", {"quantization": {"toy4": "toy_quant.hooks"}, "op": {"fast4": "toy_quant.hooks"}},
        {"toy_quant.hooks": QUANT},
    )  # fmt: skip
    plan, _, _ = resolve(config, whole.host())
    chosen = plan.choice("quantization")
    assert chosen is not None
    assert (chosen.name, chosen.why) == ("toy4", "checkpoint says quant_method=toy4")
    ops = [(c.component, c.name, c.why) for c in plan.choices if c.kind == "op"]
    assert ops == [
        ("linear:plain", "matmul", "auto"),
        ("linear:packed4", "fast4", "auto"),
        ("linear:packed4", "matmul", "fallback 1"),
        ("rowwise", "rows", "only candidate"),
    ]
    with pytest.raises(ConfigError, match="stored as 'toy4'"):
        resolve(with_model("none", model="toy-quantized"), whole.host())
    with pytest.raises(SelectionError, match="not quantized"):
        resolve(with_model("toy4"), whole.host())


def test_quantization_while_loading_is_asked_for_by_name(whole: World) -> None:
    whole.add(
        "toy-quant", {"quantization": {"toy4": "toy_quant.hooks"}, "op": {"fast4": "toy_quant.hooks"}},
        {"toy_quant.hooks": QUANT.replace('checkpoint_methods=("toy4",)', "online=True")},
    )  # fmt: skip
    assert resolve(with_model(), whole.host())[0].choice("quantization") is None
    chosen = resolve(with_model("toy4"), whole.host())[0].choice("quantization")
    assert chosen is not None
    assert chosen.name == "toy4"
    with pytest.raises(SelectionError, match="an unquantized checkpoint"):
        resolve(with_model("toy4", model="toy-quantized"), whole.host())


def test_kernels_by_name(whole: World) -> None:
    """A named kernel serves what it can be for, alone; the rest is chosen as ever; one without work is an error."""
    whole.add(
        "toy-quant",
        {"quantization": {"toy4": "toy_quant.hooks"}, "op": dict.fromkeys(("fast4", "bytes8"), "toy_quant.hooks")},
        {"toy_quant.hooks": TWO_FORMATS},
    )  # fmt: skip

    def ops(names: str, model: str = "toy-quantized") -> list[tuple[str, str, str]]:
        plan, _, _ = resolve(replace(with_model(model=model), wanted={"op": names}), whole.host())
        return [(c.component, c.name, c.why) for c in plan.choices if c.kind == "op"]

    found = [choice for choice in ops("fast4") if not choice[2].startswith("fallback")]
    assert found == [
        ("linear:plain", "matmul", "auto"),
        ("linear:packed4", "fast4", "explicit"),
        ("linear:packed8", "bytes8", "auto"),
        ("rowwise", "rows", "only candidate"),
    ]
    assert ops("matmul,fast4")[1:3] == [
        ("linear:packed4", "matmul", "explicit"),
        ("linear:packed4", "fast4", "fallback 1"),
    ]
    with pytest.raises(ConfigError, match="op fast4 has nothing to run: the model needs linear:plain, rowwise"):
        ops("fast4", model="toy")
    with pytest.raises(ConfigError, match="op bytes8 has nothing to run: the model needs linear:plain, linear:packed4"):
        ops("fast4,bytes8")  # a scheme that may have such weights, and a checkpoint that has none
    with pytest.raises(UnknownName, match="fast5") as unknown:
        ops("fast5")
    assert "fast4" in unknown.value.fix


# --------------------------------------------------------------------------------------------------- the others


def test_ranks(whole: World) -> None:
    with pytest.raises(SelectionError, match=r"ranks \(needs at most 1, has 2\)"):
        resolve(replace(TOY, parallel=ParallelConfig(tp=2)), whole.host())


PARSER = """
from lmkit.api import ToolParserSpec, hookimpl

@hookimpl
def lmkit_tool_parsers():
    yield ToolParserSpec(name="toy", summary="Toy calls", target="toy_parser.hooks:x", markers=("<toy_call>",))
"""


def test_tool_parser(whole: World) -> None:
    whole.add("toy-parser", {"tool_parser": {"toy": "toy_parser.hooks"}}, {"toy_parser.hooks": PARSER})

    def chosen(setting: str, **fields: object) -> str | None:
        config = replace(with_model(**fields), wanted={"tool_parser": setting})
        choice = resolve(config, whole.host())[0].choice("tool_parser")
        return choice.name if choice else None

    assert chosen("auto") == "toy"
    assert chosen("none") is None
    assert chosen("toy") == "toy"
    plain = whole.path / "plain.jinja"
    plain.write_text("{{ messages }}")
    assert chosen("auto", chat_template=str(plain)) is None
    with pytest.raises(SelectionError, match="tool_parser 'tou' cannot be used"):
        chosen("tou")
    with pytest.raises(ConfigError, match="cannot read the chat template"):
        chosen("auto", chat_template=str(whole.path / "absent.jinja"))


# ------------------------------------------------------------------------------------------- options, proposals

OPTIONS = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    workspace_mb: int = 128
    mode: str = "auto"

    def __post_init__(self):
        if self.workspace_mb < 1:
            raise ValueError("workspace_mb must be positive")
"""


@pytest.fixture
def optional(world: World) -> World:
    world.basics()
    world.platform("plain", fallback=True)
    world.attention("ref", "options='toy_options:Options'")
    world.attention("other", "tier=Tier.REFERENCE")
    world.add("toy-options", {}, {"toy_options": OPTIONS})
    return world


def options(world: World, **given: object) -> dict[str, object]:
    config = replace(TOY, plugins={"attention.ref": given})
    return resolve(config, world.host())[0].choice("attention", "text").options  # type: ignore[union-attr]


def test_options_are_filled_and_converted(optional: World) -> None:
    assert options(optional) == {"workspace_mb": 128, "mode": "auto"}
    assert options(optional, workspace_mb="256") == {"workspace_mb": 256, "mode": "auto"}


def test_bad_options_are_refused(optional: World) -> None:
    with pytest.raises(UnknownKey, match=r"unknown key 'workspace' in options of attention\.ref") as caught:
        options(optional, workspace=1)
    assert "workspace_mb" in caught.value.fix
    with pytest.raises(ConfigError, match="Expected `int`"):
        options(optional, workspace_mb="much")
    with pytest.raises(ConfigError, match="must be positive"):
        options(optional, workspace_mb=0)


def test_options_of_plugins_that_take_none_or_were_not_chosen(optional: World) -> None:
    with pytest.raises(UnknownKey, match=r"scheduler\.order"):
        resolve(replace(TOY, plugins={"scheduler.order": {"x": 1}}), optional.host())
    with pytest.raises(UnknownKey, match=r"unknown key 'attention\.reff'"):
        resolve(replace(TOY, plugins={"attention.reff": {}}), optional.host())
    optional.add("toy-speech", {"dialect": {"speech": "toy_speech"}}, {"toy_speech": ""})
    plugins = {"attention.other": {}, "dialect.speech": {"x": 1}}  # dialects are looked up when a server speaks
    plan, _, _ = resolve(replace(TOY, plugins=plugins), optional.host())
    assert plan.warnings == ("options of attention.other are not used: it was not chosen",)


def configure(world: World, name: str, proposal: str) -> None:
    source = (
        f"from lmkit.api import ConfigProposal, hookimpl\n@hookimpl\ndef lmkit_configure(info):\n    yield {proposal}\n"
    )
    world.add(name, {"extension": {name: f"{name}.hooks"}}, {f"{name}.hooks": source})


def test_configure_hook_proposes(whole: World) -> None:
    configure(whole, "ext_small", "ConfigProposal('sched.max_tokens', info.num_parameters, 'small')")
    plan, _, _ = resolve(TOY, whole.host())
    step = next(d for d in plan.derived if d.key == "max_step_tokens")
    assert (step.value, step.source) == (1000, "ext_small.hooks: small")


def test_requirements_of_plugins_conflict(whole: World) -> None:
    configure(whole, "ext_one", "ConfigProposal('cache.block_size', 32, 'kernels', strength='require')")
    assert values(whole)["block_size"] == 32
    with pytest.raises(ConfigError, match=r"cache\.block_size=16, but ext_one\.hooks requires 32: kernels"):
        resolve(replace(TOY, cache=CacheConfig(block_size=16)), whole.host())
    configure(whole, "ext_two", "ConfigProposal('cache.block_size', 64, 'other kernels', strength='require')")
    with pytest.raises(ConfigError, match=r"ext_\w+\.hooks requires \d+ .* requires"):
        resolve(TOY, whole.host())


def test_a_hook_that_raises_names_its_plugin(whole: World) -> None:
    configure(whole, "ext_bad", "1 / 0")
    with pytest.raises(PluginError, match=r"lmkit_configure of ext_bad\.hooks raised ZeroDivisionError"):
        resolve(TOY, whole.host())


def test_merge_order() -> None:
    proposals = [
        ("a", ConfigProposal("sched.max_tokens", 1, "first")),
        ("b", ConfigProposal("sched.max_tokens", 2, "second")),
        ("c", ConfigProposal("parallel.threads", 3, "must", "require")),
        ("d", ConfigProposal("parallel.threads", 4, "would like")),
    ]
    merged = {d.key: d.value for d in merge({"parallel.threads": None}, proposals).values()}
    assert merged == {"max_step_tokens": 1, "threads": 3}
    assert merge({"sched.max_tokens": 9}, proposals)["sched.max_tokens"].source == "user"
    with pytest.raises(UnknownKey):
        merge({}, [("a", ConfigProposal("platform", "x", "no"))])


# --------------------------------------------------------------------------------------------------- without torch

BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "numpy"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
sys.path.insert(0, sys.argv[1])
from lmkit.config import EngineConfig, ModelConfig
from lmkit_cli.story import explain
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.plugins.switches import Switches
config = EngineConfig(model=ModelConfig(model="toy"), device="chip:9.0:80GB")
host = PluginHost(path=[sys.argv[1]], switches=Switches())
plan, _, _ = resolve(config, host)
assert explain(config, host).topic("attention").candidates[0].verdict == "selected"
import json
print(json.dumps([plan.device.platform, plan.device.total_memory, plan.choice("attention").name]))
"""


def test_a_described_device_needs_no_torch(whole: World, tmp_path: Path) -> None:
    whole.platform("chip", probe="1 / 0")  # a described device is not probed
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    done = subprocess.run([sys.executable, str(script), str(whole.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["chip", 80_000_000_000, "ref"]


MORE = """
from lmkit.api import GrammarBackendSpec, Tier, hookimpl

@hookimpl
def lmkit_grammars():
    for name, tier in (("fast_grammar", Tier.OPTIMIZED), ("plain_grammar", Tier.REFERENCE)):
        yield GrammarBackendSpec(
            name=name, summary=name, target="toy_more.hooks:x", kinds=frozenset({"regex"}), tier=tier
        )
"""


def test_grammars_in_order(whole: World) -> None:
    module = "toy_more.hooks"
    points = {"grammar": {"fast_grammar": module, "plain_grammar": module}}
    whole.add("toy-more", points, {module: MORE})
    plan, _, _ = resolve(TOY, whole.host())
    assert [c.name for c in plan.choices if c.kind == "grammar"] == ["fast_grammar", "plain_grammar"]


def test_a_described_device_is_not_run(whole: World) -> None:
    from lmkit.engine.build import build_engine

    config = replace(TOY, device="plain:9.0:1GB")
    plan, checkpoint, _ = resolve(config, whole.host())
    with pytest.raises(ConfigError, match="only described"):
        build_engine(config, plan, checkpoint)


def test_another_familys_code_runs_no_architecture(whole: World) -> None:
    other = "from lmkit.api import ModelSpec, hookimpl\n\n@hookimpl\ndef lmkit_models():\n    yield ModelSpec("
    for name, module in (("OddForCausalLM", "odd.hooks"), ("general", "any.hooks")):
        spec = f'name="{name[:3].lower()}", summary="x", target="toy_model.hooks:Toy", architectures=("{name}",))\n'
        whole.add(module[:3], {"model": {name: module}}, {module: other + spec})
    assert resolve(with_model(impl="general"), whole.host())[0].choice("model").name == "general"  # type: ignore[union-attr]
    assert resolve(TOY, whole.host())[0].choice("model").name == "ToyForCausalLM"  # type: ignore[union-attr]
    with pytest.raises(UnknownName, match="general"):
        resolve(with_model(impl="OddForCausalLM"), whole.host())
    with pytest.raises(SelectionError, match="nowhere"):
        resolve(with_model(impl="nowhere"), whole.host())
