"""Selection: the grammar, the stages, the order; an explicit choice is honoured or refused, never replaced."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import (
    AttentionRequest,
    AttentionSpec,
    AttnNeed,
    ConfigError,
    DeviceInfo,
    ExecutorRequest,
    ExecutorSpec,
    LoaderRequest,
    LoaderSpec,
    ModelRequest,
    ModelSpec,
    OpRequest,
    OpSpec,
    ParserRequest,
    QuantizationRequest,
    QuantizationSpec,
    Range,
    Refusal,
    SelectionError,
    SelectRequest,
    Spec,
    Tier,
    ToolParserSpec,
    hookimpl,
    multiple_of,
    one_of,
)
from lmkit.kinds import KINDS
from lmkit.plugins.codes import CODES
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import Outcome, consider, parse_selection
from lmkit.plugins.switches import Switches
from lmkit_testing.host import OpenHost, codes, make_device, select
from lmkit_testing.world import World

TARGET = "lmkit.plugins.select:select"  # any object that exists
BF16 = frozenset({"bfloat16"})


def host_of(*specs: Spec, dists: tuple[str, ...] = ()) -> PluginHost:
    """A host with the given specs, each from a dist and module of its own."""
    host = OpenHost(path=[], switches=Switches())
    for i, spec in enumerate(specs):
        module = ModuleType(f"made_{i}.hooks")
        hook = next(kind.hook for kind in KINDS if kind.spec is type(spec))
        setattr(module, hook, hookimpl(lambda spec=spec: [spec], specname=hook))
        host.add(module, dist=dists[i] if dists else f"dist-{i}")
    return host


def attention(name: str, **fields: object) -> AttentionSpec:
    return AttentionSpec(name=name, summary=name, target=TARGET, **{"dtypes": BF16, **fields})  # type: ignore[arg-type]


def need(**fields: object) -> AttnNeed:
    given = {"head_dim": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    return AttnNeed(**{**given, **fields})  # type: ignore[arg-type]


def request(device: DeviceInfo | None = None, **fields: object) -> AttentionRequest:
    return AttentionRequest(need=need(**fields), device=device or make_device("chip", cc=(8, 0)))


def reasons(spec: Spec, req: SelectRequest, user: str = "") -> dict[str, Refusal]:
    outcome = consider(host_of(spec), req, user or spec.name)
    return {r.code: r for c in outcome.candidates for r in c.reasons}


# ---------------------------------------------------------------------------------------------------- grammar


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", []), ("a", ["a"]), ("a,b", ["a", "b"]), ("my-dist/a", ["my-dist/a"]), ("d/a, b", ["d/a", "b"])],
)
def test_grammar(text: str, expected: list[str]) -> None:
    assert [str(w) for w in parse_selection(text)] == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "a b", "later=a", "a/b/c", "x:y:z", "auto,b", "a;b", ":a", "=a", "vision:a", "prefill=a,decode=b"],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read selection"):
        parse_selection(text)


# ----------------------------------------------------------------------------------------------- data stages


@pytest.mark.parametrize(
    ("fields", "ask", "code"),
    [
        ({"platforms": ("other",)}, request(), "platform"),
        ({"capability": Range((9, 0), None)}, request(), "capability"),
        ({"capability": Range((7, 0), (8, 0))}, request(), "capability"),
        ({"capability": Range((7, 0), None)}, request(make_device("chip")), "capability"),
        ({"dtypes": frozenset({"float16"})}, request(), "dtype"),
        ({}, request(kv_dtype="float8_e4m3fn"), "kv-dtype"),
        ({"kv_dtypes": frozenset({"float8_e4m3fn"})}, request(), "kv-dtype"),
        ({"head_dims": one_of(128)}, request(), "head-dim"),
        ({"head_dims": multiple_of(8, max=256)}, request(head_dim=60), "head-dim"),
        ({}, request(v_head_dim=32), "head-dim"),
        ({"v_head_dims": one_of(16)}, request(v_head_dim=32), "head-dim"),
        ({"block_sizes": one_of(16, 32)}, request(block_size=8), "block-size"),
        ({"gqa_ratios": one_of(1, 8)}, request(), "gqa-ratio"),
        ({}, request(num_q_heads=7), "gqa-ratio"),
        ({}, request(window=8), "feature"),
        ({}, request(sinks=True), "feature"),
        ({"requires": ("dist-that-is-not-there>=1",)}, request(), "requirement-missing"),
        ({"requires": ("pluggy>=99",)}, request(), "requirement-version"),
    ],
)
def test_each_refusal(fields: dict[str, object], ask: AttentionRequest, code: str) -> None:
    found = reasons(attention("it", **fields), ask)
    assert set(found) == {code}
    assert found[code].needed
    assert found[code].offered


@pytest.mark.parametrize(
    ("fields", "ask"),
    [
        ({}, request()),
        ({"platforms": ("chip",), "capability": Range((8, 0), (9, 0))}, request()),
        ({"kv_dtypes": frozenset({"auto", "float8_e4m3fn"})}, request(kv_dtype="float8_e4m3fn")),
        ({"kv_dtypes": frozenset({"bfloat16"})}, request()),
        ({"v_head_dims": one_of(32)}, request(v_head_dim=32)),
        ({"features": frozenset({"causal", "sliding_window"})}, request(window=8)),
        ({"requires": ("pluggy>=1", "nothing>=1 ; python_version < '3'")}, request()),
        ({"block_sizes": one_of(16)}, request(block_size=0)),
    ],
)
def test_what_is_declared_passes(fields: dict[str, object], ask: AttentionRequest) -> None:
    assert reasons(attention("it", **fields), ask) == {}


@pytest.mark.parametrize(
    ("spec", "ask", "code"),
    [
        (
            QuantizationSpec(name="q", summary="q", target=TARGET, checkpoint_methods=("q4",)),
            QuantizationRequest(method="q8"),
            "format",
        ),
        (
            QuantizationSpec(name="q", summary="q", target=TARGET, checkpoint_methods=("q4",), activation_dtypes=BF16),
            QuantizationRequest(method="q4", dtype="float16"),
            "dtype",
        ),
        (OpSpec(name="o", summary="o", target=TARGET, op="linear"), OpRequest(op="moe"), "format"),
        (
            OpSpec(name="o", summary="o", target=TARGET, op="linear", formats=frozenset({"q4"})),
            OpRequest(op="linear", format="plain"),
            "format",
        ),
        (
            OpSpec(name="o", summary="o", target=TARGET, op="linear", dtypes=BF16),
            OpRequest(op="linear", dtype="float32"),
            "dtype",
        ),
        (LoaderSpec(name="l", summary="l", target=TARGET, formats=("a",)), LoaderRequest(format="b"), "format"),
        (ExecutorSpec(name="e", summary="e", target=TARGET), ExecutorRequest(num_ranks=2), "ranks"),
        (
            ModelSpec(name="m", summary="m", target=TARGET, architectures=("M",), supports_tp=False),
            ModelRequest(architecture="M", tp=2),
            "ranks",
        ),
        (
            ModelSpec(name="m", summary="m", target=TARGET, architectures=("M",), supports_pp=False),
            ModelRequest(architecture="M", pp=2),
            "ranks",
        ),
    ],
)
def test_each_refusal_of_other_kinds(spec: Spec, ask: SelectRequest, code: str) -> None:
    name = "M" if isinstance(spec, ModelSpec) else spec.name
    assert set(reasons(spec, ask, name)) == {code}


def test_all_data_stages_are_reported_at_once() -> None:
    spec = attention("it", platforms=("other",), head_dims=one_of(128), requires=("dist-that-is-not-there",))
    found = reasons(spec, request(window=8))
    assert set(found) == {"platform", "head-dim", "feature", "requirement-missing"}


def test_one_backend_must_serve_all_groups() -> None:
    host = host_of(attention("it"))
    both = [request(), request(window=8)]
    with pytest.raises(SelectionError):
        select(host, both, "it")
    assert select(host, both[:1], "it").name == "it"


def parser(name: str, **fields: object) -> ToolParserSpec:
    return ToolParserSpec(name=name, summary=name, target=TARGET, **fields)  # type: ignore[arg-type]


def test_parsers_claim_models_in_auto_and_serve_any_when_named() -> None:
    host = host_of(parser("by_name", models=("Toy*",)), parser("by_template", markers=("<call>",)))
    ask = ParserRequest(kind="tool_parser", model="other", architecture="OtherForCausalLM", chat_template="x <call> y")
    assert select(host, ask).name == "by_template"
    assert codes(consider(host, ask)) == {"by_name": {"model"}}
    assert select(host, ask, "by_name").name == "by_name"


# ------------------------------------------------------------------------------------------- own check, target


def test_a_plugins_own_codes_carry_its_name(world: World) -> None:
    source = "from lmkit.api import Refusal\ndef check(request):\n    return [Refusal('driver', 'new', 'old')]\n"
    world.attention("it", "check='own_checks.it:check'")
    world.add("own-checks", {}, {"own_checks.it": source})
    outcome = consider(world.host(), request(), "it")
    assert codes(outcome) == {"it": {"it.driver"}}
    assert outcome.candidates[0].stage == 9


def test_a_check_that_raises_is_a_refusal(world: World) -> None:
    world.attention("it", "check='own_checks2.it:check'")
    world.add("own-checks", {}, {"own_checks2.it": "def check(request):\n    raise SystemExit(1)\n"})
    assert codes(consider(world.host(), request(), "it")) == {"it": {"check-failed"}}


def test_the_check_is_not_imported_when_data_refuses() -> None:
    spec = attention("it", check="module_that_is_not_there:check", head_dims=one_of(128))
    assert set(reasons(spec, request())) == {"head-dim"}


def test_a_target_whose_module_is_missing() -> None:
    spec = AttentionSpec(name="it", summary="it", target="module_that_is_not_there:It", dtypes=BF16)
    found = reasons(spec, request())
    assert set(found) == {"target-import"}
    assert "module_that_is_not_there" in found["target-import"].offered


def test_auto_passes_over_a_target_that_cannot_be_imported(world: World) -> None:
    world.attention("best", target="best_impl:It")
    world.attention("slow", "tier=Tier.PORTABLE")
    world.add("best-impl", {}, {"best_impl": "raise OSError('libexample.so.13: cannot open')"})
    outcome = consider(world.host(), request(), imports=True)
    assert outcome.chosen is not None
    assert outcome.chosen.name == "slow"
    assert outcome.warnings == (
        "'best' cannot be imported (OSError: libexample.so.13: cannot open); using 'slow' instead",
    )
    with pytest.raises(SelectionError, match=r"libexample\.so\.13"):
        select(world.host(), request(), "best", imports=True)


# ------------------------------------------------------------------------------------------------ explicit


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    return attention(
        draw(st.sampled_from("abcd")),
        dtypes=frozenset(draw(st.sets(st.sampled_from(["bfloat16", "float16", "float32"]), min_size=1))),
        platforms=draw(st.sampled_from([("*",), ("chip",), ("other",)])),
        head_dims=draw(st.sampled_from([one_of(64), one_of(128), multiple_of(32)])),
        tier=draw(st.sampled_from(list(Tier))),
        stability=draw(st.sampled_from(["stable", "beta", "experimental"])),
        features=frozenset(draw(st.sets(st.sampled_from(["causal", "sliding_window", "softcap"])))),
    )


requests = st.builds(
    request,
    head_dim=st.sampled_from([64, 96, 128]),
    window=st.sampled_from([None, 8]),
    softcap=st.sampled_from([None, 30.0]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
)
some_specs = st.lists(specs(), min_size=1, max_size=4, unique_by=lambda s: s.name)


@settings(max_examples=50, deadline=None)
@given(some_specs, requests, st.sampled_from("abcde"))
def test_an_explicit_name_is_used_or_refused(found: list[AttentionSpec], ask: AttentionRequest, name: str) -> None:
    host = host_of(*found)
    outcome = consider(host, ask, name)
    assert {c.name for c in outcome.candidates} == {name}
    if outcome.chosen is not None:
        assert select(host, ask, name).name == name
        return
    with pytest.raises(SelectionError) as caught:
        select(host, ask, name)
    assert [r.name for r in caught.value.refused] == [name]
    assert all(r.reasons for r in caught.value.refused)


@settings(max_examples=50, deadline=None)
@given(some_specs, requests, st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True))
def test_a_list_is_tried_in_its_order_and_nothing_else(
    found: list[AttentionSpec], ask: AttentionRequest, names: list[str]
) -> None:
    host = host_of(*found)
    works = [n for n in names if consider(host, ask, n).chosen is not None]
    outcome = consider(host, ask, ",".join(names))
    assert (outcome.chosen.name if outcome.chosen else None) == (works[0] if works else None)


@settings(max_examples=50, deadline=None)
@given(some_specs, requests)
def test_auto_does_not_depend_on_the_order_of_entry_points(found: list[AttentionSpec], ask: AttentionRequest) -> None:
    def story(outcome: Outcome) -> list[tuple[str, tuple[Refusal, ...]]]:
        return [(c.name, c.reasons) for c in outcome.candidates]

    stories = [
        story(consider(host_of(*order), ask, prefers=("c",)))
        for order in itertools.islice(itertools.permutations(found), 6)
    ]
    assert all(s == stories[0] for s in stories)


@settings(max_examples=50, deadline=None)
@given(some_specs, requests)
def test_every_refusal_is_complete_and_documented(found: list[AttentionSpec], ask: AttentionRequest) -> None:
    outcome = consider(host_of(*found), ask)
    for candidate in outcome.candidates:
        for reason in candidate.reasons:
            assert reason.code in CODES
            assert reason.needed
            assert reason.offered
            assert candidate.stage <= CODES[reason.code][0]
    assert outcome.chosen is None or outcome.chosen.ok


# --------------------------------------------------------------------------------------------------- auto order


def test_order_of_auto() -> None:
    host = host_of(
        attention("zeta", tier=Tier.REFERENCE),
        attention("beta", tier=Tier.OPTIMIZED),
        attention("alpha", tier=Tier.OPTIMIZED),
        attention("torch", tier=Tier.OPTIMIZED),
        attention("trial", tier=Tier.OPTIMIZED, stability="experimental"),
        dists=("third", "third", "third", "lmkit-attention-torch", "third"),
    )

    def names(**how: tuple[str, ...]) -> list[str]:
        return [c.name for c in consider(host, request(), **how).survivors]  # type: ignore[arg-type]

    assert names() == ["torch", "alpha", "beta", "zeta"]  # tier, official first, name
    assert names(prefers=("zeta", "beta")) == ["zeta", "beta", "torch", "alpha"]
    assert codes(consider(host, request())) == {"trial": {"experimental"}}
    assert select(host, request(), "trial").name == "trial"


def test_conflicts(world: World) -> None:
    world.attention("same", dist="first")
    world.attention("same", dist="second")
    world.attention("good", "tier=Tier.REFERENCE")
    host = world.host()
    assert codes(consider(host, request(), "same")) == {"same": {"name-conflict"}}
    assert select(host, request(), "second/same").dist == "second"
    outcome = consider(host, request())
    assert outcome.chosen is not None
    assert outcome.chosen.name == "good"
    assert [c.dist for c in outcome.candidates if not c.ok] == ["first", "second"]


# -------------------------------------------------------------------------------------------------------- errors


def test_the_error_says_what_would_work() -> None:
    host = host_of(attention("wide", head_dims=one_of(128)), attention("narrow"))
    with pytest.raises(SelectionError) as caught:
        select(host, request(), "wide")
    assert "head-dim (needs {128}, has 64)" in caught.value.message
    assert "these would work: narrow" in caught.value.fix
    assert caught.value.exit_code == 2


def test_a_name_that_is_not_installed_gets_the_command() -> None:
    host = host_of(attention("narrow"))
    with pytest.raises(SelectionError, match="not-installed") as caught:
        select(host, request(), "torch")
    assert "plugins/attention/torch" in caught.value.fix
    with pytest.raises(SelectionError) as caught:
        select(host, request(), "narow")
    assert "did you mean 'narrow'?" in caught.value.fix


def test_nothing_installed_names_what_could_be() -> None:
    with pytest.raises(SelectionError, match="none is installed") as caught:
        select(PluginHost(path=[], switches=Switches()), request())
    assert "plugins/attention/" in caught.value.fix
