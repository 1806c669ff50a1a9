"""NomicBERT and GTE as data: post-norm encoders with rotary positions and a gated MLP. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import Architecture, LinearSpec, ModelInfo, PoolerInfo, WeightRule
from lmkit.layers.describe import ConfigReader, rope_length
from lmkit.layers.poolers import class_pooler

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
        fused = "n_embd" in config
        if fused:
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
            pooler = class_pooler(r, task)  # type: ignore[arg-type]
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
            activation=r.one_of("hidden_act", ("silu", "gelu"), "gelu" if gte else "silu"),
            ropes=(rope,),
            num_types=r.count("type_vocab_size", 1 if gte else 2),
            qkv_bias=gte,
            o_bias=gte,
            mlp_bias=(False, gte),
            gated=True,
            fused=fused,
            head=head,
            prefixes=("", "gte." if gte else "nomic_bert."),
        )
        return encoder_info(name, r, cfg, pooler)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_bert.encoder import Encoder

        return Encoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        cfg = info.config["encoder"]
        assert isinstance(cfg, EncoderConfig)
        rules = [rule for prefix in cfg.prefixes for rule in (_own(prefix) if cfg.fused else _usual(prefix))]
        if len(cfg.head) == 2:
            rules += [WeightRule(f"{cfg.prefixes[1]}pooler.dense.{{p}}", "head.0.{p}")]
        rules += [WeightRule(f"{prefix}pooler.dense.{{p}}", "", ignore=True) for prefix in cfg.prefixes]
        return [*rules, WeightRule("classifier.{p}", f"head.{len(cfg.head) - 1}.{{p}}")]


def _embeddings(prefix: str) -> list[WeightRule]:
    return [
        WeightRule(f"{prefix}embeddings.word_embeddings.weight", "tokens.weight"),
        WeightRule(f"{prefix}embeddings.token_type_embeddings.weight", "types.weight"),
        WeightRule(f"{prefix}embeddings.LayerNorm.{{p}}", "norm.{p}"),
        WeightRule(f"{prefix}emb_ln.{{p}}", "norm.{p}"),
    ]


def _usual(prefix: str) -> list[WeightRule]:
    """Names of transformers."""
    src, to = f"{prefix}layers.{{i}}", "layers.{i}"
    return [
        *_embeddings(prefix),
        *(WeightRule(f"{src}.self_attn.{p}_proj.{{p}}", f"{to}.qkv.{{p}}", part=p) for p in "qkv"),
        WeightRule(f"{src}.self_attn.o_proj.{{p}}", f"{to}.o.{{p}}"),
        *(WeightRule(f"{src}.mlp.{p}_proj.{{p}}", f"{to}.up.{{p}}", part=p) for p in ("gate", "up")),
        WeightRule(f"{src}.mlp.down_proj.{{p}}", f"{to}.down.{{p}}"),
        WeightRule(f"{src}.post_attention_layernorm.{{p}}", f"{to}.attn_norm.{{p}}"),
        WeightRule(f"{src}.post_mlp_layernorm.{{p}}", f"{to}.mlp_norm.{{p}}"),
    ]


def _own(prefix: str) -> list[WeightRule]:
    """Names of NomicBERT's own files: q, k, v in one tensor; fc12 is the gate."""
    src, to = f"{prefix}encoder.layers.{{i}}", "layers.{i}"
    return [
        *_embeddings(prefix),
        WeightRule(f"{src}.attn.Wqkv.{{p}}", f"{to}.qkv.{{p}}"),
        WeightRule(f"{src}.attn.out_proj.{{p}}", f"{to}.o.{{p}}"),
        WeightRule(f"{src}.mlp.fc12.{{p}}", f"{to}.up.{{p}}", part="gate"),
        WeightRule(f"{src}.mlp.fc11.{{p}}", f"{to}.up.{{p}}", part="up"),
        WeightRule(f"{src}.mlp.fc2.{{p}}", f"{to}.down.{{p}}"),
        WeightRule(f"{src}.norm1.{{p}}", f"{to}.attn_norm.{{p}}"),
        WeightRule(f"{src}.norm2.{{p}}", f"{to}.mlp_norm.{{p}}"),
    ]
