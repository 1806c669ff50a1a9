"""Writes ranks.json from a tokenizer.json of byte pairs: python -m lmkit_tokenizer_ranks.convert FOLDER OUT

Vocabularies spell each byte as a character of its own there; the printable ones stand for themselves."""

import json
import sys
from base64 import b64encode
from pathlib import Path

OWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in OWN]
BYTE = {chr(byte): byte for byte in OWN} | {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def convert(folder, out):
    found = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    cuts = found["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    added = {token["content"]: token["id"] for token in found["added_tokens"]}
    pieces = [b""] * len(found["model"]["vocab"])
    for text, token in found["model"]["vocab"].items():
        pieces[token] = b"" if text in added else bytes(BYTE[char] for char in text)
    ranks = {
        "pattern": cuts,
        "pieces": [b64encode(piece).decode() for piece in pieces],
        "added": added,
        "special": [token["id"] for token in found["added_tokens"] if token["special"]],
    }
    (Path(out) / "ranks.json").write_text(json.dumps(ranks))


if __name__ == "__main__":
    convert(*sys.argv[1:])
