"""The vocabulary in the metadata of a GGUF file (`tokenizer.ggml.*`), read with care: it is data from a stranger.

What stands for a flag or an id that a file leaves out is what llama.cpp takes for it (src/llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lmkit.api import CheckpointError, Tokenizer

from lmkit_loader_gguf.file import parts_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens; 0: none is said
MAX_TOKENS = 1 << 21
_PREFIX = "tokenizer.ggml."
_MIB = 1 << 20
_LARGEST = 1e39  # beyond it a float32 is infinite
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>",
})  # fmt: skip
_DEFAULT_IDS = {  # by the model of the vocabulary; for others there are none
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"cls": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_MIDDLE_ENDS = (  # of a text that is filled in, by key: the first of them that is a token
    ("fim_pad", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    ("fim_rep", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    ("fim_sep", "<|file_sep|>"),
)
_NO_ENDS = (  # what is no end where others are: text, and all of these
    ("<|end|>", "<|return|> <|call|>"), ("<|end|>", "<|call|> <|flush|>"), ("<|end|>", "<|calls|> <|flush|>"),
    ("<|end|>", "<|return|> <|calls|>"), ("</s>", "<|tool_response>"),
)  # fmt: skip


class Fields:
    """Values by what follows `tokenizer.ggml.` in their keys. All raise CheckpointError, which names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            self.bad(name, f"is {_shown(value)}; a text is needed")
        return value

    def texts(self, name: str) -> list[str]:
        value = self._list(name)
        if not all(isinstance(each, str) for each in value):
            self.bad(name, "is no list of texts")
        try:
            "".join(value).encode()
        except UnicodeEncodeError:
            self.bad(name, "has a text that is no Unicode")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._list(name, count)
        if not all(isinstance(each, (int, float)) and -_LARGEST < each < _LARGEST for each in value):
            self.bad(name, "is no list of finite numbers")
        return value

    def types(self, count: int) -> list[int]:
        name = "token_type"
        if not self.has(name):
            return [NORMAL] * count
        value = self._list(name, count)
        if not all(isinstance(each, int) and 0 <= each <= BYTE for each in value):
            self.bad(name, f"has what is no type of a token: 0 to {BYTE}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name) if self.has(name) else default
        if not isinstance(value, bool):
            self.bad(name, f"is {_shown(value)}; true or false is needed")
        return value

    def token(self, name: str, count: int) -> int | None:
        """An id below `count` under `NAME_token_id`; None where the file has none."""
        key = f"{name}_token_id"
        if not self.has(key):
            return None
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            self.bad(key, f"is {_shown(value)}; an id from 0 to {count - 1} is needed")
        return value

    def has(self, name: str) -> bool:
        return _PREFIX + name in self._metadata

    def bad(self, name: str, what: str, fix: str = "download the file again, or convert it anew") -> NoReturn:
        raise CheckpointError(f"{_PREFIX}{name} {what}", fix=fix)

    def _get(self, name: str) -> Any:
        if not self.has(name):
            self.bad(name, "is missing")
        return self._metadata[_PREFIX + name]

    def _list(self, name: str, count: int | None = None) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            self.bad(name, f"is {_shown(value)}; a list is needed")
        if count is not None and len(value) != count:
            self.bad(name, f"has {len(value)} values for {count} tokens")
        return value


class Vocabulary:
    """Tokens, unlike each other, by id, and their types. Raises CheckpointError."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.fields = fields = Fields(metadata)
        tokens = fields.texts("tokens")
        if not 0 < len(tokens) <= MAX_TOKENS:
            fields.bad("tokens", f"has {len(tokens)} texts; 1 to {MAX_TOKENS} are needed")
        self.tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
        self.ids = ids_of(fields, self.tokens)
        self.types = list(fields.types(len(tokens)))
        model = metadata.get(_PREFIX + "model")
        self._defaults = _DEFAULT_IDS.get(model, {}) if isinstance(model, str) else {}
        for text in ENDS:
            if (at := self.ids.get(text)) is not None and self.types[at] != UNKNOWN:
                self.types[at] = CONTROL

    def token(self, name: str) -> int | None:
        """The id of a role, as "bos"; None where there is none."""
        found, default = self.fields.token(name, len(self.tokens)), self._defaults.get(name, len(self.tokens))
        return default if found is None and default < len(self.tokens) else found

    @property
    def ends(self) -> list[int]:
        """The tokens after which nothing comes: those that the file names, and those that are known by their texts."""
        found = {self.token(name) for name in _END_IDS} | {self.ids.get(text) for text in ENDS}
        for name, texts in _MIDDLE_ENDS:
            if self.token(name) is None:
                found.add(next((self.ids[text] for text in texts.split() if text in self.ids), None))
        for text, others in _NO_ENDS:
            if all(self.ids.get(other) in found - {None} for other in others.split()):
                found.discard(self.ids.get(text))
        return sorted(at for at in found if at is not None)


def ids_of(fields: Fields, tokens: Sequence[str]) -> dict[str, int]:
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for i, text in enumerate(tokens) if ids[text] != i)
        fields.bad("tokens", f"has {twice[:80]!r} twice")
    return ids


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Their ids, ascending; none where the metadata have no vocabulary. Raises CheckpointError."""
    return Vocabulary(metadata).ends if _PREFIX + "tokens" in metadata else []


def open_tokenizer(path: Path, *, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a file, or of a split one by any of its parts, in a process apart. Raises CheckpointError."""
    from lmkit_killable import Limits
    from lmkit_tokenizer_json.apart import open_apart

    path = parts_of(path)[0]
    size = path.stat().st_size if path.is_file() else 0
    held = min(size, 64 * _MIB)  # metadata have no more; the rest of the file is mapped, and not read
    limits = Limits(10.0 + held * 2e-7, 1024 * _MIB + 64 * held + size, 120.0)
    return open_apart(
        "lmkit_loader_gguf.vocabulary_models:read_tokenizer", path, limits, eos_token_ids=list(eos_token_ids)
    )


def known_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, (str, int, float)) else f"of type {type(value).__name__}"
