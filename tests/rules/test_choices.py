"""What is proven is what runs: a test that names the attention, the kernels or a block size (which decides on the
attention) proves something that a user who says nothing does not get. Where that is meant, a comment says why:

    # pinned: the reason
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/*/tests/**/*.py")])
RUNS = re.compile(r"^from lmkit import .*LLM|\blmkit\(", re.MULTILINE)  # a module that runs models
PINNED = {"attention", "op", "block_size"}
FLAGS = {f"--{name.replace('_', '-')}" for name in PINNED}
OPEN = (None, "auto")  # values that leave the choice where it is
REASON = "# pinned: "


def pins(name: str | None, value: ast.expr | None) -> bool:
    """Whether `name` gets a value of its own: neither none, nor handed on."""
    if name not in PINNED or value is None:
        return False
    if isinstance(value, ast.Constant):
        return value.value not in OPEN
    return not (isinstance(value, ast.Name) and value.id == name)


def pinning(tree: ast.Module) -> Iterator[int]:
    """Lines of keywords, defaults, entries and flags that take a choice away."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and pins(node.arg, node.value):
            yield node.value.lineno
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = [*zip(reversed(named), reversed(node.defaults), strict=False)]
            defaults += [*zip(node.kwonlyargs, node.kw_defaults, strict=True)]  # type: ignore[list-item]
            yield from (value.lineno for arg, value in defaults if value is not None and pins(arg.arg, value))
        elif isinstance(node, ast.Dict):
            entries = zip(node.keys, node.values, strict=True)
            yield from (v.lineno for k, v in entries if isinstance(k, ast.Constant) and pins(str(k.value), v))
        elif isinstance(node, ast.Constant) and node.value in FLAGS:
            yield node.lineno


def without_reason(text: str) -> list[int]:
    if not RUNS.search(text):
        return []
    lines, found = text.splitlines(), sorted(set(pinning(ast.parse(text))))
    return [n for n in found if not any(REASON in line for line in lines[max(0, n - 2) : n])]


def test_choices_are_left_open_or_pinned_with_a_reason() -> None:
    found = [f"{path.relative_to(ROOT)}:{n}" for path in TESTS for n in without_reason(path.read_text("utf-8"))]
    assert not found, f"say why ({REASON}...), or leave the choice to auto: {', '.join(found)}"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("LLM('demo', attention='torch')", True),
        ("LLM('demo', attention='torch')  # pinned: the reference is what this is about", False),
        ("# pinned: the reference is what this is about\nLLM('demo', attention='torch')", False),
        ("LLM('demo', attention='auto', block_size=None)", False),
        ("LLM(config=EngineConfig(cache=CacheConfig(block_size=4)))", True),
        ("LLM(config=EngineConfig(cache=CacheConfig(block_size=4 if paged else None)))", True),
        ("def engine(block_size: int = 4): ...", True),
        ("def engine(*, attention: str = 'auto', op: str | None = None): ...", False),
        ("def engine(attention: str):\n    return LLM('demo', attention=attention)", False),
        ("WAYS = {'blocks of 1': {'block_size': 1}}", True),
        ("run('serve', 'demo', '--attention', 'torch')", True),
        ("LLM('demo', max_rows=4)", False),
    ],
)
def test_the_rule(line: str, found: bool) -> None:
    assert bool(without_reason(f"from lmkit import LLM\n{line}\n")) == found
    assert not without_reason(line)


def test_it_looks_at_tests_that_run_models() -> None:
    looked_at = {str(path.relative_to(ROOT)) for path in TESTS if RUNS.search(path.read_text("utf-8"))}
    assert {"tests/parity/test_architectures.py", "tests/parity/test_greedy_tokens.py"} <= looked_at
    assert len(looked_at) > 10
