"""The weight rules of a decoder: its roles' names in the file, joined with the places of its parts. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lmkit.api import ModelInfo, WeightRule

from lmkit_decoders.describe import DecoderConfig, decoder_config
from lmkit_decoders.places import Target, Transform, as_place


def decoder_weights(
    info: ModelInfo,
    transforms: Mapping[str, Transform] | None = None,
    targets: Mapping[str, Target] | None = None,
    cfg: DecoderConfig | None = None,
) -> list[WeightRule]:
    """Where the tensors of a decoder go: `names` of its configuration, each tensor of a role through `transforms`.

    `targets` are the places of roles that are a family's own, `cfg` the configuration where its class is.
    """
    cfg, transforms = cfg or decoder_config(info), transforms or {}
    places = cfg.places() | {role: as_place(target) for role, target in (targets or {}).items()}
    layer = next((name.partition("{i}")[0] for name in cfg.names.values() if "{i}" in name), "")
    unused = range(len(cfg.windows), len(cfg.windows) + cfg.num_unused_layers)
    twice = {source for source, num in Counter(cfg.names.values()).items() if num > 1}
    ordered = [(1, WeightRule(f"{layer}{i}.{{any}}", "", ignore=True)) for i in unused]
    for role, source in cfg.names.items():
        if role not in places:
            continue
        place, transform = places[role].within(cfg.mixer_path("{i}")), transforms.get(role)
        if cfg.mixer is not None and source in twice and "{mixer}" in places[role].target:
            # called as in layers of another kind: the layers of this one are named, and come before all others
            at = [i for i, mixes in enumerate(cfg.mixer.layers) if mixes]
            for i in at:
                ordered += [(0, rule) for rule in place.at(i).rules(source.replace("{i}", str(i)), transform)]
        else:
            ordered += [(place.order, rule) for rule in place.rules(source, transform)]
    rules = [*cache_scales(cfg), *(rule for _, rule in sorted(ordered, key=lambda pair: pair[0]))]
    head = cfg.names["lm_head"]
    if info.tie_embeddings:  # some files carry a second copy of the embedding, or have another head nevertheless
        rules.append(WeightRule(f"{head}.weight", "lm_head.weight", ignore=True))
    rules.append(WeightRule(f"{head}.{{p}}", "lm_head.{p}"))
    if "o" in cfg.names:
        rules.append(WeightRule(cfg.names["o"].rpartition(".")[0] + ".rotary_emb.inv_freq", "", ignore=True))
    return rules


def cache_scales(cfg: DecoderConfig) -> list[WeightRule]:
    """Scales of a float8 cache, under the names that are in use; where the cache is another they are not needed.

    Scales of queries and of softmax weights are for kernels that round these, too.
    """
    if "o" not in cfg.names:
        return []
    block = cfg.names["o"].rpartition(".")[0]
    places = (block, f"{block}.attn")
    sources = {f"{at}.{name}": "" for at in places for name in ("q_scale", "prob_scale", "prob_output_scale")}
    sources |= {f"{at}.kv_scale": "layers.{i}.attn.attn.k_scale" for at in places}
    for part in ("k", "v"):
        own = [cfg.names[role] for role in (part, "qkv") if role in cfg.names]
        names = [f"{at}.{part}_scale" for at in (*places, *own)]
        names += [f"{cfg.names[part]}.output_scale"] if part in cfg.names else []
        sources |= dict.fromkeys(names, f"layers.{{i}}.attn.attn.{part}_scale")
    return [WeightRule(source, target, ignore=True) for source, target in sources.items()]
