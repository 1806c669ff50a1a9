"""Refusal codes of the core: what each means, and the stage at which it is found."""

from __future__ import annotations

from collections.abc import Mapping

STAGES: tuple[str, ...] = (
    "known", "enabled", "compatible", "loads", "requirements", "platform", "types and shapes",
    "features", "check", "build",
)  # fmt: skip

# A failure in stages 1-4 ends the evaluation; 5-8 are all evaluated, so that every reason is seen at once; 9 and 10 run
# only if those are clean.
CODES: Mapping[str, tuple[int, str]] = {
    "not-installed": (1, "no installed dist has an entry point of this kind and name"),
    "name-conflict": (1, "several enabled dists use the name; write dist/name, or disable one"),
    "disabled": (2, "switched off by an environment variable, a file or a flag"),
    "core-too-old": (3, "the plugin's dist asks for a newer lmkit-core"),
    "core-too-new": (3, "the plugin's dist asks for an older lmkit-core"),
    "interface-unsupported": (3, "the plugin was written for an interface number this core has no adapter for"),
    "broken": (4, "importing or registering the plugin raised, or it broke the contract"),
    "requirement-missing": (5, "a dist in the plugin's `requires` is not installed"),
    "requirement-version": (5, "a dist in the plugin's `requires` has a version outside the range"),
    "platform": (6, "the plugin does not run on this platform, or the platform has no device here"),
    "capability": (6, "the device's compute capability is outside the plugin's range"),
    "dtype": (7, "the dtype is not declared"),
    "kv-dtype": (7, "the dtype of the KV cache is not declared"),
    "head-dim": (7, "the head size is not declared"),
    "block-size": (7, "the number of tokens per KV block is not declared"),
    "gqa-ratio": (7, "the number of query heads per KV head is not declared"),
    "format": (7, "the checkpoint, weight or file format is not declared"),
    "ranks": (7, "more ranks are asked for than the executor can run"),
    "model": (7, "a parser does not claim this model, by name, architecture or chat template"),
    "template": (7, "a parser does not read the calls or the reasoning that the chat template shows"),
    "feature": (8, "a feature the model needs is not declared"),
    "experimental": (8, "experimental plugins are used only when named"),
    "check-failed": (9, "the plugin's own check raised"),
    "target-import": (10, "importing the implementation raised"),
}
