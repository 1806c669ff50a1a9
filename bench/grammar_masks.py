"""Cost of a grammar mask per row and step: real tool schemas as grammars, a 151,669-token vocabulary.

    python bench/grammar_masks.py [--backend llguidance] [--schemas 60] [--max-length N] [--data ../shared/data]

For each schema an instance is written token by token; every step is a mask and an accepted token. Prints microseconds,
and after what the slowest masks came.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from lmkit.api import Grammar, GrammarError
from lmkit.plugins import load_target
from lmkit.text.side import vocabulary
from lmkit_testing.specs import find_plugin
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import Tokenizer

TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "String": "string"}


def clean(schema: Any, max_length: int) -> Any:
    """BFCL writes Python types. `max_length`: of strings; 0 leaves them free."""
    if isinstance(schema, dict):
        found = {k: clean(v, max_length) for k, v in schema.items() if k not in ("default", "optional", "format")}
        if isinstance(found.get("type"), str):
            found["type"] = TYPES.get(found["type"], found["type"])
            if found["type"] == "string" and max_length and "enum" not in found:
                found["maxLength"] = max_length
        return found
    return [clean(v, max_length) for v in schema] if isinstance(schema, list) else schema


def instance(schema: dict[str, Any]) -> Any:
    """Something that fits."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            return {k: instance(v) for k, v in schema.get("properties", {}).items()}
        case "array":
            return [instance(schema.get("items", {}))]
        case "integer":
            return 1234
        case "number":
            return 12.5
        case "boolean":
            return True
    return "the quick brown fox of San Francisco"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--schemas", type=int, default=60)
    parser.add_argument("--max-length", type=int, default=0, help="of all strings: their last ones are slow")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()
    raw = gzip.decompress((options.data / "tokenizers" / "qwen_tokenizer.json.gz").read_bytes())
    tokenizer = JsonTokenizer(Tokenizer.from_str(raw.decode()), eos_token="<|im_end|>")
    vocab = vocabulary(tokenizer, tokenizer.eos_token_ids, tokenizer.vocab_size)
    began = perf_counter()
    backend = load_target(find_plugin(f"grammar:{options.backend}")[2].target)(vocab)
    print(f"{options.backend}, {vocab.size} tokens; constructed in {perf_counter() - began:.2f} s")
    lines = (options.data / "bfcl" / "BFCL_v4_simple_python.json").read_text().splitlines()
    schemas = [clean(json.loads(line)["function"][0]["parameters"], options.max_length) for line in lines]
    row = np.zeros(-(-vocab.size // 32), np.int32)
    compiling, fills, accepts, refused = [], [], [], 0
    slowest: list[tuple[float, str]] = []
    for schema in schemas[: options.schemas]:
        began = perf_counter()
        try:
            compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(schema))))
        except GrammarError:
            refused += 1
            continue
        compiling.append(perf_counter() - began)
        matcher, written = compiled.matcher(), ""
        for token in tokenizer.encode(json.dumps(instance(schema)), add_special=False):
            if matcher.exhausted:
                break  # the engine asks no more
            began = perf_counter()
            matcher.fill(row)
            filled = perf_counter()
            if not matcher.accept([token]):
                break  # an instance that this schema does not take: the steps so far count
            fills.append(filled - began)
            slowest.append((filled - began, written[-40:]))
            written += tokenizer.piece(token).decode(errors="replace")
            accepts.append(perf_counter() - filled)
    for name, values in (("compile", compiling), ("mask", fills), ("accept", accepts)):
        us = np.array(values) * 1e6
        p50, p99 = np.percentile(us, (50, 99))
        print(f"{name:8} mean {us.mean():8.1f}  p50 {p50:8.1f}  p99 {p99:8.1f} us, n={len(us)}")
    for seconds, after in sorted(slowest, reverse=True)[:8]:
        print(f"mask     {seconds * 1e6:8.1f} us after {after!r}")
    print(f"refused: {refused} of {min(options.schemas, len(schemas))}")


if __name__ == "__main__":
    main()
