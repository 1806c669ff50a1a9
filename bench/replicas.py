"""What choosing one of many engines costs, and how much of the cached beginnings of prompts it finds (docs/ranks.md).

    python bench/replicas.py --engines 1000 --requests 50000

Conversations of several turns, with popular system prompts in front, come at once; a request ends after a while. An
oracle knows every engine's cache and sends each prompt where most of it is, whatever the load.
"""

from __future__ import annotations

import argparse
import heapq
import random
from statistics import median
from time import perf_counter

from lmkit_python.replicas import Router, _spans


def prompts(num: int, seed: int) -> list[list[int]]:
    """Turns of conversations in the order in which they come."""
    draw = random.Random(seed)
    systems = [[draw.randrange(50_000) for _ in range(draw.randrange(2, 16) * 64)] for _ in range(200)]
    talks: list[list[int]] = []
    found = []
    for _ in range(num):
        if talks and draw.random() < 0.7:
            talk = talks[draw.randrange(max(0, len(talks) - 5000), len(talks))]
            talk = [*talk, *(draw.randrange(50_000) for _ in range(3 * 64))]
        else:
            talk = [*draw.choice(systems), *(draw.randrange(50_000) for _ in range(2 * 64))]
        talks.append(talk)
        found.append(talk)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--running", type=int, default=16, help="requests that each engine has, on average")
    asked = parser.parse_args()
    router = Router(asked.engines, 32 * asked.requests)
    loads, caches = [0] * asked.engines, [set[int]() for _ in range(asked.engines)]
    anywhere: set[int] = set()
    ends: list[tuple[int, int]] = []
    seconds, hits, possible, most = [], 0, 0, 0
    for at, prompt in enumerate(prompts(asked.requests, 0)):
        while ends and ends[0][0] <= at:
            loads[heapq.heappop(ends)[1]] -= 1
        tokens = [*prompt]  # as after tokenizing: near, not where 50 million others have driven them
        began = perf_counter()
        chosen = router.choose(tokens, "", loads.__getitem__)
        seconds.append(perf_counter() - began)
        assert chosen is not None
        spans = _spans(tokens, "")
        hits += sum(span in caches[chosen] for span in spans)
        possible += sum(span in anywhere for span in spans)
        caches[chosen].update(spans)
        anywhere.update(spans)
        loads[chosen] += 1
        most = max(most, loads[chosen])
        heapq.heappush(ends, (at + random.randrange(1, 2 * asked.running * asked.engines), chosen))
    mean = 1e6 * sum(seconds) / len(seconds)
    print(f"a decision: {1e6 * median(seconds):.1f} us (median), {mean:.1f} us (mean)")
    print(f"spans found in the chosen engine's cache: {hits / possible:.1%} of those in any cache")
    print(f"requests of the busiest engine at its worst: {most}, on average {asked.running}")


if __name__ == "__main__":
    main()
