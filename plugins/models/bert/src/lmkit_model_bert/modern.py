"""ModernBERT as data: pre-norm, gated MLP, rotary positions, attention within a window or far. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmkit.api import Architecture, LinearSpec, ModelInfo, PoolerInfo, UnsupportedModel, WeightRule, class_pooler
from lmkit_decoders.describe import ConfigReader

from lmkit_model_bert.describe import EncoderConfig, encoder_info

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model

ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
KINDS = ("full_attention", "sliding_attention")
THETAS = {"full_attention": ("global_rope_theta", 160000.0), "sliding_attention": ("local_rope_theta", 10000.0)}


class ModernBertArchitecture(Architecture):
    names = tuple(f"ModernBert{ending}" for ending in ENDINGS)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        r = ConfigReader(config)
        name = r.architecture(self.names)
        d = r.integer("hidden_size")
        window = r.integer("local_attention", 128) // 2 + 1
        mlp_bias, attn_bias = r.flag("mlp_bias", False), r.flag("attention_bias", False)
        pooler, head = _head(name, r, d)
        cfg = EncoderConfig(
            vocab_size=r.integer("vocab_size"),
            hidden_size=d,
            intermediate_size=r.integer("intermediate_size"),
            num_heads=r.integer("num_attention_heads"),
            windows=tuple(window if kind == KINDS[1] else None for kind in _kinds(r)),
            max_length=r.integer("max_position_embeddings", 8192),
            norm_eps=r.number("norm_eps", 1e-5),
            activation=r.activation("hidden_activation", "gelu", ("gelu", "silu", "relu")),
            ropes=tuple(_rope(config, kind) for kind in KINDS),
            qkv_bias=attn_bias,
            o_bias=attn_bias,
            mlp_bias=(mlp_bias, mlp_bias),
            gated=True,
            fused_qkv=True,
            fused_up=True,
            pre_norm=True,
            norm_bias=r.flag("norm_bias", False),
            head=head,
            head_activation=r.activation("classifier_activation", "gelu", ("gelu", "silu", "relu")),
            head_norm=bool(head),
            prefixes=("", "model."),
        )
        return encoder_info(name, r, cfg, pooler)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_bert.encoder import Encoder

        return Encoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        rules = []
        for prefix in ("", "model."):
            src, to = f"{prefix}layers.{{i}}", "layers.{i}"
            rules += [
                WeightRule(f"{prefix}embeddings.tok_embeddings.weight", "tokens.weight"),
                WeightRule(f"{prefix}embeddings.norm.{{p}}", "norm.{p}"),
                WeightRule(f"{prefix}final_norm.{{p}}", "final_norm.{p}"),
                WeightRule(f"{src}.attn_norm.{{p}}", f"{to}.attn_norm.{{p}}"),
                WeightRule(f"{src}.attn.Wqkv.{{p}}", f"{to}.qkv.{{p}}"),
                WeightRule(f"{src}.attn.Wo.{{p}}", f"{to}.o.{{p}}"),
                WeightRule(f"{src}.mlp_norm.{{p}}", f"{to}.mlp_norm.{{p}}"),
                WeightRule(f"{src}.mlp.Wi.{{p}}", f"{to}.up.{{p}}"),
                WeightRule(f"{src}.mlp.Wo.{{p}}", f"{to}.down.{{p}}"),
            ]
        unused = info.architecture.endswith("ForMaskedLM")
        return [
            *rules,
            WeightRule("decoder.{p}", "", ignore=True),
            WeightRule("head.dense.{p}", "" if unused else "head.0.{p}", ignore=unused),
            WeightRule("head.norm.{p}", "" if unused else "head_norm.{p}", ignore=unused),
            WeightRule("classifier.{p}", "head.1.{p}"),
        ]


def _head(name: str, r: ConfigReader, d: int) -> tuple[PoolerInfo, tuple[LinearSpec, ...]]:
    bias = r.flag("classifier_bias", False)
    if name.endswith("ForSequenceClassification"):
        pooler = class_pooler(r.config, "classify", r.one_of("classifier_pooling", ("cls", "mean"), "cls"))
    elif name.endswith("ForTokenClassification"):
        pooler = class_pooler(r.config, "token_classify")
    else:
        return PoolerInfo("embed", d, "mean"), ()
    return pooler, (LinearSpec("head.0", d, (d,), bias), LinearSpec("head.1", d, (pooler.size,), True))


def _kinds(r: ConfigReader) -> list[str]:
    num = r.layers()
    every = r.integer("global_attn_every_n_layers", 3)
    kinds = r.config.get("layer_types") or [KINDS[i % every != 0] for i in range(num)]
    if not isinstance(kinds, list) or len(kinds) != num or any(kind not in KINDS for kind in kinds):
        raise UnsupportedModel("layer_types", kinds, f"{num} of {', '.join(KINDS)}")
    return kinds


def _rope(config: Mapping[str, object], kind: str) -> dict[str, Any]:
    """Rotary parameters of one kind of layer: nested in newer files, two keys in older ones."""
    key, theta = THETAS[kind]
    nested = config.get("rope_parameters")
    own = nested.get(kind) if isinstance(nested, Mapping) else None
    return ConfigReader({"rope_parameters": own, "rope_theta": config.get(key)}).rope(theta)
