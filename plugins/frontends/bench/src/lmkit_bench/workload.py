"""Prompts to measure with: random token ids, so that no tokenizer is needed, or the lines of a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.api import ConfigError

IDS = range(3, 250)  # every vocabulary has these; the first are special tokens, as a rule


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send: token ids, or a text for the server to tokenize."""

    prompt: list[int] | str
    num_output: int


def random_prompts(
    count: int,
    num_input: int,
    num_output: int,
    *,
    prefix: int = 0,
    seed: int = 0,
    vocabulary: range = IDS,
) -> list[Prompt]:
    """`count` prompts of `num_input` token ids, of which the first `prefix` are the same in all. Same seed, same ids.

    Raises ConfigError when the prefix leaves nothing to differ in.
    """
    if not 0 <= prefix < num_input:
        raise ConfigError(f"a shared prefix of {prefix} tokens in prompts of {num_input}", fix="make it shorter")
    numbers = random.Random(seed)

    def ids(length: int) -> list[int]:
        return numbers.choices(vocabulary, k=length)

    shared = ids(prefix)
    return [Prompt(shared + ids(num_input - prefix), num_output) for _ in range(count)]


def random_texts(count: int, num_input: int, num_output: int, *, prefix: int = 0, seed: int = 0) -> list[Prompt]:
    """The same as texts of `num_input` short words, for servers that take no token ids: about so many tokens each."""
    made = random_prompts(count, num_input, num_output, prefix=prefix, seed=seed)
    return [Prompt(" ".join(f"{word:x}" for word in p.prompt if isinstance(word, int)), num_output) for p in made]


def read_dataset(path: Path, num_output: int) -> list[Prompt]:
    """JSON lines with "prompt" (a text) or "token_ids", and optionally "max_tokens"; or one list of conversations as
    ShareGPT has them. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return _conversations(path, text)
        lines = text.splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {path}: {e}", fix="give a file of JSON lines") from e
    prompts = [_parse(path, number, line, num_output) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts", fix='write lines like {"prompt": "Hello"}')
    return prompts


def _conversations(path: Path, text: str) -> list[Prompt]:
    """The first question of each conversation; as many tokens as its answer has, one for four characters."""
    try:
        data = json.loads(text)
        turns = [conversation["conversations"] for conversation in data if len(conversation["conversations"]) > 1]
        pairs = [(first["value"], second["value"]) for first, second, *_ in turns if first["from"] in ("human", "user")]
        prompts = [Prompt(str(asked), max(1, len(answer) // 4)) for asked, answer in pairs if asked]
    except (ValueError, TypeError, LookupError) as e:
        fix = 'write [{"conversations": [{"from": "human", "value": TEXT}, {"from": "gpt", "value": TEXT}]}]'
        raise ConfigError(f"{path} has no conversations: {type(e).__name__}: {e}", fix=fix) from e
    if not prompts:
        raise ConfigError(f"{path} has no conversation that begins with a question and its answer")
    return prompts


def _parse(path: Path, number: int, line: str, num_output: int) -> Prompt:
    try:
        data = json.loads(line)
    except ValueError as e:
        raise ConfigError(f"{path}, line {number}: not JSON: {e}", fix='write {"prompt": "Hello"}') from e
    prompt: Any = data.get("token_ids", data.get("prompt")) if isinstance(data, dict) else None
    is_ids = isinstance(prompt, list) and all(type(i) is int and i >= 0 for i in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise ConfigError(
            f"{path}, line {number}: needs a prompt", fix='write {"prompt": TEXT} or {"token_ids": [...]}'
        )
    wanted = data.get("max_tokens", num_output)
    if type(wanted) is not int or wanted < 1:
        raise ConfigError(f"{path}, line {number}: max_tokens is {wanted!r}", fix="an integer, at least 1")
    return Prompt(prompt, wanted)
