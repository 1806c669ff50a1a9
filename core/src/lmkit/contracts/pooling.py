"""Pooling models as data: what a model answers with, and a decoder with another head in place of its own.

FooModel, FooForSequenceClassification, FooForTokenClassification and reward models are made of any FooForCausalLM: the
same layers without its language-model head, with another head or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lmkit.contracts.errors import UnsupportedModel
from lmkit.contracts.model import LinearSpec, ModelInfo, PoolerInfo
from lmkit.contracts.params import PoolingTask

CAUSAL = "ForCausalLM"
# Endings of architecture names that mean "a decoder with another head", and what that head is for.
HEADS: Mapping[str, PoolingTask] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForProcessRewardModel": "token_classify",
    "ForRewardModel": "token_classify",
    "Model": "embed",
}
LM_HEAD = "lm_head"  # name that decoders give to their language-model head
MAX_LABELS = 1 << 16
SETTINGS = "config_sentence_transformers.json"  # what is said of all modules of a checkpoint together
WHOLE_MODEL = "SentenceTransformer"  # the type under which it stands among them


def decoder_name(architecture: str) -> str:
    """The language model from which a pooling architecture is made: Qwen3Model -> Qwen3ForCausalLM."""
    ending = next((e for e in HEADS if architecture.endswith(e)), None)
    return architecture if ending is None else architecture.removesuffix(ending) + CAUSAL


def with_head(info: ModelInfo, config: Mapping[str, object], name: str, task: PoolingTask) -> ModelInfo:
    """The pooling model `name` made of the decoder `info`: "embed" has no head, other tasks one output per class."""
    own = next((s for s in info.linears if s.name == LM_HEAD), None)
    num_parameters = info.num_parameters - (own.total_out * (own.in_features + own.bias) if own else 0)
    if task == "embed":
        pooler = PoolerInfo("embed", info.hidden_size, "last", normalize=True)
    else:
        pooler = class_pooler(config, task, "last")
    layers = info.layers
    causal = True if config.get("is_causal") is None else config["is_causal"]
    if not isinstance(causal, bool):
        raise UnsupportedModel("is_causal", causal, "true or false")
    if not causal:
        if info.recurrent:
            raise UnsupportedModel("is_causal", False, "true: recurrent layers do not see what follows")
        layers = tuple(replace(layer, attn=layer.attn and replace(layer.attn, causal=False)) for layer in layers)
    linears = tuple(s for s in info.linears if s.name != LM_HEAD)
    found = replace(info, architecture=name, linears=linears, pooler=pooler, layers=layers)
    num_parameters += sum(s.total_out * (s.in_features + s.bias) for s in head_linears(found))
    return replace(found, num_parameters=num_parameters)


def head_linears(info: ModelInfo) -> tuple[LinearSpec, ...]:
    """The linears of the head that stands in place of a decoder's own. Reward models have two, with a ReLU between."""
    pooler, d = info.pooler, info.hidden_size
    if pooler is None or "embed" in pooler.task:
        return ()
    score = LinearSpec("score.0", d, (pooler.size,), bias=pooler.task == "token_classify")
    if not info.architecture.endswith("RewardModel"):
        return (score,)
    return LinearSpec("score.0", d, (d,), bias=True), replace(score, name="score.2", bias=True)


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
