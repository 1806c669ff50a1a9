"""What a pooling model answers with: from its architecture, the checkpoint's modules and the user. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from lmkit.api import (
    Checkpoint,
    ConfigError,
    DenseInfo,
    ModelInfo,
    PoolerInfo,
    PoolingTask,
    Reduction,
    UnsupportedModel,
)
from lmkit.contracts.pooling import CAUSAL, HEADS, SETTINGS, WHOLE_MODEL, decoder_name

REDUCTIONS: Mapping[str, Reduction] = {
    "cls": "cls", "lasttoken": "last", "mean": "mean", "max": "max", "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
}  # fmt: skip
LEGACY = {  # keys of older files, one flag each; several are joined in this order
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
OWNERS = ("sentence_transformers.", "pylate.")  # of modules whose arithmetic is known; others bring their own code
TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}  # what a transformer does with texts
TOKENS, SENTENCE = "token_embeddings", "sentence_embedding"  # names of values between modules
# For each type of module the keys that are read, and those that change nothing here.
READ: Mapping[str, frozenset[str]] = {
    WHOLE_MODEL: frozenset({"prompts", "default_prompt_name", "truncate_dim"}),
    "Transformer": frozenset({
        "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
        "tokenizer_name_or_path",
    }),
    "Pooling": frozenset({
        "pooling_mode", "embedding_dimension", "word_embedding_dimension", "include_prompt", *LEGACY,
    }),
    "Dense": frozenset({
        "in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name",
    }),
    "Normalize": frozenset({"module_input_name", "module_output_name"}),
    "Dropout": frozenset({"dropout"}),
}  # fmt: skip
HARMLESS: Mapping[str, frozenset[str]] = {
    WHOLE_MODEL: frozenset({"__version__", "model_type", "similarity_fn_name"}),
    "Transformer": frozenset({"unpad_inputs"}),
}
OPTIONS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
HARMLESS_OPTIONS = frozenset({  # how the library loads and runs a model, not what it computes
    "attn_implementation", "torch_dtype", "dtype", "device_map", "trust_remote_code", "use_cache", "low_cpu_mem_usage",
    "add_pooling_layer", "padding_side", "use_fast", "use_memory_efficient_attention", "unpad_inputs", "revision",
    "local_files_only", "token",
})  # fmt: skip
SHOWN = 80  # characters of a value that an error shows


def find_head(checkpoint: Checkpoint, known: Collection[str], task: str) -> tuple[str, PoolingTask | None]:
    """(architecture whose plugin builds it, the pooling head put on it or None for its own).

    `known`: architectures with a plugin; `task`: the user's, or "auto".
    """
    name = checkpoint.architecture
    if name.endswith(CAUSAL):
        embeds = task in ("embed", "token_embed") or (task == "auto" and bool(checkpoint.modules))
        return name, "embed" if embeds else None
    ending = next((e for e in HEADS if name.endswith(e)), "")
    if name not in known and decoder_name(name) in known:
        return decoder_name(name), HEADS[ending]
    return name, None


def complete_pooler(info: ModelInfo, checkpoint: Checkpoint, task: str) -> PoolerInfo | None:
    """The architecture's pooler with what modules.json says. Raises ConfigError when it cannot do the user's `task`."""
    pooler = info.pooler
    offered: tuple[str, ...] = ("generate",) if pooler is None else pooler.tasks
    if task not in ("auto", *offered):
        raise ConfigError(f"--task {task}: a {checkpoint.architecture} can {', '.join(offered)}", fix="--task auto")
    if pooler is None or "embed" not in pooler.task or not checkpoint.modules:
        return pooler
    pooler, joins = replace(pooler, normalize=False), pooler.task == "embed"
    pooled = any(module["type"] == "Pooling" for module in checkpoint.modules)
    for module in checkpoint.modules:
        kind, path, owner = (str(module[key]) for key in ("type", "path", "class"))
        pooler = _with_module(pooler, kind, path, owner, cast("Mapping[str, Any]", module["config"]), pooled)
    if len(pooler.joined) > 1 and not joins:
        raise UnsupportedModel(
            "pooling_mode", list(pooler.reductions), "one, as this model has a vector for each token"
        )
    if not pooled:  # one vector per token (ColBERT)
        pooler = replace(pooler, task="token_embed", normalize=True)
    return pooler


def max_length(checkpoint: Checkpoint) -> int | None:
    """The longest text of the checkpoint's Transformer module."""
    for module in checkpoint.modules:
        length = cast("Mapping[str, Any]", module["config"]).get("max_seq_length")
        if module["type"] == "Transformer" and isinstance(length, int) and length > 0:
            return length
    return None


def _with_module(
    pooler: PoolerInfo, kind: str, path: str, owner: str, config: Mapping[str, Any], pooled: bool
) -> PoolerInfo:
    """`pooler`, followed by this module; `pooled`: one of the modules makes one vector of many."""
    if owner and not owner.startswith(OWNERS):
        raise UnsupportedModel("modules.json type", owner[:SHOWN], "a module of sentence-transformers, not other code")
    _check_keys(kind, path, config)
    match kind:
        case "SentenceTransformer":
            return replace(pooler, prompt=_prompt(config))
        case "Transformer":
            _check_transformer(path, config)
            return pooler
        case "Pooling":
            if pooler.dense or pooler.normalize:
                raise UnsupportedModel("modules.json", "Pooling behind Dense or Normalize", "Pooling before them")
            joined = _reductions(config, path, pooler)
            return replace(pooler, joined=joined, size=pooler.size * len(joined))
        case "Dense":
            if pooler.normalize:
                raise UnsupportedModel("modules.json", "Dense behind Normalize", "Normalize as the last module")
            _check_names(path, config, pooled)
            dense = _dense(config, path, pooler.size)
            return replace(pooler, size=dense.out_features, dense=(*pooler.dense, dense))
        case "Normalize":
            _check_names(path, config, pooled)
            return replace(pooler, normalize=True)
    return pooler  # Dropout: while training


