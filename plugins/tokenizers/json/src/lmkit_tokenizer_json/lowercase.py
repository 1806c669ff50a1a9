"""Texts in lower case, where sentence-transformers' file beside the tokenizer asks for that."""

from __future__ import annotations

import json
from pathlib import Path

from lmkit.api import CheckpointError
from lmkit.checkpoint import read_modules
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.normalizers import Lowercase, Sequence


def lower(raw: RawTokenizer, folder: Path) -> None:
    """Lets `raw` turn texts into lower case first, as the library does: added tokens stay as they are.

    Raises CheckpointError for a file that is damaged.
    """
    asked = (module for module in read_modules(folder) if module["type"] == "Transformer")
    value = next((module["config"].get("do_lower_case") for module in asked), None)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{folder}: do_lower_case must be true or false, got {value!r:.80}")
    before = raw.normalizer
    said = {} if before is None else json.loads(before.__getstate__())
    if value and not any(step.get("type") == "Lowercase" for step in said.get("normalizers", [said])):
        raw.normalizer = Sequence([Lowercase(), *([] if before is None else [before])])
