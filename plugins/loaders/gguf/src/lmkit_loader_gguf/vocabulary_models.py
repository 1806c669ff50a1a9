"""Tokenizers of the library `tokenizers` from the metadata of GGUF files: ids as llama.cpp gives them.

Texts that spell a control token or one that the file's maker defined are that token, as they are for llama.cpp where
it is told to parse them. Where it leaves a model's own tokenizer, the model's counts: BERT's keeps marks that take
space (Devanagari's vowels), and has no words of more than 100 characters; Phi-3's takes all blanks after its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmkit.api import CheckpointError
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lmkit_loader_gguf.file import GgufFile
from lmkit_loader_gguf.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    ids_of,
    known_names,
)
from lmkit_loader_gguf.vocabulary_splits import SPLITS

BLANK = "\u2581"
_MAX_SLICES = 1 << 30  # characters copied when pieces are cut in two
_ROLES = {  # by the names that templates have for them
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "cls_token": "cls",
    "sep_token": "seperator", "mask_token": "mask",
}  # fmt: skip


def read_tokenizer(path: Path, *, eos_token_ids: Sequence[int] = ()) -> JsonTokenizer:
    """Raises CheckpointError."""
    metadata = GgufFile(path).metadata
    try:
        vocabulary = Vocabulary(metadata)
        raw = _made(vocabulary, metadata)
        ids = {name: vocabulary.token(role) for name, role in _ROLES.items()}
        ends = vocabulary.ends
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e.message}", fix=e.fix) from e
    special = {name: vocabulary.tokens[at] for name, at in ids.items() if at is not None}
    return JsonTokenizer(
        raw,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        special_tokens=special,
        eos_token_ids=tuple(eos_token_ids or ends),
    )


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises CheckpointError."""
    return _made(Vocabulary(metadata), metadata)


