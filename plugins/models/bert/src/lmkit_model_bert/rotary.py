"""NomicBERT and GTE as data: post-norm encoders with rotary positions and a gated MLP. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmkit.api import Architecture, LinearSpec, ModelInfo, PoolerInfo, WeightRule, class_pooler
from lmkit_decoders.describe import ConfigReader, rope_length

from lmkit_model_bert.describe import EncoderConfig, encoder_info

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model

ENDINGS = ("Model", "ForSequenceClassification", "ForTokenClassification")
# Keys of NomicBERT's own files -> those of transformers; values it may have where there is only one way.
NOMIC = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
NOMIC_FIXED = {
    "activation_function": "swiglu", "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "prenorm": False, "use_rms_norm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "parallel_block": False, "causal": False,
}  # fmt: skip


class RotaryArchitecture(Architecture):
    names = tuple(f"{family}{ending}" for family in ("NomicBert", "Gte") for ending in ENDINGS)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        if "n_embd" in config:
            r = ConfigReader(config)
            for key, value in NOMIC_FIXED.items():
                r.one_of(key, (value,), value)
            config = {
                **config,
                **{new: config[old] for old, new in NOMIC.items() if old in config},
                "hidden_act": "silu",
            }
        r = ConfigReader(config)
        name = r.architecture(self.names)
        gte = name.startswith("Gte")
        d, rope = r.integer("hidden_size"), r.rope(160000.0 if gte else 1000.0)
        pooler, head = PoolerInfo("embed", d, "cls" if gte else "mean"), ()
        if not name.endswith("Model"):
            task = "classify" if name.endswith("ForSequenceClassification") else "token_classify"
            pooler = class_pooler(r.config, task)  # type: ignore[arg-type]
            last = LinearSpec("head.1" if task == "classify" else "head.0", d, (pooler.size,), True)
            head = (LinearSpec("head.0", d, (d,), True), last) if task == "classify" else (last,)  # type: ignore[assignment]
        cfg = EncoderConfig(
            vocab_size=r.integer("vocab_size"),
            hidden_size=d,
            intermediate_size=r.integer("intermediate_size"),
            num_heads=r.integer("num_attention_heads"),
            windows=(None,) * r.layers(),
            max_length=rope_length(r.integer("max_position_embeddings"), rope),
            norm_eps=r.number("layer_norm_eps", 1e-12),
            activation=r.activation("hidden_act", "gelu" if gte else "silu", ("silu", "gelu")),
            ropes=(rope,),
            num_types=r.count("type_vocab_size", 1 if gte else 2),
            qkv_bias=gte,
            o_bias=gte,
            mlp_bias=(False, gte),
            gated=True,
            fused_qkv=True,
            fused_up=gte,
            head=head,
            prefixes=("", "gte.", "new.") if gte else ("", "nomic_bert."),
        )
        return encoder_info(name, r, cfg, pooler)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_bert.encoder import Encoder

        return Encoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        cfg = info.config["encoder"]
        assert isinstance(cfg, EncoderConfig)
        layer = _GTE_LAYER if cfg.fused_up else _NOMIC_LAYER
        rules = []
        for prefix in cfg.prefixes:
            rules += [
                WeightRule(f"{prefix}embeddings.word_embeddings.weight", "tokens.weight"),
                WeightRule(f"{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
                WeightRule(f"{prefix}embeddings.LayerNorm.{{p}}", "norm.{p}"),
                WeightRule(f"{prefix}emb_ln.{{p}}", "norm.{p}"),
                *(
                    WeightRule(f"{prefix}{source}.{{p}}", f"layers.{{i}}.{to}.{{p}}", **how)
                    for source, to, how in layer
                ),
            ]
            if len(cfg.head) == 2:
                rules += [WeightRule(f"{prefix}pooler.dense.{{p}}", "head.0.{p}")]
            rules += [WeightRule(f"{prefix}pooler.dense.{{p}}", "", ignore=True)]
        return [*rules, WeightRule("classifier.{p}", f"head.{len(cfg.head) - 1}.{{p}}")]


# (name in the checkpoint, name here, more of the rule). q, k, v are one tensor; fc12 is NomicBERT's gate.
_NOMIC_LAYER: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("encoder.layers.{i}.attn.Wqkv", "qkv", {}),
    ("encoder.layers.{i}.attn.out_proj", "o", {}),
    ("encoder.layers.{i}.mlp.fc12", "up", {"part": "gate"}),
    ("encoder.layers.{i}.mlp.fc11", "up", {"part": "up"}),
    ("encoder.layers.{i}.mlp.fc2", "down", {}),
    ("encoder.layers.{i}.norm1", "attn_norm", {}),
    ("encoder.layers.{i}.norm2", "mlp_norm", {}),
)
_GTE_LAYER: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("encoder.layer.{i}.attention.qkv_proj", "qkv", {}),
    ("encoder.layer.{i}.attention.o_proj", "o", {}),
    ("encoder.layer.{i}.mlp.up_gate_proj", "up", {"transform": lambda up_gate: up_gate.roll(len(up_gate) // 2, 0)}),
    ("encoder.layer.{i}.mlp.down_proj", "down", {}),
    ("encoder.layer.{i}.attn_ln", "attn_norm", {}),
    ("encoder.layer.{i}.mlp_ln", "mlp_norm", {}),
)
