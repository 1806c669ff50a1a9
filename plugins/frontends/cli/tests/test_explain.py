"""Explanations as data and as text; whatever fails on the way is part of the answer."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
import pytest
from lmkit.api import LmkitError, UnknownName
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.catalog import install
from lmkit.plugins.codes import CODES, STAGES
from lmkit.plugins.resolve import resolve
from lmkit_cli.explanation import render
from lmkit_cli.story import Explanation, explain
from lmkit_testing.world import World
from rich.console import Console

TOY = EngineConfig(model=ModelConfig(model="toy"))


def text(explanation: Explanation) -> str:
    out = io.StringIO()
    render(explanation, Console(file=out, width=160, highlight=False))
    return out.getvalue()


def test_the_story_of_one_kind(whole: World) -> None:
    whole.attention(
        "fast", "capability=Range((9, 0), None), dtypes=frozenset({'float16'})".replace("dtypes", "kv_dtypes")
    )
    explanation = explain(TOY, whole.host(), topic="attention")
    assert [t.kind for t in explanation.topics] == ["attention"]
    verdicts = {c.name: (c.verdict, {r.code for r in c.reasons}) for c in explanation.topics[0].candidates}
    assert verdicts == {"ref": ("selected", set()), "fast": ("refused", {"capability", "kv-dtype"})}
    shown = text(explanation)
    assert "head_dim=64" in shown
    assert "q/kv heads=4/2" in shown
    assert "SELECTED (reference)" in shown
    assert "capability           needs >= 9.0, has a device without one" in shown
    assert install("lmkit-attention-torch") in shown


def test_everything(whole: World) -> None:
    explanation = explain(TOY, whole.host())
    (unread,) = [t for t in explanation.topics if t.kind == "tokenizer"]  # the toy model has none
    assert unread.error is not None
    topics = [t for t in explanation.topics if t is not unread]
    kinds = [t.kind for t in topics]
    assert kinds == ["platform", "attention", "model", "template", "scheduler", "loader", "op", "op", "executor"]
    assert all(any(c.verdict == "selected" for c in t.candidates) for t in topics)
    assert "block_size" in text(explanation)
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation


def test_why(whole: World) -> None:
    whole.attention("other", "head_dims=one_of(8)")
    whole.attention("third")
    report = explain(TOY, whole.host(), topic="attention", why="other").topics[0]
    assert {c.name for c in report.candidates} == {"other", "third"}
    report = explain(TOY, whole.host(), topic="attention", why="torch").topics[0]
    assert report.not_installed == {"torch": install("lmkit-attention-torch")}


def test_what_is_missing_is_explained(world: World) -> None:
    explanation = explain(TOY, world.host())
    shown = text(explanation)
    assert install("lmkit-platform-cpu") in shown
    assert install("lmkit-scheduler-fcfs") in shown
    error = explanation.topic("attention").error
    assert error is not None
    assert explanation.topic("attention").after in ("checkpoint", "platform")


def test_a_failure_names_its_root(whole: World) -> None:
    explanation = explain(replace(TOY, model=ModelConfig(model="absent")), whole.host(), topic="attention")
    assert explanation.topics[0].after == "checkpoint"
    assert "not decided, because of checkpoint: no checkpoint 'absent'" in text(explanation)
    assert [c.name for c in explanation.topics[0].candidates] == ["ref"]


def test_broken_plugins_are_part_of_the_story(whole: World) -> None:
    whole.add("bad", {"attention": {"bad": "bad_attention.hooks"}}, {"bad_attention.hooks": "1 / 0"})
    explanation = explain(TOY, whole.host(), topic="attention")
    assert "ZeroDivisionError" in text(explanation)
    assert next(c for c in explanation.topics[0].candidates if c.name == "bad").stage == 4


def test_unknown_topic(world: World) -> None:
    with pytest.raises(UnknownName, match="attenton"):
        explain(TOY, world.host(), topic="attenton")


def test_codes_are_documented() -> None:
    assert all(1 <= stage <= len(STAGES) and meaning for stage, meaning in CODES.values())


UNREADABLE_MODEL = """
from lmkit.api import ModelSpec, UnsupportedModel, hookimpl

class Toy:
    def describe(self, config):
        raise UnsupportedModel("layers", "odd", "even ones")

@hookimpl
def lmkit_models():
    yield ModelSpec(name="odd", summary="Odd", target="odd_model.hooks:Toy", architectures=("OddForCausalLM",))
"""


@pytest.mark.parametrize(
    ("config", "topic", "why"),
    [
        (replace(TOY, model=replace(TOY.model, overrides='{"architectures": ["OddForCausalLM"]}')), "model", "layers"),
        (replace(TOY, wanted={"op": "fast4"}), "op", "nothing to run"),
        (replace(TOY, wanted={"attention": "prefill=ref,decode=other"}), "attention", "cannot read selection"),
        (replace(TOY, wanted={"attention": "vision:ref"}), "attention", "cannot read selection"),
    ],
)
def test_nothing_is_selected_that_a_plan_refuses(whole: World, config: EngineConfig, topic: str, why: str) -> None:
    whole.add("odd-model", {"model": {"OddForCausalLM": "odd_model.hooks"}}, {"odd_model.hooks": UNREADABLE_MODEL})
    whole.add("more-ops", {"op": {"fast4": "more_ops.hooks"}}, {"more_ops.hooks": OP})
    with pytest.raises(LmkitError, match=why):
        resolve(config, whole.host())
    reports = explain(config, whole.host(), topic=topic).topics
    assert not [c for report in reports for c in report.candidates if c.verdict == "selected"]
    assert why in text(explain(config, whole.host()))


OP = """
from lmkit.api import OpSpec, hookimpl

@hookimpl
def lmkit_ops():
    yield OpSpec(name="fast4", summary="x", target="more_ops.hooks:x", op="linear", formats=frozenset({"packed4"}))
"""


def test_steps_without_plugins_are_part_of_the_story(whole: World) -> None:
    explanation = explain(replace(TOY, model=replace(TOY.model, max_length=9999)), whole.host())
    assert explanation.topics[-1].kind == "values"
    assert "max_length is 9999" in text(explanation)


def test_memory_is_planned_where_the_device_says_how_much_it_has(whole: World) -> None:
    assert explain(TOY, whole.host()).memory is None
    fits = explain(replace(TOY, device="plain:16GB"), whole.host())
    assert fits.memory is not None
    assert 0 < fits.memory.total_bytes <= 16_000_000_000
    assert "KV cache" in text(fits)


def test_what_does_not_fit_is_not_selected(whole: World) -> None:
    config = replace(TOY, device="plain:1KB")
    report = explain(config, whole.host()).topic("platform")
    assert [c.verdict for c in report.candidates] == ["usable"]
    assert report.error is not None
    assert report.error.message.startswith("weights (")
    assert "this would not start: weights (" in text(explain(config, whole.host(), topic="attention"))
