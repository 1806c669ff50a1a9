"""vLLM's look-ups on the tasks of bench/copying.py: CPU time of a token with them and without, on one thread.

    OMP_NUM_THREADS=1 python bench/copying.py --folder /tmp/copying
    VLLM_PYTHON bench/peers/copying_vllm.py /tmp/copying

VLLM_PYTHON is of the environment that bench/peers/environments.py makes for vLLM. Two processes, one after the other;
an answer that is not the text of its task ends them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main(folder: str) -> None:
    without, ngram = (json.loads(run(folder, config)) for config in (None, NGRAM))
    for name, (seconds, steps) in ngram.items():
        ratios = [a / b for a, b in zip(without[name][0], seconds, strict=True)]
        print(
            f"{name}: {1000 * statistics.median(without[name][0]):.1f} ms a token without, "
            f"{1000 * statistics.median(seconds):.1f} with, {statistics.median(ratios):.2f}x "
            f"({min(ratios):.2f} to {max(ratios):.2f}), {steps:.2f} steps a token"
        )


def run(folder: str, config: dict[str, Any] | None) -> str:
    """What `measured` printed in a process of its own, which knows its threads before anything is imported."""
    command = [sys.executable, __file__, folder, json.dumps(config)]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def measured(folder: str, config: dict[str, Any] | None) -> None:
    """Prints {task: [CPU seconds a token of each answer but the first, steps a token of the last]} as JSON."""
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=4,
            max_num_batched_tokens=1024, enable_prefix_caching=False, speculative_config=config,
        )
    )  # fmt: skip
    found: dict[str, tuple[list[float], float]] = {}

    def answer(name: str, prompt: list[int], wanted: list[int]) -> tuple[float, int]:
        params = SamplingParams(max_tokens=len(wanted), temperature=0, ignore_eos=True, detokenize=False)
        began, steps, said = time.process_time(), 0, []
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                said = list(output.outputs[0].token_ids)
            steps += 1
        if said != wanted:
            sys.exit("the answer is not the text")
        return time.process_time() - began, steps

    for name, tasks in json.loads((Path(folder) / "tasks.json").read_text()).items():
        seconds, steps = [], 0
        for number, (prompt, wanted) in enumerate(tasks):
            first, _ = answer(f"{name} {number} first", prompt, wanted[:1])
            whole, steps = answer(f"{name} {number}", prompt, wanted)
            seconds.append((whole - first) / (len(wanted) - 1))
        found[name] = seconds[1:], (steps - 1) / (len(tasks[0][1]) - 1)
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measured(sys.argv[1], json.loads(sys.argv[2]))
    else:
        main(sys.argv[1])
