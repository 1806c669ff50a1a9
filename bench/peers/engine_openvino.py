"""OpenVINO GenAI: its continuous-batching pipeline, with bfloat16 arithmetic, stepped one iteration at a time."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Clock, Load, serve

STEP_TOKENS = 2048
KV_BYTES_SHARE = 1.1  # blocks are whole


class OpenVino:
    def __init__(self, load: Load) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.max_num_seqs = load.max_rows
        scheduler.num_kv_blocks = int(KV_BYTES_SHARE * load.max_rows * load.max_length / 16) + 16
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": load.threads}
        self.pipeline = genai.ContinuousBatchingPipeline(load.model, scheduler, "CPU", properties)
        self.number = 0

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        clock = Clock()
        times: list[list[float]] = [[] for _ in prompts]
        handles = []
        for prompt in prompts:
            self.number += 1
            ids = ov.Tensor(np.array([prompt], np.int64))
            handles.append(self.pipeline.add_request(self.number, ids, config))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = clock()
            for row, handle in zip(times, handles, strict=True):
                if handle.can_read():
                    new = sum(len(output.generated_ids) for output in handle.read().values())
                    row += [now] * new
        return times


if __name__ == "__main__":
    serve(OpenVino)
