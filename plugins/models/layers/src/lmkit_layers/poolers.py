"""Poolers as data, from a checkpoint's configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lmkit.api import PoolerInfo, PoolingTask, UnsupportedModel

MAX_LABELS = 1 << 16


def label_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the classes: `id2label`, else `num_labels` (2 when the file says nothing) of them."""
    given = config.get("id2label")
    if given is None:
        num = 2 if config.get("num_labels") is None else config["num_labels"]
        if isinstance(num, bool) or not isinstance(num, int) or not 1 <= num <= MAX_LABELS:
            raise UnsupportedModel("num_labels", num, f"an integer from 1 to {MAX_LABELS}")
        return tuple(f"LABEL_{i}" for i in range(num))
    if not isinstance(given, Mapping) or {str(k) for k in given} != {str(i) for i in range(len(given))} or not given:
        raise UnsupportedModel("id2label", given, "a name for each class from 0 on")
    return tuple(str(given.get(str(i), given.get(i))) for i in range(len(given)))


def class_pooler(
    config: Mapping[str, object], task: PoolingTask, reduce: Literal["cls", "last", "mean"] = "cls"
) -> PoolerInfo:
    """Scores of classes: softmax, or sigmoid where classes do not exclude each other or there is only one."""
    labels, kind = label_names(config), config.get("problem_type")
    usual = "sigmoid" if len(labels) == 1 else "softmax"
    activations: dict[str | None, Any] = {
        "single_label_classification": usual,
        "multi_label_classification": "sigmoid",
        "regression": "none",
        None: usual,
    }
    if not isinstance(kind, str | None) or kind not in activations:
        raise UnsupportedModel("problem_type", kind, ", ".join(map(repr, activations)))
    activation = _cross_encoder(config) or activations[kind]
    return PoolerInfo(task, len(labels), reduce, activation=activation, labels=labels)


def _cross_encoder(config: Mapping[str, object]) -> Any:
    """The activation that sentence-transformers' CrossEncoder stores by the name of its class."""
    nested = config.get("sentence_transformers")
    name = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    known = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    short = str(name).rsplit(".", 1)[-1]
    if short not in known:
        raise UnsupportedModel("activation_fn", name, ", ".join(known))
    return known[short]
