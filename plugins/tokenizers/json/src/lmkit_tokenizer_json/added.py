"""Added and special tokens of the files beside tokenizer.json, merged as transformers' AutoTokenizer merges them.

tokenizer_config.json, special_tokens_map.json and added_tokens.json may add tokens, change flags of known ones, or only
name a token ("eos_token": "<eos>"). A token that the vocabulary lacks gets the next free id, whatever id a file states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lmkit.api import CheckpointError
from lmkit.files import SPECIAL_NAMES, content_of, read_object
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

_DECODER = "added_tokens_decoder"
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def add_tokens(raw: RawTokenizer, path: Path) -> tuple[dict[str, str], list[str]]:
    """Adds to `raw` the tokens of the files in `path`. Raises CheckpointError.

    Returns the named tokens, as {"eos_token": "</s>"}, and warnings about what transformers ignores, as is done here.
    Older checkpoints have no added_tokens_decoder in tokenizer_config.json. Only in theirs do special_tokens_map.json
    and added_tokens.json count.
    """
    config = read_object(path / _CONFIG)
    decoder = config.get(_DECODER)
    if decoder is not None and not isinstance(decoder, dict):
        raise _wrong(_CONFIG, _DECODER, decoder, "an object of ids and tokens")
    special_map, more = read_object(path / _MAP), read_object(path / _ADDED)
    names, extra, marked = _named(config, special_map if decoder is None else {})
    if decoder is not None:
        stated = [
            (_id(_CONFIG, _DECODER, key), _token(_CONFIG, f"{_DECODER}.{key:.20}", entry))
            for key, entry in decoder.items()
        ]
    else:
        stated = _legacy(raw, more, marked)
    by_text = {token.content: token for _, token in stated}
    names |= {key: by_text.get(names[key].content, names[key]) for key in SPECIAL_NAMES if key in names}
    stated = sorted(dict(stated).items())
    named = {token.content for token in names.values()}
    known = {token.content for token in raw.get_added_tokens_decoder().values()} | {t.content for _, t in stated}
    tokens = [token for _, token in stated]
    further = {repr(token): token for token in (*names.values(), *extra) if token.content not in known}
    tokens += further.values()
    for token in tokens:
        token.special = token.special or token.content in named
    special = {t.content for t in (*raw.get_added_tokens_decoder().values(), *tokens) if t.special}
    raw.add_tokens(tokens)
    # What was special once is left out of decoded text for good; the flag says so, too.
    raw.add_tokens([_made_special(t) for t in raw.get_added_tokens_decoder().values() if t.content in special])
    warnings = [*_elsewhere(raw, stated), *_ignored(raw, config, special_map, more)]
    return {name: token.content for name, token in names.items()}, warnings


def _named(
    config: Mapping[str, Any], special_map: Mapping[str, Any]
) -> tuple[dict[str, AddedToken], list[AddedToken], set[str]]:
    """Tokens with a name ("eos_token"), in the order in which they are added; those without; and the texts that are
    special where added_tokens.json has them, too."""
    specific = {key: value for key, value in config.items() if _is_specific(key) and isinstance(value, str)}
    values = {key: value for key, value in config.items() if key not in specific}
    if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    if isinstance(values.get("extra_special_tokens"), dict):
        specific |= values.pop("extra_special_tokens")
    for key, value in special_map.items():
        if key == "extra_special_tokens" and isinstance(value, list):
            value = [*_list(_CONFIG, key, values.get(key)), *value]
        values[key] = value
    if isinstance(values.get("extra_special_tokens"), dict):
        specific |= values.pop("extra_special_tokens")
    fields = [*(values.get(key) for key in SPECIAL_NAMES), *_list(_CONFIG, _LISTS[1], values.get(_LISTS[1]))]
    marked = {content_of(value) for value in fields if not _is_saved(value)}
    if "additional_special_tokens" in values and "extra_special_tokens" not in values:
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    specific = {k: v for k, v in values.items() if _is_specific(k) and content_of(v)} | specific
    values |= specific
    names = {key: values[key] for key in (*SPECIAL_NAMES, *specific) if values.get(key) is not None}
    extra = [_special(_CONFIG, "extra_special_tokens", v) for v in _list(_CONFIG, _LISTS[1], values.get(_LISTS[1]))]
    return {key: _special(_CONFIG, key, value) for key, value in names.items()}, extra, marked


def _is_specific(key: str) -> bool:
    """Whether a field names a token that only some models have, as "image_token"."""
    return key.endswith("_token") and key not in SPECIAL_NAMES


def _legacy(raw: RawTokenizer, more: Mapping[str, Any], special: set[str]) -> list[tuple[int, AddedToken]]:
    added = [
        (_id(_ADDED, text, number), AddedToken(text, special=text in special, normalized=text not in special))
        for text, number in more.items()
    ]
    return added + list(raw.get_added_tokens_decoder().items())


def _elsewhere(raw: RawTokenizer, stated: Iterable[tuple[int, AddedToken]]) -> Iterator[str]:
    for number, token in stated:
        if token.content and (actual := raw.token_to_id(token.content)) != number:
            yield f"the files give the token {token.content!r} the id {number}; it has {actual}, as in transformers"


def _ignored(raw: RawTokenizer, config: Mapping[str, Any], special_map: Mapping[str, Any], more: Any) -> Iterator[str]:
    """Tokens that a file names and that are none, since another file or field comes before it."""
    added = {token.content for token in raw.get_added_tokens_decoder().values()}
    for file, values in ((_CONFIG, config), (_MAP, special_map), (_ADDED, {_LISTS[0]: list(more)})):
        texts = {key: [content_of(value)] for key, value in values.items() if key.endswith("_token")}
        for key in _LISTS:
            found = values.get(key)
            entries = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
            texts[key] = [content_of(entry) for entry in entries]
        for text in (text for names in texts.values() for text in names if text and text not in added):
            yield f"the token {text!r} of {file} is not added: transformers ignores it, since other fields come first"


def _list(file: str, key: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _wrong(file, key, value, "a list of tokens")
    return value or []


def _special(file: str, key: str, value: Any) -> AddedToken:
    """A token that a field names: a special one, unless the field says otherwise."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    whole = _is_saved(value) or not isinstance(value, dict)
    return _token(file, key, value if whole else {**value, "special": True})


def _is_saved(value: Any) -> bool:
    """Whether a field has a token as transformers saves it, with all its flags."""
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _token(file: str, key: str, entry: Any) -> AddedToken:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise _wrong(file, key, entry, "a token: a text, or an object with its content")
    flags = {name: entry[name] for name in _FLAGS if entry.get(name) is not None}
    if odd := [name for name, value in flags.items() if not isinstance(value, bool)]:
        raise _wrong(file, f"{key}.{odd[0]}", flags[odd[0]], "true or false")
    return AddedToken(entry["content"], **flags)


def _made_special(token: AddedToken) -> AddedToken:
    """The token with no other flag changed ("normalized" follows "special" where it is left out)."""
    return AddedToken(token.content, **{name: getattr(token, name) for name in _FLAGS} | {"special": True})


def _id(file: str, key: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool | float) else int(value)
    except (TypeError, ValueError):  # also a number of more than 4300 digits
        number = -1
    if not 0 <= number < 1 << 31:
        raise _wrong(file, key, value, f"a token's id: an integer from 0 to {(1 << 31) - 1}")
    return number


def _wrong(file: str, key: str, value: Any, needed: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key} is {value!r:.80}, needs {needed}", fix="correct it, or download it again")
