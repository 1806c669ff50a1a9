"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT as data; ColBERT is BERT with one small vector per token. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import Architecture, LinearSpec, ModelInfo, PoolerInfo, WeightRule, class_pooler
from lmkit_decoders.describe import ConfigReader

from lmkit_model_bert.describe import EncoderConfig, encoder_info

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model

ROBERTA = ("Roberta", "XLMRoberta", "Camembert")
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
COLBERT = "HF_ColBERT"


class BertArchitecture(Architecture):
    names = (COLBERT, *(f"{family}{ending}" for family in ("Bert", *ROBERTA) for ending in ENDINGS))

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        r = ConfigReader(config)
        name = r.architecture(self.names)
        roberta = name.startswith(ROBERTA)
        r.one_of("position_embedding_type", ("absolute",), "absolute")
        r.one_of("is_decoder", (False,), False)
        num_positions = r.integer("max_position_embeddings")
        first = r.count("pad_token_id", 1) + 1 if roberta else 0
        d = r.integer("hidden_size")
        pooler, head = _head(name, r, d, roberta)
        cfg = EncoderConfig(
            vocab_size=r.integer("vocab_size"),
            hidden_size=d,
            intermediate_size=r.integer("intermediate_size"),
            num_heads=r.integer("num_attention_heads"),
            windows=(None,) * r.layers(),
            max_length=num_positions - first,
            norm_eps=r.number("layer_norm_eps", 1e-12),
            activation=r.activation("hidden_act", "gelu"),
            num_positions=num_positions,
            first_position=first,
            num_types=r.integer("type_vocab_size", 2),
            head=head,
            prefixes=("", "roberta." if roberta else "bert."),
        )
        return encoder_info(name, r, cfg, pooler)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_bert.encoder import Encoder

        return Encoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        rules = []
        cfg = info.config["encoder"]
        assert isinstance(cfg, EncoderConfig)
        for prefix in cfg.prefixes:
            emb, src, to = f"{prefix}embeddings", f"{prefix}encoder.layer.{{i}}", "layers.{i}"
            rules += [
                WeightRule(f"{emb}.word_embeddings.weight", "tokens.weight"),
                WeightRule(f"{emb}.position_embeddings.weight", "positions.weight"),
                WeightRule(f"{emb}.token_type_embeddings.weight", "types.weight"),
                WeightRule(f"{emb}.position_ids", "", ignore=True),
                *_norm(f"{emb}.LayerNorm", "norm"),
                *(
                    WeightRule(f"{src}.attention.self.{part}.{{p}}", f"{to}.qkv.{{p}}", part=part[0])
                    for part in ("query", "key", "value")
                ),
                WeightRule(f"{src}.attention.output.dense.{{p}}", f"{to}.o.{{p}}"),
                *_norm(f"{src}.attention.output.LayerNorm", f"{to}.attn_norm"),
                WeightRule(f"{src}.intermediate.dense.{{p}}", f"{to}.up.{{p}}"),
                WeightRule(f"{src}.output.dense.{{p}}", f"{to}.down.{{p}}"),
                *_norm(f"{src}.output.LayerNorm", f"{to}.mlp_norm"),
            ]
        if info.architecture.startswith("Bert") and len(cfg.head) == 2:
            rules += [WeightRule("bert.pooler.dense.{p}", "head.0.{p}"), WeightRule("classifier.{p}", "head.1.{p}")]
        rules += [WeightRule(f"{prefix}pooler.dense.{{p}}", "", ignore=True) for prefix in cfg.prefixes]
        if len(cfg.head) == 2:
            rules += [
                WeightRule("classifier.dense.{p}", "head.0.{p}"), WeightRule("classifier.out_proj.{p}", "head.1.{p}"),
            ]  # fmt: skip
        source = "linear" if info.architecture == COLBERT else "classifier"
        rules += [WeightRule(f"{source}.{{p}}", "head.0.{p}")]
        if info.architecture.endswith("ForMaskedLM"):  # its head is not needed
            heads = ("lm_head.{p}", "lm_head.{a}.{p}", "cls.predictions.{p}", "cls.predictions.{a}.{p}",
                     "cls.predictions.transform.{a}.{p}")  # fmt: skip
            rules += [WeightRule(source.replace("{a}", name), "", ignore=True) for source in heads
                      for name in ("dense", "layer_norm", "decoder", "transform", "LayerNorm")]  # fmt: skip
        return rules


def _norm(source: str, target: str) -> list[WeightRule]:
    """A layer norm; the oldest checkpoints call its parameters gamma and beta."""
    names = {"gamma": "weight", "beta": "bias"}
    old = [WeightRule(f"{source}.{name}", f"{target}.{new}") for name, new in names.items()]
    return [*old, WeightRule(f"{source}.{{p}}", f"{target}.{{p}}")]


def _head(name: str, r: ConfigReader, d: int, roberta: bool) -> tuple[PoolerInfo, tuple[LinearSpec, ...]]:
    if name == COLBERT:
        size = r.integer("dim", 128)
        return PoolerInfo("token_embed", size, normalize=True), (LinearSpec("head.0", d, (size,)),)
    if name.endswith("ForSequenceClassification"):
        pooler = class_pooler(r.config, "classify", "cls")
        return pooler, (LinearSpec("head.0", d, (d,), True), LinearSpec("head.1", d, (pooler.size,), True))
    if name.endswith("ForTokenClassification"):
        pooler = class_pooler(r.config, "token_classify")
        return pooler, (LinearSpec("head.0", d, (pooler.size,), True),)
    return PoolerInfo("embed", d, "mean"), ()
