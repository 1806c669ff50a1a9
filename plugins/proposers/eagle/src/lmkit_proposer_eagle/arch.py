"""EAGLE heads as data, in the layout of the published checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from lmkit.api import AttnNeed, ConfigError, LinearSpec, ModelInfo, UnsupportedModel, WeightRule
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, OneTensor, tensor_names, usual_config

TAPS = 3  # layers of the model that EAGLE-3 reads
# Fields beside `transformer_layer_config` in files of the library speculators that change nothing here.
HARMLESS = {
    *("architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "tie_word_embeddings"),
    *("speculators_config", "speculators_model_type", "speculators_version", "has_no_defaults_at_init"),
    *("embed_requires_grad", "transformer_layer_config", "lmkit_target"),
}
DEEPEST, WIDEST = 16, 16  # of a tree of guesses: depth, and children of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """version 1: layers of a Llama behind a projection, the first without a norm before attention. 3: one layer that
    attends to the embedding beside the hidden state, over what three of the model's layers read."""

    version: int
    num_tokens: int  # of the head's own vocabulary, if it has one
    taps: tuple[int, ...]
    fc_bias: bool
    tree: bool  # guesses branch, which attention must know
    normed: bool = False  # of EAGLE-3: the norm of hidden states comes before the residual stream, not only attention

    def attention_linears(self, i: int) -> list[LinearSpec]:
        specs = DecoderConfig.attention_linears(self, i)
        wide = self.version == 3
        return [replace(s, in_features=2 * s.in_features) if wide and s.name.endswith("qkv") else s for s in specs]

    def need(self, layer: int) -> AttnNeed:
        return replace(DecoderConfig.need(self, layer), tree=self.tree)

    def head(self) -> LinearSpec:
        return LinearSpec("lm_head", self.hidden_size, (self.num_tokens,), sources=(self.names["lm_head"],))


def eagle(r: ConfigReader) -> EagleConfig:
    """EAGLE-3 where the head has a vocabulary of its own, as all of its checkpoints say, or is one of the library
    speculators; else EAGLE-1."""
    if r.config.get("speculators_model_type") is not None:
        return eagle(_flat(r))
    target = ConfigReader(cast("Mapping[str, object]", r.config.get("lmkit_target", {})))
    version = 3 if r.config.get("draft_vocab_size") is not None or "norm_before_residual" in r.config else 1
    size, wanted = r.integer("hidden_size"), target.integer("hidden_size")
    if size != wanted:
        raise UnsupportedModel("hidden_size of the head", size, f"{wanted}, that of the model")
    r.one_of("target_hidden_size", (size,), size)
    layers = target.integer("num_layers")
    bias = r.flag("attention_bias", False)
    roles = {"embed": "embed_tokens", "fc": "fc", "norm": "norm"}
    if version == 3:
        r.one_of("num_hidden_layers", (1,))
        roles |= {"embed_norm": ".input_layernorm", "attn_norm": ".hidden_norm"}
    return usual_config(
        r,
        kind=EagleConfig,
        max_length=target.integer("max_length"),
        tie=version == 1,
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names("layers.{i}", **roles),
        version=version,
        num_tokens=r.integer("draft_vocab_size", r.integer("vocab_size")),
        taps=taps(r, layers) if version == 3 else (),
        fc_bias=r.flag("bias", version == 1),
        tree=target.flag("tree", False),
        normed=r.flag("norm_before_residual", False),
    )


def _flat(r: ConfigReader) -> ConfigReader:
    """A configuration of the library speculators in the layout of other heads. Raises UnsupportedModel."""
    r.one_of("speculators_model_type", ("eagle3",))
    layer = dict(r.nested("transformer_layer_config").config)
    ConfigReader(layer).one_of("model_type", ("llama",), "llama")
    r.one_of("norm_before_fc", (False,), False)
    fields: dict[str, Any] = {
        "draft_vocab_size": r.config.get("draft_vocab_size"),
        "norm_before_residual": r.flag("norm_before_residual"),
        "target_hidden_size": r.config.get("target_hidden_size"),
    }
    known = {*HARMLESS, *fields, "norm_before_fc", "eagle_aux_hidden_state_layer_ids"}
    if unknown := sorted(key for key, value in r.config.items() if key not in known and value is not None):
        allowed = f"fields of an eagle3 head: {', '.join(sorted(known))}"
        raise UnsupportedModel(unknown[0], r.config[unknown[0]], allowed)
    if (layers := r.config.get("eagle_aux_hidden_state_layer_ids")) is not None:
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers}
    return ConfigReader({**layer, **fields, "lmkit_target": r.config.get("lmkit_target", {})})


def children(text: str) -> tuple[int, ...]:
    """How many guesses follow each at each depth: of "4,2,1" the numbers, of "" none. Raises ConfigError."""
    found = tuple(int(part) for part in text.split(",") if part.strip().isdecimal())
    if text and (len(found) != len(text.split(",")) or len(found) > DEEPEST or not all(0 < n <= WIDEST for n in found)):
        what = f"at most {DEEPEST} numbers from 1 to {WIDEST}, one for each depth"
        raise ConfigError(f"proposer.eagle.tree: {text[:80]!r} is not {what}", fix="--proposer.eagle.tree 4,2,1")
    return found


def taps(r: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Before which layers of the model the head reads: as its file says, else near the first, the middle, the last."""
    given = cast("Mapping[str, object]", r.config.get("eagle_config") or {})
    found = given.get("eagle_aux_hidden_state_layer_ids", [2, num_layers // 2, num_layers - 3])
    if (
        not isinstance(found, list)
        or len(found) != TAPS
        or not all(type(i) is int and 0 <= i < num_layers for i in found)
    ):
        raise UnsupportedModel("eagle_aux_hidden_state_layer_ids", found, f"{TAPS} of {num_layers} layers")
    return tuple(found)


class EagleArchitecture(DecoderArchitecture):
    configs = {"EagleForCausalLM": eagle}
    config = EagleConfig
    models = {"EagleForCausalLM": "lmkit_proposer_eagle.model:eagle_head"}
    targets = {"fc": "fc", "norm": "last_norm", "embed_norm": "layers.{i}.embed_norm", "d2t": OneTensor("d2t")}
    # The model's; the inverse of d2t.
    ignored = ("embed_tokens.{any}", "t2d", "verifier_lm_head.{any}", "verifier_norm.{any}")

    def extra_linears(self, cfg: EagleConfig, options: Any) -> list[LinearSpec]:
        parts = TAPS if cfg.version == 3 else 2
        return [LinearSpec("fc", parts * cfg.hidden_size, (cfg.hidden_size,), cfg.fc_bias, "none", (), ("fc",))]

    def extra_parameters(self, name: str, cfg: EagleConfig) -> int:
        """The projection and, of EAGLE-3, a norm and tokens; the embedding is not here."""
        more = (1 + TAPS * cfg.hidden_size) * cfg.hidden_size + cfg.num_tokens if cfg.version == 3 else 0
        return more + ((2 if cfg.version == 1 else 0) * cfg.hidden_size - cfg.vocab_size) * cfg.hidden_size

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """Some files call the layer of EAGLE-3 "midlayer". A head of EAGLE-1 in a file is the model's."""
        version = info.config["version"]
        rules = [*super().weights(info), WeightRule("d2t", "d2t")]
        if version == 1:
            return [WeightRule("lm_head.{any}", "", ignore=True), *rules]
        middle = [
            replace(r, source=r.source.replace("layers.{i}", "midlayer"), target=r.target.replace("{i}", "0"))
            for r in rules
            if r.source.startswith("layers.{i}")
        ]
        return [*middle, *rules]
