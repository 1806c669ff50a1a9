"""What proposers gain: the same answers with and without, on texts that can be guessed and on such that cannot.

    python bench/drafts.py MODEL [--proposers ngram suffix] [--rounds 5] [--tokens 128] [--temperature 0]

One engine for each proposer and one without, in one process; they answer in turn, task by task and round by round, so
that a busy machine slows all. Prints tokens a second (median; minimum and maximum), how many times as fast as without
(median of the rounds), steps for each token, and how many guesses were right. Answers that differ end it with an error:
guesses change no token. A proposer that remembers earlier answers saw all tasks but the stories in the round before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field

from lmkit import LLM, SamplingParams
from lmkit.api import LmkitError

CODE = '''def total(prices, rate):
    """The sum of all prices with tax."""
    result = 0.0
    for price in prices:
        result += price * (1 + rate)
    return round(result, 2)
'''
PROSE = (
    "The harbour was quiet in the morning. Two boats came in with the tide, and the men on the quay counted the "
    "baskets of fish as they were handed up, one after another, until the sun stood over the lighthouse."
)
TASKS = {
    "copy": f"Repeat this text word for word:\n\n{PROSE}",
    "edit": f"Write this function again with `prices` renamed to `amounts`, and change nothing else:\n\n{CODE}",
    "quote": f"{PROSE}\n\nQuote the sentence about the boats, then the whole text once more.",
    "story": "Tell a story about {topic}.",
}
TOPICS = (
    "a lighthouse keeper who finds a letter", "two foxes in a winter forest", "the first train to a mountain town",
    "a clock that runs backwards", "a gardener on the moon", "an old map and a young sailor",
)  # fmt: skip
SUMS = {
    "sums": "What is 17 + 25?",
    "sort": "Sort these numbers: 31, 4, 15, 92, 65, 35.",
    "about": "What is lmkit?",
    "json": "Write a JSON object with a name and an age.",
}  # what the built-in demo model was made for


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    right: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--proposers", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    names = ["none", *args.proposers]
    options = {"max_length": 1024, "num_blocks": 256, "prefix_cache": False, "threads": args.threads}
    try:
        engines = {name: LLM(args.model, proposer=name, **options) for name in names}
    except LmkitError as e:
        print(f"{e}\n{e.fix}")
        return e.exit_code
    for task, prompt in (SUMS if args.model == "demo" else TASKS).items():
        found = {name: Measured() for name in names}
        for number in range(args.rounds + 1):  # the first is not counted: it packs, records and learns
            params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=number, ignore_eos=True)
            asked = prompt.replace("{topic}", TOPICS[number % len(TOPICS)])
            said = {name: one(engines[name], asked, params, found[name], counted=number > 0) for name in names}
            if any(tokens != said["none"] for tokens in said.values()):
                print(f"{task}: the answers differ")
                return 1
        print(f"{task}:")
        for name, m in found.items():
            show(name, m, found["none"])
    return 0


def one(llm: LLM, prompt: str, params: SamplingParams, into: Measured, counted: bool) -> list[int]:
    """One answer; its tokens."""
    before, began = counts(llm), time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": prompt}], params, progress=False)
    seconds, after = time.perf_counter() - began, counts(llm)
    if counted:
        into.seconds.append(seconds)
        into.tokens = len(output.token_ids)
        into.steps += after[0] - before[0]
        into.guessed += after[1] - before[1]
        into.right += after[2] - before[2]
    return output.token_ids


def counts(llm: LLM) -> tuple[int, int, int]:
    """Steps, guesses, and guesses that were right, since the start."""
    stats = llm._engine.core.stats()
    return stats.num_steps, stats.num_drafts, stats.num_accepted


def show(name: str, m: Measured, plain: Measured) -> None:
    speeds = sorted(m.tokens / s for s in m.seconds)
    gain = statistics.median(a / b for a, b in zip(plain.seconds, m.seconds, strict=True))
    guesses = f", {m.right / m.guessed:.0%} of {m.guessed // len(m.seconds)} guesses right" if m.guessed else ""
    print(
        f"  {name:<12} {statistics.median(speeds):7.1f} tok/s ({speeds[0]:.1f} to {speeds[-1]:.1f})  {gain:5.2f}x  "
        f"{m.steps / len(m.seconds) / m.tokens:.2f} steps a token{guesses}"
    )


if __name__ == "__main__":
    sys.exit(main())
