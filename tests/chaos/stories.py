"""Random requests of every kind on a real engine, and the law they must keep: nobody changes another's answer.

    python tests/chaos/stories.py 17      one story again

A story draws an engine (few rows, few blocks, small steps, depth, drafts) and requests with any mixture of sampling
fields, constraints and adapters; some are aborted. Each that is not is then run alone: tokens, end and what is said of
their probabilities must be the same.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lmkit import LLM, SamplingParams
from lmkit.api import EngineRequest, Grammar, RequestError, TokenEvent
from lmkit_worker.loading.adapter_places import EMBED, HEAD, places_of
from safetensors.torch import save_file

MAX_STEPS = 20_000
PAUSE = 0.002  # seconds after a step without news: a grammar may be compiled beside it, and that takes time, not steps
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("json_schema", json.dumps({"enum": ["red", "green", 3, None]})),
    Grammar("json_object", ""),
    Grammar("regex", "[a-c]{2,9}(x|yz)?"),
    Grammar("choice", json.dumps(["yes", "no", "perhaps not"])),
]
ENGINES = [
    {"max_rows": 2, "max_step_tokens": 16, "depth": 1},
    {"max_rows": 5, "max_step_tokens": 33, "depth": 2},
    {"max_rows": 8, "max_step_tokens": 64, "depth": 1, "prefix_cache": False},
    {"max_rows": 16, "max_step_tokens": 48, "depth": 1},
]


@dataclass
class Heard:
    """What an engine said about a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt: list[Any] = field(default_factory=list)
    ends: list[tuple[Any, ...]] = field(default_factory=list)

    def hear(self, event: TokenEvent) -> None:
        assert not self.ends, f"news of {event.id} after its end"
        self.tokens += event.tokens
        self.logprobs += [(entry.token, entry.rank, [t for t, _ in entry.top]) for entry in event.logprobs]
        self.prompt += [entry.token for entry in event.prompt_logprobs]
        if event.finish is not None:
            self.ends.append((event.finish, event.stop_token, event.error and event.error.code))


def make_adapter(core: Any, folder: Path, seed: int) -> Path:
    """Of rank 2, for a few modules of whatever model the engine has."""
    folder.mkdir(parents=True, exist_ok=True)
    noise, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    places = {
        name: place for name, place in places_of(core.executor.worker.info).items() if place.linear not in (EMBED, HEAD)
    }
    tensors = {}
    for name in rng.sample(sorted(places), min(6, len(places))):
        for side in "AB":
            shape = places[name].shape(side, 2)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=noise) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


class Story:
    """One engine and what is asked of it, drawn from a seed."""

    def __init__(self, seed: int, adapters: Path, num_requests: int = 16) -> None:
        self.rng = random.Random(seed)
        options = self.rng.choice(ENGINES)
        self.llm = LLM("demo", max_length=256, num_blocks=self.rng.choice([18, 24, 60]), threads=1, dtype="float32",
                       enable_lora=True, **options)  # fmt: skip
        self.core: Any = self.llm._engine.core
        self.vocab_size = self.core.intake.vocab_size
        for name in ("red", "blue"):
            self.core.adapters.load(name, str(make_adapter(self.core, adapters / name, len(name))))
        self.stem = [self.rng.randrange(5, self.vocab_size) for _ in range(90)]
        self.num_requests, self.made = num_requests, 0

    def params(self) -> SamplingParams:
        rng = self.rng
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.25 else None
        num = rng.choice([1, 3, 20, 60])
        fields: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1e-300, 100.0]), "seed": rng.choice([None, 1, -7]),
            "top_p": rng.choice([1.0, 0.9, 0.3, 1e-300]), "top_k": rng.choice([0, 1, 5, 1 << 31]),
            "min_p": rng.choice([0.0, 0.1, 1.0]), "presence_penalty": rng.choice([0.0, 0.0, -2.0, 2.0]),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.5, -2.0]),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.2, 1e-6, 100.0]),
            "logprobs": rng.choice([None, None, 0, 1, 20]), "prompt_logprobs": rng.choice([None, None, None, 0, 3]),
            "logit_bias": rng.choice([(), (), ((7, 100.0), (8, -100.0)), ((9, 5.0),)]),
            "stop_token_ids": tuple(rng.sample(range(self.vocab_size), rng.choice([0, 0, 40]))),
        }  # fmt: skip
        if grammar is None:
            fields |= {"ignore_eos": rng.random() < 0.6, "min_tokens": rng.choice([0, 0, num, num // 2])}
        asked = {name: value for name, value in fields.items() if rng.random() < 0.5 or name == "temperature"}
        return SamplingParams(max_tokens=num, grammar=grammar, **asked)

    def request(self) -> EngineRequest:
        rng = self.rng
        self.made += 1
        prompt = self.stem[: rng.choice([0, 3, 40, 90])] + [
            rng.randrange(5, self.vocab_size) for _ in range(rng.randint(1, 60))
        ]
        return EngineRequest(
            f"r{self.made}", prompt, self.params(), priority=rng.choice([0, 0, -1, 3]), arrival=float(self.made),
            adapter=rng.choice([None, None, "red", "blue"]), cache_salt=rng.choice([None, None, "tenant"]),
        )  # fmt: skip

    def play(self, requests: list[EngineRequest], arrivals: float = 1.0, aborts: float = 0.0) -> dict[str, Heard]:
        core, coming, heard = self.core, requests[::-1], {}
        for _ in range(MAX_STEPS):
            while coming and self.rng.random() < arrivals:
                r = coming.pop()
                heard[r.id] = Heard()
                try:
                    core.add(r)
                except RequestError as error:
                    heard[r.id].ends.append(("error", None, error.code))
            if heard and self.rng.random() < aborts:
                gone = self.rng.choice(sorted(heard))
                if not heard[gone].ends:
                    core.abort([gone])
                    heard[gone].ends.append(("abort",))
            if not core.has_work():
                if not coming:
                    break
                continue
            events = core.step()
            for event in events:
                heard[event.id].hear(event)
            if not events:
                time.sleep(PAUSE)
            core.scheduler.check()
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0), "the work does not end"
        assert stats.num_free_blocks == stats.num_blocks, "blocks leak"
        return heard

    def run(self) -> int:
        """Returns how many answers were compared."""
        requests = [self.request() for _ in range(self.num_requests)]
        together = self.play(requests, arrivals=self.rng.choice([0.2, 0.5, 0.9]), aborts=self.rng.choice([0.0, 0.03]))
        num = 0
        for r in requests:
            if together[r.id].ends != [("abort",)]:
                alone = self.play([r])[r.id]
                assert together[r.id] == alone, f"{r.id}: {together[r.id]} in company, {alone} alone; {r.params}"
                codes = {None, "invalid-param", "invalid-request", "request-too-large", "grammar"}
                assert alone.ends[0][2] in codes, f"{r.id}: {alone.ends}"
                num += 1
        return num

    def close(self) -> None:
        self.llm.close()


def tell(seed: int, num_requests: int = 16) -> int:
    with tempfile.TemporaryDirectory() as folder:
        story = Story(seed, Path(folder), num_requests)
        try:
            return story.run()
        finally:
            story.close()


if __name__ == "__main__":
    print(tell(int(sys.argv[1]), 24), "answers were compared")
