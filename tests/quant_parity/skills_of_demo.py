"""Right answers of 300 sums and 200 lists that training never saw, and perplexity on what the demo itself writes.

`PYTHONPATH=plugins/models/demo python tests/quant_parity/skills_of_demo.py demo FOLDER ...`; greedy, a line for each.
"""

from __future__ import annotations

import math
import sys

from lmkit import LLM, SamplingParams
from train.evaluate import make_items

WANTED = {"arithmetic": 300, "lists": 200}
LENGTH = 512  # tokens of the longest prompt and its answer
GREEDY = SamplingParams(max_tokens=192, temperature=0.0)
SEEDS = range(1000, 1032)  # none of those that calibration uses


def written() -> list[list[int]]:
    """What the demo writes from the first token on."""
    params = [SamplingParams(max_tokens=255, temperature=1.0, seed=seed, ignore_eos=True) for seed in SEEDS]
    with LLM("demo", max_length=LENGTH) as llm:
        return [[1, *output.token_ids] for output in llm.generate([[1]] * len(params), params)]


def main(models: list[str]) -> None:
    texts = written()
    for model in models:
        right = {}
        with LLM(model, max_length=2 * LENGTH, max_rows=32) as llm:
            for skill, number in WANTED.items():
                items = make_items([skill], number, seed=7)
                ids = [llm.text.encode_prompt(item.prompt, add_special=False) for item in items]
                answers = llm.generate(ids, GREEDY)
                right[skill] = sum(item.passes(answer.text) for item, answer in zip(items, answers, strict=True))
            seen = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
            found = [p.logprob for output in seen for p in (output.prompt_logprobs or ())[1:]]
        said = ", ".join(f"{right[skill]} of {number} {skill}" for skill, number in WANTED.items())
        print(f"{model}: {said}, perplexity {math.exp(-sum(found) / len(found)):.3f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
