"""Poolers as data, from a checkpoint's configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lmkit.api import PoolerInfo, PoolingTask, UnsupportedModel
from lmkit.layers.describe import ConfigReader

MAX_LABELS = 1 << 16


def label_names(reader: ConfigReader) -> tuple[str, ...]:
    """Names of the classes: `id2label`, else `num_labels` (2 when the file says nothing) of them."""
    given = reader.config.get("id2label")
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(reader.integer("num_labels", 2, MAX_LABELS)))
    if not isinstance(given, Mapping) or {str(k) for k in given} != {str(i) for i in range(len(given))} or not given:
        raise UnsupportedModel("id2label", given, "a name for each class from 0 on")
    return tuple(str(given.get(str(i), given.get(i))) for i in range(len(given)))


def class_pooler(reader: ConfigReader, task: PoolingTask, reduce: Literal["cls", "last", "mean"] = "cls") -> PoolerInfo:
    """Scores of classes: softmax, or sigmoid where classes do not exclude each other or there is only one."""
    labels = label_names(reader)
    kind = reader.one_of(
        "problem_type", ("single_label_classification", "multi_label_classification", "regression", None)
    )
    activation: Any = {"multi_label_classification": "sigmoid", "regression": "none"}.get(str(kind))
    if activation is None:
        activation = "sigmoid" if len(labels) == 1 else "softmax"
    return PoolerInfo(task, len(labels), reduce, activation=_cross_encoder(reader.config) or activation, labels=labels)


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
