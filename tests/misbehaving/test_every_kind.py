"""Of every kind: a plugin that raises, when it is made or when it works, is named, with its kind and method."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import Grammar, LmkitError
from lmkit.kinds import BY_NAME
from lmkit.plugins.host import PluginHost
from lmkit_testing.dists import write_dist

LLAMA = "LlamaForCausalLM"
ERRORS = ("OSError('/secret')", "SystemExit(3)", "KeyboardInterrupt()")
OPTIONS: dict[str, Any] = {"max_length": 256, "kv_memory": "4MiB", "threads": 1}
SHORT = SamplingParams(max_tokens=8, temperature=0.0)
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
HOOKS = """
from dataclasses import replace
from lmkit.api import hookimpl
from {base_module} import {hook} as specs

@hookimpl
def {hook}():
    spec = next(s for s in specs() if s.name == {base!r})
    yield replace(spec, name="bad", target="bad_kind.target:{target}", origin=None, stability="beta"{more})
"""
TARGETS = """
from lmkit.api import load_target
Base = load_target({base_target!r})

def fail(*args, **kwargs):
    raise {error}

def Function(*args, **kwargs):
    made = Base(*args, **kwargs)
    made.__class__ = type("Made", (type(made),), {{"__slots__": (), {method!r}: {method}}})
    return made

def {method}(self, *args, **kwargs):
    raise {error}

if isinstance(Base, type):
    class Constructor(Base):
        def __init__(self, *args, **kwargs):
            raise {error}
    class Method(Base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
    setattr(Method, {method!r}, {wrap}({method}))
"""


@dataclass(frozen=True)
class Case:
    """A plugin of lmkit's own that is made to fail, and what makes lmkit use it."""

    kind: str
    base: str
    method: str  # that raises at work
    use: Callable[[LLM], Any] = lambda llm: llm.generate("hello", SHORT)
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "bad"
    more: str = ""  # of the spec
    function: bool = False  # the target is one
    made: bool = True  # it is called to make something
    wrap: str = ""  # "classmethod" where the method is one
    disable: str = ""


def chat(llm: LLM) -> Any:
    return llm.chat(QUESTION, SHORT, tools=TOOLS)


def constrained(llm: LLM) -> Any:
    grammar = Grammar("choice", '["yes", "no"]')
    return llm.generate("hello", SamplingParams(max_tokens=8, temperature=0.0, grammar=grammar))


def repeats(llm: LLM) -> Any:
    return llm.generate("hello", SamplingParams(max_tokens=8, temperature=0.0, extra={"bad": {"size": 2}}))


CASES = [
    Case("platform", "cpu", "defaults", options={"platform": "bad"}),
    Case("attention", "torch", "forward", options={"attention": "bad"}),  # pinned: the plugin that misbehaves
    Case("quantization", "int8", "parse", options={"quantization": "bad"}, made=False, wrap="classmethod"),
    Case(
        "model", "llama", "build", more=f", architectures=({LLAMA!r},)", name=LLAMA,
        options={"model_impl": f"bad-kind/{LLAMA}"},
    ),
    Case("tokenizer", "json", "encode_marked", function=True, disable="tokenizer:json"),
    Case("renderer", "jinja", "render", use=chat, function=True, disable="renderer:jinja"),
    Case("scheduler", "fcfs", "admit_key", options={"scheduler": "bad"}),
    Case("loader", "safetensors", "tensors", options={"loader": "bad"}),
    Case("op", "linear_native", "apply", options={"op": "bad"}),  # pinned: the plugin that misbehaves
    Case("executor", "uniproc", "forward", options={"executor": "bad"}),
    Case("structured_output", "masks", "gate", use=constrained, function=True, disable="structured_output:masks"),
    Case("grammar", "llguidance", "compile", use=constrained, disable="grammar:llguidance grammar:xgrammar"),
    Case("proposer", "ngram", "propose", options={"proposer": "bad"}),
    Case("logits_processor", "no_repeat_ngram", "add", use=repeats),
]  # fmt: skip


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs a case's plugin as "bad" of the dist bad-kind; its modules are forgotten afterwards."""

    def write(case: Case, target: str, error: str) -> None:
        spec = next(e for e in PluginHost().entries(case.kind) if _has(e.module, case))
        words = {
            "base": case.base, "hook": BY_NAME[case.kind].hook, "base_module": spec.module, "target": target,
            "more": case.more, "error": error, "method": case.method, "wrap": case.wrap, "base_target": "",
        }  # fmt: skip
        words["base_target"] = PluginHost().load(case.kind, LLAMA if case.kind == "model" else case.base).target
        modules = {"bad_kind.hooks": HOOKS.format(**words), "bad_kind.target": TARGETS.format(**words)}
        write_dist(tmp_path / "site", "bad-kind", {case.kind: {case.name: "bad_kind.hooks"}}, modules)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # of processes that are started
        monkeypatch.setenv("LMKIT_PLUGINS_DISABLE", case.disable)

    yield write
    for name in [n for n in sys.modules if n.startswith("bad_kind")]:
        del sys.modules[name]


def _has(module: str, case: Case) -> bool:
    hooks = __import__(module, fromlist=["hooks"])
    specs = getattr(hooks, BY_NAME[case.kind].hook, list)()
    return any(spec.name == case.base for spec in specs)


def said(case: Case) -> str:
    """The error that whoever uses the plugin gets: when the engine starts, or for a request."""
    try:
        with LLM("demo", **(OPTIONS | case.options)) as llm:
            outputs = case.use(llm)
            error = outputs[0].outputs[0].error
    except LmkitError as e:
        error = e.info()
    assert error is not None, "it is used, and nobody heard of its failure"
    assert error.code == "plugin", error
    return error.message


@pytest.mark.one_in(3)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_one_that_raises_at_work_is_named(
    install: Callable[..., None], case: Case, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(case, "Function" if case.function else "Method", error)
    message = said(case)
    assert f"{case.kind} {case.name!r} (bad-kind 0.1.0)" in message
    assert case.method in message
    assert error.partition("(")[0] in message


@pytest.mark.one_in(3)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("case", [case for case in CASES if case.made], ids=lambda case: case.kind)
def test_one_that_raises_when_it_is_made_is_named(install: Callable[..., None], case: Case, error: str) -> None:
    install(case, "fail" if case.function else "Constructor", error)
    message = said(case)
    assert f"{case.kind} {case.name!r} (bad-kind 0.1.0)" in message
    assert error.partition("(")[0] in message
