"""What the demo's head gains, with the demo and with models that say the same in steps that take longer.

    OMP_NUM_THREADS=1 python bench/heads.py [--layers 0 28 92] [--rounds 9] [--temperatures 0 1] [--trees chain 4,2,1]

The longer ones are the demo with so many more layers that add nothing to the residual stream. Engines with the head and
without answer the same chats in turn, round by round; seconds are those of the process on a CPU, so that a busy machine
slows both. Prints how many times as fast whole answers are and what follows their first token (median of the rounds,
least and most), tokens for each step, and how many guesses were right. The time to a first token is that of the same
chat with one token. Steps are recorded as they first come: rounds before the first that is counted are told by
`--warm`. Answers that differ end it with an error: guesses change no token. With `--wrong` the head's last norm and
projection are drawn by chance, so that it guesses nothing right: what a head costs that is of no use.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lmkit import LLM, SamplingParams
from lmkit.config import EngineConfig, ModelConfig
from lmkit_model_demo.hooks import DIRECTORY
from safetensors.torch import load_file, save_file

CHAIN = "chain"
CHATS = [
    [{"role": "user", "content": text}]
    for text in (
        "What is 17 + 25?",
        "What is 84 - 39?",
        "Sort these words: pear, apple, fig, plum",
        "Reverse this list: cherry, lemon, grape, melon, olive",
        "Repeat this list: red, green, blue, black, white",
        "Count from 3 to 20",
        "Who are you?",
        "What is lmkit?",
        "Give me JSON with name Anna and age 30",
    )
]


def longer(num: int, folder: Path) -> str:
    """The demo with `num` more layers that add nothing, in `folder`."""
    if not num:
        return "demo"
    shutil.copytree(DIRECTORY, folder, dirs_exist_ok=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(DIRECTORY / "model.safetensors")
    first = config["num_hidden_layers"]
    last = f"model.layers.{first - 1}."
    for name, tensor in [(name, t) for name, t in tensors.items() if name.startswith(last)]:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(first, first + num):
            own = tensor * 0 if adds else tensor.clone()
            tensors[name.replace(last, f"model.layers.{layer}.")] = own
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": first + num}))
    return str(folder)


def wrong(folder: Path) -> str:
    """The demo's head with a projection by chance."""
    shutil.copytree(DIRECTORY / "eagle", folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    fc = tensors["fc.weight"]  # of 8 bits, or rounded by nobody
    by_chance = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0))
    tensors["fc.weight"] = by_chance.to(fc.dtype) if fc.is_floating_point() else (40 * by_chance).to(fc.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def answer(llm: LLM, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds of CPU, and the tokens of all answers, one chat after the other."""
    began = time.process_time()
    found = [llm.chat([chat], params, progress=False)[0].outputs[0].token_ids for chat in CHATS]
    return time.process_time() - began, found


def compare(model: str, tree: str, head: str, params: SamplingParams, warm: int, rounds: int) -> str:
    options = {"proposer.eagle": {"model": head} | ({} if tree == CHAIN else {"tree": tree})}
    config = EngineConfig(model=ModelConfig(model), wanted={"proposer": "eagle"}, plugins=options)
    plain, guessing = LLM(model), LLM(config=config)
    first = replace(params, max_tokens=1)
    ratios: list[float] = []
    behind: list[float] = []  # the same for what follows the first tokens
    num_tokens = 0
    before: Any = None
    for number in range(warm + rounds):
        if number == warm:
            ratios, behind, num_tokens = [], [], 0
            before = guessing._engine.core.scheduler.stats()
        (slow, wanted), (fast, found) = answer(plain, params), answer(guessing, params)
        if wanted != found:
            sys.exit(f"{model}: guesses changed an answer")
        ratios.append(slow / fast)
        behind.append((slow - answer(plain, first)[0]) / (fast - answer(guessing, first)[0]))
        num_tokens += sum(map(len, found)) - len(CHATS)
    after: Any = guessing._engine.core.scheduler.stats()
    steps, drafts, right = (
        getattr(after, name) - getattr(before, name) for name in ("num_steps", "num_drafts", "num_accepted")
    )
    steps -= 2 * rounds * len(CHATS)  # of prompts
    guesses = f"{right / drafts:.0%} of {drafts} guesses right" if drafts else "no guesses"
    return (
        f"{spread(ratios)}, after the first token {spread(behind)}, {num_tokens / steps:.2f} tokens a step, {guesses}"
    )


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 28, 92])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--trees", nargs="+", default=[CHAIN], help=f"{CHAIN}, or as --proposer.eagle.tree")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--wrong", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        head = wrong(Path(folder) / "wrong") if args.wrong else ""
        for num in args.layers:
            model = longer(num, Path(folder) / str(num))
            for temperature in args.temperatures:
                params = SamplingParams(max_tokens=64, temperature=temperature, seed=3)
                for tree in args.trees:
                    found = compare(model, tree, head, params, args.warm, args.rounds)
                    print(f"{num} more layers, temperature {temperature:g}, {tree}: {found}", flush=True)


if __name__ == "__main__":
    main()
