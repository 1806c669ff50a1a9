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


def read_dataset(path: Path, num_output: int) -> list[Prompt]:
    """JSON lines with "prompt" (a text) or "token_ids", and optionally "max_tokens". Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read {path}: {e}", fix="give a file of JSON lines") from e
    prompts = [_parse(path, number, line, num_output) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} has no prompts", fix='write lines like {"prompt": "Hello"}')
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
