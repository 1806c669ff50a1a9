"""Making a model of transformers without memory for its weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from lmkit.api import UnsupportedModel
from torch import nn
from torch.overrides import TorchFunctionMode

from lmkit_model_transformers.routing import ASKING, NAME


def refuse(architecture: str, reason: str, error: type[UnsupportedModel] = UnsupportedModel) -> UnsupportedModel:
    return error("architectures", architecture, fix=f"the transformers fallback cannot serve it: {reason}")


class _EmptyOnMeta(TorchFunctionMode):
    """Memory that is only asked for, as that of weights: a stack of experts may have more than a machine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters take no memory; buffers, which are computed and not loaded, are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with torch.device("cpu"), _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def built(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model without weights. Raises UnsupportedModel."""
    try:
        with _parameters_on_meta(), _any_attention():
            return kind._from_config(config, dtype=dtype)
    except Exception as e:
        own = isinstance(e, KeyError) and e.args[0] in (NAME, ASKING)
        reason = "it has attention classes of its own, and no place for another" if own else "its code cannot be built"
        raise refuse(kind.__name__, f"{reason} ({type(e).__name__}: {e!s:.200})") from e


@contextmanager
def _any_attention() -> Iterator[None]:
    """Classes whose code calls the attention interface, and that do not say so, are asked like all others."""
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation

    def anything(model: Any, attn_implementation: str | None, *args: Any, **options: Any) -> str | None:
        mine = attn_implementation in (NAME, ASKING)
        return attn_implementation if mine else check(model, attn_implementation, *args, **options)

    transformers.PreTrainedModel._check_and_adjust_attn_implementation = anything
    try:
        yield
    finally:
        transformers.PreTrainedModel._check_and_adjust_attn_implementation = check


def source_of(kind: type) -> str:
    """The code of the library's file that has the class."""
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return ""


def buffers_as_parameters(model: nn.Module) -> None:
    """Buffers that checkpoints store (the corrections of routers) are loaded like parameters."""
    for module in model.modules():
        for key in [key for key in module._buffers if key not in module._non_persistent_buffers_set]:
            buffer = module._buffers.pop(key)
            if buffer is not None:
                module.register_parameter(key, nn.Parameter(buffer.to("meta"), requires_grad=False))


def keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Keeps in float32 the tensors that the library keeps so, whatever the model's dtype."""
    patterns = [re.escape(p).replace(r"\*", ".*") for p in model._get_dtype_plan(dtype)]
    for name, parameter in model.named_parameters():
        if any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in patterns):
            parameter.data = parameter.data.float()
