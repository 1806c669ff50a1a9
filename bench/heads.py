"""What the demo's head gains, with the demo and with models that say the same in steps that take longer.

    python bench/heads.py [--layers 0 28 92] [--rounds 5] [--temperatures 0 1] [--trees chain 4,2,1]

The longer ones are the demo with so many more layers that add nothing to the residual stream. Engines with the head and
without answer the same chats in turn, round by round, so that a busy machine slows both. Prints how many times as fast
the answers are (median of the rounds), tokens for each step, and how many guesses were right. Answers that differ end
it with an error: guesses change no token.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def answer(llm: LLM, params: SamplingParams) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens of all answers, one chat after the other."""
    began = time.perf_counter()
    found = [llm.chat([chat], params, progress=False)[0].outputs[0].token_ids for chat in CHATS]
    return time.perf_counter() - began, found


def compare(model: str, tree: str, params: SamplingParams, rounds: int) -> str:
    options = {} if tree == CHAIN else {"proposer.eagle": {"tree": tree}}
    config = EngineConfig(model=ModelConfig(model), wanted={"proposer": "eagle"}, plugins=options)
    plain, guessing = LLM(model), LLM(config=config)
    for llm in (plain, guessing):
        answer(llm, params)
    before: Any = guessing._engine.core.scheduler.stats()
    ratios, num_tokens = [], 0
    for _ in range(rounds):
        (slow, wanted), (fast, found) = answer(plain, params), answer(guessing, params)
        if wanted != found:
            sys.exit(f"{model}: guesses changed an answer")
        ratios.append(slow / fast)
        num_tokens += sum(map(len, found))
    after: Any = guessing._engine.core.scheduler.stats()
    steps, drafts, right = (
        getattr(after, name) - getattr(before, name) for name in ("num_steps", "num_drafts", "num_accepted")
    )
    spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{spread}, {num_tokens / steps:.2f} tokens a step, {right / drafts:.0%} of {drafts} guesses right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 28, 92])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 1])
    parser.add_argument("--trees", nargs="+", default=[CHAIN], help=f"{CHAIN}, or as --proposer.eagle.tree")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for num in args.layers:
            model = longer(num, Path(folder) / str(num))
            for temperature in args.temperatures:
                params = SamplingParams(max_tokens=64, temperature=temperature, seed=3)
                for tree in args.trees:
                    found = compare(model, tree, params, args.rounds)
                    print(f"{num} more layers, temperature {temperature:g}, {tree}: {found}", flush=True)


if __name__ == "__main__":
    main()