def _made(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    kind = vocabulary.fields.text("model")
    if kind not in _MODELS:
        fix = "take a checkpoint in safetensors, with its tokenizer.json"
        vocabulary.fields.bad("model", f"is {kind[:80]!r}; those that are read are {known_names(_MODELS)}", fix)
    try:
        return _MODELS[kind](vocabulary, metadata)
    except CheckpointError:
        raise
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.ggml makes no tokenizer: {e}", fix="download the file again") from e


def _sentencepiece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    fields = vocabulary.fields
    scores = fields.numbers("scores", len(vocabulary.tokens))
    unknown = vocabulary.token("unknown")
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_by_score(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.flag("add_space_prefix", True)
    blanks = [normalizers.Prepend(BLANK)] if prefix else []
    made.normalizer = normalizers.Sequence([*blanks, normalizers.Replace(" ", BLANK)])
    made.decoder = _blank_decoder(prefix)
    _add(made, vocabulary, strip_right=_phi3(metadata))
    _frame(made, vocabulary, bos=vocabulary.token("bos"), eos=vocabulary.token("eos"), add_bos=True)
    return made


def _by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Any two tokens that make a third, in the order of its score; of equal ones the longer come first.

    So runs of one character, which all may have one score, grow from the left, as where the leftmost pair is taken.
    """
    texts = vocabulary.tokens
    if sum(len(text) ** 2 for text in texts) > _MAX_SLICES:
        vocabulary.fields.bad("tokens", f"are too long: the sum of their squares is over {_MAX_SLICES} characters")
    known = set(texts)
    whole = [i for i, kind in enumerate(vocabulary.types) if kind in (0, NORMAL, USER_DEFINED, UNUSED)]
    whole.sort(key=lambda i: (-scores[i], -len(texts[i])))
    return [
        (left, right)
        for text in map(texts.__getitem__, whole)
        for cut in range(len(text) - 1, 0, -1)
        if (right := text[cut:]) in known and (left := text[:cut]) in known
    ]


def _bytes(vocabulary: Vocabulary, metadata: Mapping[str, Any], name: str | None = None) -> Tokenizer:
    """Merges over bytes, or, by the split's name, over characters."""
    fields = vocabulary.fields
    name = name or fields.text("pre")
    if name not in SPLITS:
        fix = "convert the file anew, or take a checkpoint with tokenizer.json"
        fields.bad("pre", f"is {name[:80]!r}; those that are known are {known_names(SPLITS)}", fix)
    split = SPLITS[name]
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary),
            ignore_merges=split.ignore_merges,
            byte_fallback=not split.byte_level,
        )
    )
    pieces: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    if split.byte_level:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = decoders.ByteLevel()
    else:
        made.normalizer = normalizers.Replace(" ", BLANK)
        made.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        made.decoder = _blank_decoder(prefix=False)
    lines = [text for text in vocabulary.tokens if len(text) > 1 and not text.strip("\n")]
    _add(made, vocabulary, also=lines if split.whole_lines else ())
    _frame(made, vocabulary, bos=vocabulary.token("bos"), eos=vocabulary.token("eos"), add_bos=split.add_bos)
    return made


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    fields, ids = vocabulary.fields, vocabulary.ids
    merges: dict[tuple[str, str], None] = {}  # of two that are equal the first counts
    for text in fields.texts("merges"):
        at = text.find(" ", 1)
        left, right = text[:at], text[at + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges[left, right] = None
            continue
        if at < 0 or not right:
            fields.bad("merges", f"has {text[:80]!r}; two tokens with a blank between are needed")
        part = next(each for each in (left, right, left + right) if each not in ids)
        fields.bad("merges", f"has {text[:80]!r}, but {part[:80]!r} is no token")
    return list(merges)


def _characters(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    return _bytes(vocabulary, metadata, "gemma4")


def _wordpiece(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> Tokenizer:
    """Files mark where words begin; the library marks where they go on."""
    fields = vocabulary.fields
    words = [_word(text) for text in vocabulary.tokens]
    ids = ids_of(fields, words)
    unknown = vocabulary.token("unknown")
    if unknown is None:
        fields.bad("unknown_token_id", "is missing")
    made = Tokenizer(models.WordPiece(vocab=ids, unk_token=words[unknown], max_input_chars_per_word=100))
    lowercase = fields.flag("normalizer.lowercase", True)
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=fields.flag("normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    _add(made, vocabulary)
    first = next((at for role in ("bos", "cls") if (at := vocabulary.token(role)) is not None), None)
    _frame(made, vocabulary, bos=first, eos=vocabulary.token("seperator"), add_bos=True, add_eos=True)
    return made


def _word(text: str) -> str:
    if text.startswith(BLANK):
        return text[1:]
    return text if text.startswith("[") and text.endswith("]") else "##" + text


_MODELS = {"llama": _sentencepiece, "gpt2": _bytes, "bert": _wordpiece, "gemma4": _characters}


def _blank_decoder(prefix: bool) -> Any:
    first = [decoders.Strip(" ", 1, 0)] if prefix else []
    return decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *first])


def _phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether control tokens take the blanks after them: files do not say it but by the model's name."""
    name = metadata.get("general.name")
    return isinstance(name, str) and any(each in name.lower() for each in ("phi-3", "phi3"))


def _add(made: Tokenizer, vocabulary: Vocabulary, *, strip_right: bool = False, also: Iterable[str] = ()) -> None:
    """Tokens that are looked for in the text before all else."""
    special: list[AddedToken] = []
    others = [AddedToken(text, normalized=False) for text in also]
    for at, kind in enumerate(vocabulary.types):
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        text = made.id_to_token(at)
        strip = strip_right and text not in ("<unk>", "<s>", "<|endoftext|>")
        token = AddedToken(text, normalized=False, special=kind != USER_DEFINED, rstrip=strip)
        (others if kind == USER_DEFINED else special).append(token)
    made.add_special_tokens(special)
    made.add_tokens(others)


def _frame(
    made: Tokenizer, vocabulary: Vocabulary, *, bos: int | None, eos: int | None, add_bos: bool, add_eos: bool = False
) -> None:
    """What stands before and after each text."""
    before = _mark(vocabulary, "bos", bos, add_bos)
    after = _mark(vocabulary, "eos", eos, add_eos)
    if not before and not after:
        return
    first = [*before, "$A", *after]
    second = [f"{part}:1" for part in ("$B", *after)]
    marks = {name: [at] for name, at in (("bos", bos), ("eos", eos)) if at is not None}
    made.post_processor = processors.TemplateProcessing(
        single=first,
        pair=first + second,
        special_tokens=[{"id": name, "ids": ids, "tokens": [made.id_to_token(ids[0])]} for name, ids in marks.items()],
    )


def _mark(vocabulary: Vocabulary, name: str, at: int | None, default: bool) -> list[str]:
    if not vocabulary.fields.flag(f"add_{name}_token", default):
        return []
    if at is None:
        vocabulary.fields.bad(f"{name}_token_id", f"is missing, and {name.upper()} is written with each text")
    return [name]
