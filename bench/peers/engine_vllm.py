"""vLLM for CPU: its engine in a process of its own, as vLLM starts it, asked for one iteration at a time."""

from __future__ import annotations

import os

from protocol import Clock, Load, serve

KV_GIB = 2


class Vllm:
    def __init__(self, load: Load) -> None:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE=str(KV_GIB), VLLM_LOGGING_LEVEL="ERROR")
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=load.model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=load.max_length,
                max_num_seqs=load.max_rows, max_num_batched_tokens=max(2048, load.max_length),
            )
        )  # fmt: skip
        self.params = lambda n: SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
        self.number = 0

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        clock = Clock()
        times: dict[str, list[float]] = {}
        for prompt in prompts:
            self.number += 1
            times[str(self.number)] = []
            self.engine.add_request(str(self.number), {"prompt_token_ids": prompt}, self.params(tokens))
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = clock()
            for output in outputs:
                row = times[output.request_id]
                row += [now] * (len(output.outputs[0].token_ids) - len(row))
        return list(times.values())


if __name__ == "__main__":
    serve(Vllm)
