"""transformers: generate() with its static cache."""

from __future__ import annotations

import torch
from protocol import Clock, Load, serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Times(StoppingCriteria):
    """Is asked once after each token; never stops."""

    def __init__(self) -> None:
        self.clock, self.times = Clock(), []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self.model = AutoModelForCausalLM.from_pretrained(load.model, dtype="auto").eval()

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        ids = torch.tensor(prompts)
        times = Times()
        with torch.inference_mode():
            self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, cache_implementation="static", disable_compile=True,
                stopping_criteria=StoppingCriteriaList([times]),
            )  # fmt: skip
        return [times.times] * len(prompts)


if __name__ == "__main__":
    serve(Transformers)
