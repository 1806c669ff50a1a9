"""Random checkpoints in the shape of released models, written with `transformers`: something to measure with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

NORM = re.compile(r"norm|ln_|layer_?norm|\.ln\d", re.IGNORECASE)  # names of norms' parameters
# family -> (configuration class of transformers, model class, values that differ from COMMON)
COMMON: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 11}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
}
# name -> (family, configuration): the shapes of released models, for benchmarks with random weights
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2-0.5b": (
        "qwen2",
        {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rope_theta": 1000000.0, "tie_word_embeddings": True, "bos_token_id": 151643, "eos_token_id": 151645,
        },
    ),
    "llama-1b": (
        "llama",
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rope_theta": 500000.0, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128009,
        },
    ),
    "llama-160m": (
        "llama",
        {
            "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048,
        },
    ),
    "mixtral-0.8b": (
        "MixtralForCausalLM",
        {
            "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8,
            "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
            "max_position_embeddings": 4096,
        },
    ),
    "qwen3-moe-0.7b": (
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 384,
            "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
            "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 4096,
        },
    ),
}  # fmt: skip


def shaped_checkpoint(
    name: str, directory: Path | str, *, seed: int = 0, dtype: str = "bfloat16", **overrides: Any
) -> Path:
    """A random model with the shape of a released one (see SHAPES). Hundreds of megabytes; for benchmarks."""
    family, values = SHAPES[name]
    return write_checkpoint(family, {**COMMON, **values, **overrides}, Path(directory), seed, dtype, spread=0.02)


def write_checkpoint(
    family: str, values: Mapping[str, Any], directory: Path, seed: int, dtype: str, spread: float
) -> Path:
    """Writes a random model of `family`, a key of FAMILIES or an architecture of transformers; returns `directory`."""
    import transformers

    values = deepcopy(values)  # the library writes into what lies within
    model_class = getattr(transformers, FAMILIES[family][1] if family in FAMILIES else family)
    if "text_config" in model_class.config_class.sub_configs:  # all values but those of its parts are the text's
        parts = {key: value for key, value in values.items() if key.endswith("_config")}
        text = {key: value for key, value in values.items() if key not in parts}
        values = {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"], **parts}
    randomize(model_class, model_class.config_class(**values), seed, dtype, spread).save_pretrained(directory)
    return directory


def randomize(model_class: Any, config: Any, seed: int, dtype: str, spread: float) -> Any:
    """A model of transformers with random parameters; those of norms lie around 1."""
    import torch

    config.dtype = getattr(torch, dtype)
    before = torch.get_rng_state()
    default = torch.get_default_dtype()
    try:
        torch.manual_seed(seed)
        torch.set_default_dtype(getattr(torch, dtype))
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.empty_like(parameter).normal_(0.0, spread)
                norm = parameter.dim() == 1 and NORM.search(name) and not name.endswith("bias")
                parameter.copy_(1 + noise if norm else noise)
            for name in sorted(model.state_dict().keys() & dict(model.named_buffers()).keys()):
                if name.endswith(("bias", "scalar")):  # of routers, of layers
                    buffer = model.get_buffer(name)
                    buffer.copy_(torch.empty_like(buffer).normal_(float(name.endswith("scalar")), spread))
    finally:
        torch.set_default_dtype(default)
        torch.set_rng_state(before)
    return model


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(directory: Path | str, chat_template: str = CHATML, vocab_size: int = 0) -> int:
    """Writes a tokenizer of single bytes and three special tokens beside a checkpoint; returns its vocabulary size.

    Id 1 begins a message and id 2 ends it, as in the tiny checkpoints. Ids up to `vocab_size` are numbered words, so
    that each token a model of that size can draw has a text.
    """
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120t{i}" for i in range(len(SPECIAL) + len(alphabet), vocab_size)]  # U+0120 is the blank
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": chat_template,
    }
    (Path(directory) / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)
