"""GPT-2, GPT-Neo and GPT-BigCode as data: learned positions, layer norms, biases. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit.api import UnsupportedModel
from lmkit_decoders import (
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    split_per_head,
    tensor_names,
    transposed,
    usual_config,
)

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attn_norm": ".ln_1",
    "mlp_norm": ".ln_2",
    "up": ".mlp.c_fc",
    "down": ".mlp.c_proj",
}


def gpt2(r: ConfigReader) -> DecoderConfig:
    r.one_of("add_cross_attention", (False,), False)
    given = short_keys(r, "gelu_new")
    scale = attn_scale(r, given["head_dim"])
    per_layer: tuple[dict[str, float], ...] = ()
    if r.flag("scale_attn_by_inverse_layer_idx", False):
        per_layer = tuple({"attn_scale": scale / (i + 1)} for i in range(len(given["windows"])))
    return usual_config(r, **given, **blocks(r), attn_scale=scale, per_layer=per_layer)


def bigcode(r: ConfigReader) -> DecoderConfig:
    given = short_keys(r, "gelu_pytorch_tanh")
    if r.flag("multi_query", True):
        given["num_kv_heads"] = 1
    return usual_config(r, **given, **blocks(r), attn_scale=attn_scale(r, given["head_dim"]))


def attn_scale(r: ConfigReader, head_dim: int) -> float:
    return head_dim**-0.5 if r.flag("scale_attn_weights", True) else 1.0


def gpt_neo(r: ConfigReader) -> DecoderConfig:
    hidden, heads, length = r.integer("hidden_size"), r.integer("num_heads"), r.integer("max_position_embeddings", 2048)
    attention = ".attn.attention"
    return usual_config(
        r,
        intermediate_size=r.integer("intermediate_size", 4 * hidden),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        windows=local_layers(r),
        max_length=length,
        num_positions=length,
        attn_scale=1.0,
        activation=r.activation("activation_function", "gelu_new"),
        **blocks(r)
        | {
            "qkv_bias": False,
            "names": tensor_names(
                "transformer.h.{i}",
                **NAMES,
                **{p: f"{attention}.{p}_proj" for p in "qkv"},
                o=f"{attention}.out_proj",
            ),
        },
    )


def local_layers(r: ConfigReader) -> tuple[int | None, ...]:
    """`attention_types` is a list of [kinds of layers, repetitions]."""
    num, types = r.integer("num_layers", 24), r.config.get("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [kind for pattern, times in types for _ in range(min(times, num)) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num or not set(kinds) <= {"global", "local"}:
        raise UnsupportedModel("attention_types", types, f"kinds (global, local) of {num} layers")
    return tuple(r.integer("window_size", 256) if kind == "local" else None for kind in kinds)


def short_keys(r: ConfigReader, activation: str) -> dict[str, Any]:
    hidden, heads, length = r.integer("n_embd", 768), r.integer("n_head", 12), r.integer("n_positions", 1024)
    return {
        "hidden_size": hidden,
        "intermediate_size": r.integer("n_inner", 4 * hidden),
        "num_q_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "windows": (None,) * r.layers("n_layer"),
        "max_length": length,
        "num_positions": length,
        "activation": r.activation("activation_function", activation),
    }


def blocks(r: ConfigReader) -> dict[str, Any]:
    return {
        "rope": None,
        "norm": "layer",
        "norm_eps": r.number("layer_norm_epsilon", 1e-5),
        "gated": False,
        "tie": r.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "names": tensor_names("transformer.h.{i}", **NAMES, qkv=".attn.c_attn", o=".attn.c_proj"),
    }


def split_unless_shared(cfg: DecoderConfig, fused: Tensor) -> Tensor:
    return fused if cfg.num_kv_heads == 1 else split_per_head(cfg, fused)


class Gpt2(DecoderArchitecture):
    configs = {"GPT2LMHeadModel": gpt2, "GPTNeoForCausalLM": gpt_neo, "GPTBigCodeForCausalLM": bigcode}
    spellings = {
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
        "num_heads": ("num_attention_heads",),
        "num_layers": ("num_hidden_layers",),
    }
    transforms = {
        "GPT2LMHeadModel": dict.fromkeys(("qkv", "o", "up", "down"), transposed),
        "GPTBigCodeForCausalLM": {"qkv": split_unless_shared},
    }
    ignored = (
        "transformer.h.{i}.attn.bias",
        "transformer.h.{i}.attn.masked_bias",
        "transformer.h.{i}.attn.attention.bias",
        "transformer.h.{i}.attn.attention.masked_bias",
    )
    prefix = "transformer."
