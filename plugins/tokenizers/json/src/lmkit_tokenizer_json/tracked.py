"""The environment of chat templates, in which texts of clients stay known as such (see lmkit_tokenizer_json.origin).

What jinja2 does outside of the strings' own methods is followed here. A filter that is not known to keep track makes
its whole result the client's, when it was given something of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any

from jinja2 import Undefined, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context

from lmkit_tokenizer_json.budget import BudgetedEnvironment
from lmkit_tokenizer_json.origin import ClientText, Harmless, concat, formatted, is_theirs, joined, text_of

Harmless.register(Undefined)
_SAME = frozenset({"first", "last", "min", "max", "default", "attr"})  # they give back what they got
_FOLLOWED = frozenset({"trim", "replace", "upper", "lower", "join", "reverse"})  # by the methods of strings alone


class TrackedEnvironment(BudgetedEnvironment):
    concat = staticmethod(concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        charge: Callable[[Any], Any] = self.finalize or (lambda value: value)
        self.finalize = lambda value: text_of(charge(value))
        self.filters["join"] = self.checked(_join)
        self.filters["lmkit_concat"] = _tracked(self.filters["lmkit_concat"])

    def checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _tracked(super().checked(function))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "join":
            args = tuple(list(a) if isinstance(a, Iterable) else a for a in args)  # it is read twice
        result = super().call(context, function, *args, **kwargs)
        if not isinstance(result, str) or isinstance(result, ClientText) or not (is_theirs(args) or is_theirs(kwargs)):
            return result
        if isinstance(owner, str):
            if name == "join":
                return joined(owner, *args)
            if name == "format" and not (args and kwargs):
                make = (lambda v: function(**v)) if kwargs else (lambda v: function(*v))
                return formatted(make, kwargs or args)
            return ClientText(result)
        return ClientText(result) if isinstance(function, FunctionType) else result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        result = super().call_binop(context, operator, left, right)
        if operator == "%" and isinstance(left, str) and not isinstance(left, ClientText) and is_theirs(right):
            return formatted(left.__mod__, right if isinstance(right, (tuple, Mapping)) else (right,))
        return result


@pass_environment
def _join(
    environment: BudgetedEnvironment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items: Iterable[Any] = value
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), value)
    return joined(text_of(d), map(text_of, items))


_join.__name__ = "join"  # by which its budget is known


def _tracked(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", "").removeprefix("sync_").removeprefix("do_").removeprefix("_")

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        given = [a for a in (*args, *kwargs.values()) if not isinstance(a, (EvalContext, Context, BudgetedEnvironment))]
        if name == "soft_str":
            return text_of(*given)
        if not isinstance(result, str) or name in _SAME:
            return result
        if name == "concat":
            return concat(map(text_of, given))
        if (name in _FOLLOWED and isinstance(result, ClientText)) or not is_theirs(given):
            return result
        if name == "format" and not kwargs and not is_theirs(args[0]):
            return formatted(lambda values: function(args[0], *values), args[1:])
        return ClientText(result)

    return run
