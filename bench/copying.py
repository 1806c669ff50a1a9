"""What look-ups gain where a text is repeated with changes, with a model of a released shape that is made to repeat.

    OMP_NUM_THREADS=1 python bench/copying.py [--shape qwen2-0.5b] [--proposers ngram] [--rounds 5] [--tokens 128]
        [--shown 256] [--tasks copy ...] [--folder DIR]

A random model repeats nothing, so this one is made to: its embeddings are large beside what its layers add, and the
head has them in the order of one long cycle, so that after each token it says the one that follows in the cycle. All
else is random and computed in full. The tasks: a piece of the cycle is shown and said again ("copy"); the same with
every so manieth token replaced in what is shown, so that the answer differs there ("edit"); a piece is said that was
not shown ("new": nothing can be guessed). How many guesses are right follows from that alone.

One engine for each proposer and one without answer in turn, round by round; seconds are those of the process on all
CPUs, so that a busy machine slows all. Prints seconds for each token, how many times as fast as without (median of
rounds, least and most), steps for each token, and guesses. Answers that differ, or are not the cycle, end it.
`--folder` keeps the model and the tasks, for bench/peers/copying_vllm.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from lmkit import LLM, SamplingParams
from lmkit_bench.shapes import byte_tokenizer, shaped_checkpoint
from safetensors.torch import load_file, save_file

LARGE = 50.0  # times as large are the embeddings: their entries have a deviation of 1
TASKS = {"copy": 0, "edit, every 32nd": 32, "edit, every 16th": 16, "edit, every 8th": 8, "new": 1}


def repeating(shape: str, folder: Path) -> torch.Tensor:
    """Writes the model. Returns what follows each token [V]."""
    shaped_checkpoint(shape, folder, tie_word_embeddings=False)
    byte_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"] * LARGE
    cycle = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    following = torch.empty_like(cycle)
    following[cycle] = cycle.roll(-1)
    tensors["model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = torch.empty_like(embedding)
    tensors["lm_head.weight"][following] = embedding
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return following


def text(following: torch.Tensor, first: int, num: int) -> list[int]:
    found = [first]
    while len(found) < num:
        found.append(int(following[found[-1]]))
    return found


def task(following: torch.Tensor, every: int, seed: int, num_shown: int, num: int) -> tuple[list[int], list[int]]:
    """A prompt that shows `num_shown` tokens, and the answer of `num`."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(len(following), (num_shown + 1,), generator=generator).tolist()
    said = text(following, numbers[-1], max(num_shown, num + 1))
    shown = numbers[:num_shown] if every == 1 else said[:num_shown]
    if every > 1:
        shown[every - 1 :: every] = numbers[every - 1 : num_shown : every]
    return [*shown, said[0]], said[1 : num + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--proposers", nargs="+", default=["ngram"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shown", type=int, default=256)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        following = repeating(args.shape, folder)
        options = {"max_length": 1024, "num_blocks": 128, "prefix_cache": False}
        sizes, seeds = (args.shown, args.tokens), range(args.rounds + 1)
        tasks = {name: [task(following, TASKS[name], seed, *sizes) for seed in seeds] for name in args.tasks}
        (folder / "tasks.json").write_text(json.dumps(tasks))
        engines = {name: LLM(str(folder), proposer=name, **options) for name in ("none", *args.proposers)}
        for name, each in tasks.items():
            measure(name, engines, each)


def measure(name: str, engines: dict[str, LLM], tasks: list[tuple[list[int], list[int]]]) -> None:
    seconds: dict[str, list[float]] = {each: [] for each in engines}
    before: dict[str, tuple[int, int, int]] = {}
    for number, (prompt, wanted) in enumerate(tasks):  # the first is not counted: it packs, records and learns
        for each, llm in engines.items():
            if number == 1:
                before[each] = counts(llm)
            first = answer(llm, prompt, wanted[:1])
            seconds[each].append(answer(llm, prompt, wanted) - first)
    for each, llm in engines.items():
        num = (len(tasks) - 1) * (len(tasks[0][1]) - 1)
        ratios = [a / b for a, b in zip(seconds["none"][1:], seconds[each][1:], strict=True)]
        steps, guessed, right = (a - b for a, b in zip(counts(llm), before[each], strict=True))
        steps -= 2 * (len(tasks) - 1)  # of prompts
        print(
            f"{name}, {each}: {1000 * statistics.median(seconds[each][1:]) / (num / (len(tasks) - 1)):.1f} ms a token, "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}), {steps / num:.2f} steps a "
            f"token, {right} of {guessed} guesses right",
            flush=True,
        )


def answer(llm: LLM, prompt: list[int], wanted: list[int]) -> float:
    """Seconds of CPU."""
    params = SamplingParams(max_tokens=len(wanted), temperature=0, ignore_eos=True)
    began = time.process_time()
    (output,) = llm.generate([prompt], params, progress=False)
    seconds = time.process_time() - began
    if output.outputs[0].token_ids != wanted:
        sys.exit("the answer is not the text")
    return seconds


def counts(llm: LLM) -> tuple[int, int, int]:
    """Steps, guesses, and guesses that were right, since the start."""
    stats = llm._engine.core.stats()
    return stats.num_steps, stats.num_drafts, stats.num_accepted


if __name__ == "__main__":
    main()
