"""What a template may spend: steps, seconds, and characters. Enforced inside the sandbox, without threads or signals.

It says what was too much and where, as long as each single call is short. Those that are not are ended from outside,
see lmkit_tokenizer_json.apart.

Steps are loop iterations, calls and operators, so recursion and nested loops count. Values that grow (concatenation,
repetition, padding, joining) are measured before they are made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000
MAX_CPU_SECONDS = 0.4
MAX_SECONDS = 10.0  # also when the machine is busy
MAX_OUTPUT = 32 << 20  # characters
MAX_VALUE = 8 << 20  # characters or elements of one intermediate value

_current: ContextVar[Budget] = ContextVar("budget")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_DROPPED_FILTERS = ("center", "wordwrap", "filesizeformat", "urlize", "xmlattr", "pprint", "random", "sum", "slice")
_WIDTH = re.compile(r"[0-9]{5}|\*")


class BudgetSpent(Exception):
    """The reason why rendering was ended."""


class Budget:
    """What one rendering may cost."""

    def __init__(self) -> None:
        self._steps = 0
        self._output = 0
        self._cpu_end = self._end = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._cpu_end = time.thread_time() + MAX_CPU_SECONDS
        self._end = time.monotonic() + MAX_SECONDS
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def step(self, slow: bool = False) -> None:
        """One more. `slow`: it may take long by itself, so look at the clock in any case."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise BudgetSpent(f"{MAX_STEPS} steps")
        if (slow or not self._steps % 4) and (time.thread_time() > self._cpu_end or time.monotonic() > self._end):
            raise BudgetSpent(f"{MAX_CPU_SECONDS} seconds")

    def output(self, length: int) -> None:
        self.step()
        self._output += length
        if self._output > MAX_OUTPUT:
            raise BudgetSpent(f"{MAX_OUTPUT} characters of output")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _allow(size: int) -> None:
    if size > MAX_VALUE:
        raise BudgetSpent(f"a value of more than {MAX_VALUE} characters or elements")


class _Counted:
    """An iterable whose iterations are steps; keeps its length, which `loop.length` needs."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        budget = _current.get(None)
        for item in self._source:
            if budget is not None:
                budget.step()
            yield item

    def __len__(self) -> int:
        return len(self._source)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which everything that can take long or grow large is counted."""

    intercepted_binops = frozenset({"*", "**", "+", "%", "//", "/", "-"})

    def __init__(self, **options: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, autoescape=False, finalize=_charge, **options)
        self.globals.pop("lipsum", None)
        for name in _DROPPED_FILTERS:
            self.filters.pop(name, None)
        self.filters = {name: self.checked(f) for name, f in self.filters.items()}
        self.filters["lmkit_counted"] = _Counted
        self.filters["lmkit_concat"] = _concat

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "lmkit_counted", [], [], None, None, lineno=loop.lineno)
        return _without_concat(tree)

    def checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments cannot make it explode and whose result is measured."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            budget = _current.get(None)
            if budget is not None:
                budget.step(slow=True)
            _check_call(getattr(function, "__name__", ""), args, kwargs)
            result = function(*args, **kwargs)
            _allow(_size(result))
            return result

        return run

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current.get(None)
        if budget is not None:
            budget.step(slow=True)
        # the sandbox wraps str.format; the method that it wraps knows its string
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        _check_call(name, (owner, *args) if isinstance(owner, (str, list)) else args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        _allow(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _current.get(None)
        if budget is not None:
            budget.step()
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > 4096:
                raise BudgetSpent("a power of more than 4096 bits")
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _allow(left.bit_length() + right.bit_length())
            else:
                _allow(max(_size(left), 1) * right if isinstance(right, int) else _size(right) * left
                       if isinstance(left, int) else 0)  # fmt: skip
        elif operator == "+":
            _allow(_size(left) + _size(right))
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            raise BudgetSpent("a format with a wide field")
        return super().call_binop(context, operator, left, right)


def _check_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses calls whose result would be enormous, before they are made."""
    numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
    if name in _PADDING or name in ("do_indent", "indent", "do_batch", "batch"):
        _allow(max(numbers, default=0))
        if name in ("do_indent", "indent") and args and isinstance(args[0], str):
            _allow(args[0].count("\n") * max(numbers, default=4))
    elif name in ("replace", "do_replace"):
        strings = [a for a in args if isinstance(a, str)]
        if len(strings) >= 3:
            source, old, new = strings[:3]
            _allow(len(source) + (source.count(old) if len(new) > len(old) else 0) * len(new))
    elif name in ("join", "do_join", "sync_do_join"):
        items = next((a for a in args if isinstance(a, (list, tuple))), ())
        glue = max((len(a) for a in args if isinstance(a, str)), default=0)
        _allow(sum(_size(i) if isinstance(i, str) else 32 for i in items) + glue * len(items))
    elif name in ("format", "do_format", "format_map") and isinstance(args[0], str) and _WIDTH.search(args[0]):
        raise BudgetSpent("a format with a wide field")


def _charge(value: Any) -> Any:
    """Every `{{ value }}` counts toward the output, also inside macros and captured blocks."""
    budget = _current.get(None)
    if budget is not None:
        budget.output(_size(value))
    return value


def _concat(first: Any, *rest: Any) -> str:
    """`a ~ b`, measured."""
    budget = _current.get(None)
    if budget is not None:
        budget.step()
    parts = [str(p) for p in (first, *rest)]
    _allow(sum(map(len, parts)))
    return "".join(parts)


def _without_concat(node: Any) -> Any:
    """Replaces every `~` in the tree by the measured filter."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_without_concat(v) if isinstance(v, nodes.Node) else v for v in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _without_concat(value))
    if isinstance(node, nodes.Concat):
        first, *rest = node.nodes
        return nodes.Filter(
            first, "lmkit_concat", rest, [], None, None, lineno=node.lineno, environment=node.environment
        )
    return node
