"""What rounding costs: perplexity on a text."""

from __future__ import annotations

import math

from lmkit.api import ConfigError

WINDOW = 256  # tokens; the first half of each window is context, the second counts
MAX_TOKENS = 8192


def perplexity(model: str, text: str) -> float:
    """exp of the mean of -log p over the second halves of the windows. Raises ConfigError for a text too short."""
    from lmkit import LLM, SamplingParams

    with LLM(model, max_length=WINDOW + 1) as llm:
        ids = llm.text.encode_prompt(text, add_special=False)[:MAX_TOKENS]
        prompts = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
        if not prompts:
            raise ConfigError(f"the text has {len(ids)} tokens, and {WINDOW} are needed", fix="a longer --text")
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), progress=True)
        found = [p.logprob for o in outputs for p in (o.prompt_logprobs or ())[WINDOW // 2 :]]
        return math.exp(-sum(found) / len(found))