def _check_keys(kind: str, path: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for a module that is not known, or a key that is not and says something."""
    if kind not in READ:
        raise UnsupportedModel("modules.json type", kind[:SHOWN], "Transformer, Pooling, Dense, Normalize, Dropout")
    for key, value in config.items():
        if key not in READ[kind] and key not in HARMLESS.get(kind, ()) and not _says_nothing(kind, key, value):
            raise UnsupportedModel(f"{_file(kind, path)} {key:.80}", _short(value), "a key that lmkit knows")


def _says_nothing(kind: str, key: str, value: Any) -> bool:
    if kind == "Transformer" and key in OPTIONS and isinstance(value, Mapping):
        return not value.keys() - HARMLESS_OPTIONS
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _prompt(config: Mapping[str, Any]) -> str:
    """The text that the library puts before every other, where nothing else is asked for."""
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    if (size := config.get("truncate_dim")) is not None:
        fix = "ask for `dimensions` in requests, and set it to null"
        raise UnsupportedModel(f"{SETTINGS} truncate_dim", _short(size), "null", fix=fix)
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise UnsupportedModel(f"{SETTINGS} default_prompt_name", _short(name), "the name of one of the prompts")
    return prompt


def _check_transformer(path: str, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where the module is not the last hidden states of the model beside modules.json."""
    file = _file("Transformer", path)
    if path:
        raise UnsupportedModel("modules.json path", path[:SHOWN], '"": the transformer beside modules.json')
    modalities = config.get("modality_config") or {"text": TEXT}
    text = modalities.get("text") if isinstance(modalities, Mapping) else None
    expected = {
        "transformer_task": (config.get("transformer_task"), (None, "feature-extraction")),
        "module_output_name": (config.get("module_output_name"), (None, TOKENS)),
        "modality_config text": (text, (TEXT,)),
        "do_lower_case": (config.get("do_lower_case"), (None, False, True)),
        "tokenizer_name_or_path": (config.get("tokenizer_name_or_path"), (None,)),
    }
    for key, (value, possible) in expected.items():
        if value not in possible:
            raise UnsupportedModel(f"{file} {key}", _short(value), " or ".join(map(repr, possible)))


def _check_names(path: str, config: Mapping[str, Any], pooled: bool) -> None:
    """Raises UnsupportedModel where a module reads or writes something else than the vectors of the one before it."""
    usual = (None, SENTENCE) if pooled else (None, SENTENCE, TOKENS)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in usual:
            raise UnsupportedModel(f"{path}/config.json {key}", _short(config[key]), " or ".join(map(repr, usual)))


def _reductions(config: Mapping[str, Any], path: str, pooler: PoolerInfo) -> tuple[Reduction, ...]:
    modes = config.get("pooling_mode") or [mode for key, mode in LEGACY.items() if config.get(key)] or "mean"
    names = [modes] if isinstance(modes, str) else modes
    known = isinstance(names, list) and all(isinstance(name, str) and name in REDUCTIONS for name in names)
    if not known or len(set(names)) < len(names):
        possible = f"one or several of {', '.join(REDUCTIONS)}"
        raise UnsupportedModel(f"{path}/config.json pooling_mode", _short(modes), possible)
    size = config.get("embedding_dimension", config.get("word_embedding_dimension", pooler.size))
    if size != pooler.size:
        raise UnsupportedModel(f"{path}/config.json embedding_dimension", _short(size), str(pooler.size))
    if config.get("include_prompt", True) is not True and pooler.prompt:
        raise UnsupportedModel(f"{path}/config.json include_prompt", False, "true beside a default prompt")
    return tuple(REDUCTIONS[name] for name in names)


def _file(kind: str, path: str) -> str:
    if kind == "Transformer":
        return "sentence_bert_config.json"
    return SETTINGS if kind == WHOLE_MODEL else f"{path}/config.json"


def _short(value: object) -> object:
    """The beginning of a value, as much as an error may show."""
    shown = repr(value)
    return value if len(shown) <= SHOWN else f"{shown[: SHOWN - 3]}..."


def _dense(config: Mapping[str, Any], path: str, size: int) -> DenseInfo:
    given, out = config.get("in_features"), config.get("out_features")
    if given != size or not isinstance(out, int) or not 1 <= out <= 1 << 20:
        raise UnsupportedModel(f"{path}/config.json in_features, out_features", (given, out), f"{size}, and a number")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")  # the library's usual one
    name = str(activation).rsplit(".", 1)[-1]
    if name not in ACTIVATIONS or not str(activation).startswith("torch.nn."):
        raise UnsupportedModel(
            f"{path}/config.json activation_function", _short(activation), f"torch.nn's {', '.join(ACTIVATIONS)}"
        )
    if not isinstance(config.get("bias", True), bool):
        raise UnsupportedModel(f"{path}/config.json bias", _short(config["bias"]), "true or false")
    return DenseInfo(path, size, out, config.get("bias") is not False, cast("Any", ACTIVATIONS[name]))
