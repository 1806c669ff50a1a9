"""What proposers cost on text that they cannot predict: the demo at temperature 100, which draws any token.

    OMP_NUM_THREADS=1 python bench/unpredictable.py [--proposers eagle ngram suffix] [--rows 1 8] [--tokens 18 200]

An engine with the proposer and one without answer the same random prompts, in turn and round by round; seconds are
those of the process on a CPU. Prints how many times as fast as without answers are (median of the rounds, least and
most; all rounds together), and how many guesses were made. Answers that differ end it with an error. The head of
`eagle` is one by chance (`bench/heads.py --wrong`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from heads import spread, wrong
from lmkit import LLM, SamplingParams
from lmkit.config import EngineConfig, ModelConfig

ANY = 100.0  # temperature
PROMPT = 24  # tokens


def seconds(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    began = time.process_time()
    outputs = llm.generate(prompts, params, progress=False)
    return time.process_time() - began, [output.outputs[0].token_ids for output in outputs]


def compare(name: str, head: str, num_rows: int, num_tokens: int, warm: int, rounds: int) -> str:
    options = {"proposer.eagle": {"model": head}} if name == "eagle" else {}
    guessing = LLM(config=EngineConfig(model=ModelConfig("demo"), wanted={"proposer": name}, plugins=options))
    engines, rng = (LLM("demo"), guessing), random.Random(0)
    spent: list[list[float]] = [[], []]
    guessed = 0
    for number in range(warm + rounds):
        if number == warm:
            spent, guessed = [[], []], guessing._engine.core.stats().num_drafts
        prompts = [[rng.randrange(20, 1000) for _ in range(PROMPT)] for _ in range(num_rows)]
        params = SamplingParams(max_tokens=num_tokens, temperature=ANY, seed=number, ignore_eos=True)
        said = []
        for i in (0, 1) if number % 2 else (1, 0):
            each, tokens = seconds(engines[i], prompts, params)
            spent[i].append(each)
            said.append(tokens)
        if said[0] != said[1]:
            sys.exit(f"{name}: guesses changed an answer")
    ratios = [a / b for a, b in zip(*spent, strict=True)]
    guessed = guessing._engine.core.stats().num_drafts - guessed
    steps = rounds * num_tokens
    return f"{spread(ratios)}, all together {sum(spent[0]) / sum(spent[1]):.2f}x, {guessed} guesses in {steps} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposers", nargs="+", default=["eagle", "ngram", "suffix"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[18, 200])
    parser.add_argument("--steps", type=int, default=4000, help="that are counted of each")
    parser.add_argument("--warm", type=int, default=1000, help="steps before")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        head = wrong(Path(folder))
        for name in args.proposers:
            for rows in args.rows:
                for tokens in args.tokens:
                    found = compare(name, head, rows, tokens, args.warm // tokens, args.steps // tokens)
                    print(f"{name}, {rows} rows, {tokens} tokens: {found}", flush=True)


if __name__ == "__main__":
    main()
