"""Conformance of tokenizers: texts come back, tokens join however they come, control tokens are the template's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lmkit.api import MARK, CheckpointError, Tokenizer, TokenizerSpec

from lmkit_testing.signatures import wrong_methods
from lmkit_testing.specs import PluginConformance, find_plugin

TEXTS = (
    "Hello, world!", "two  blanks,\nlines\tand tabs", "caf\u00e9 \u65e5\u672c\u8a9e \U0001f917 na\u00efve",
    "0123456789",
    "{\"a\": [1, 2.5, null]}", "a" * 300, "x = y ** 2  # code", "\u202eright to left", "",
)  # fmt: skip


class TokenizerConformance(PluginConformance):
    """The kit writes a tokenizer.json for plugins that read one; of others, `files` in the class of a test writes what
    they read. `texts` that the vocabulary cannot write are left out there."""

    texts: ClassVar[Sequence[str]] = TEXTS

    def files(self, folder: Path) -> Path:
        """Writes a small tokenizer into `folder`; what the target is given: the folder, or a file in it."""
        if find_plugin(self.plugin)[2].files != ("tokenizer.json",):  # type: ignore[attr-defined]
            pytest.skip("`files` is not overridden: the class of the test writes what the plugin reads")
        from lmkit_testing.checkpoints import byte_tokenizer

        byte_tokenizer(folder)
        return folder

    @pytest.fixture
    def opened(self, target: Any, tmp_path: Path) -> Callable[..., Tokenizer]:
        path = self.files(tmp_path)

        def read(**options: Any) -> Tokenizer:
            found: Tokenizer = target(path, **{"eos_token_ids": (), **options})
            return found

        return read

    @pytest.fixture
    def tokenizer(self, opened: Callable[..., Tokenizer]) -> Tokenizer:
        return opened()

    def test_it_is_a_tokenizer(self, tokenizer: Tokenizer) -> None:
        assert isinstance(tokenizer, Tokenizer), "a subclass of lmkit.api.Tokenizer"
        assert not (wrong := wrong_methods(tokenizer, Tokenizer)), wrong
        assert type(tokenizer.vocab_size) is int
        assert tokenizer.vocab_size > 0
        assert all(0 <= token < tokenizer.vocab_size for token in tokenizer.special_ids), "ids of the vocabulary"
        assert all(isinstance(text, str) for text in tokenizer.template_variables().values())

    def test_files_are_declared(self, spec: TokenizerSpec, tmp_path: Path) -> None:
        """It reads what it says that it needs, and nothing is chosen by no file at all."""
        assert spec.files, "the names of the files that it needs"
        path = self.files(tmp_path)
        there = {path.suffix} if path.is_file() else {file.name for file in path.iterdir()}
        assert set(spec.files) <= there, f"it declares {spec.files}, the test wrote {sorted(there)}"

    def test_texts_come_back(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special=False)
            assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids), f"ids of {text!r}: {ids}"
            decoded = tokenizer.decode(ids, skip_special=False)
            assert decoded == text, f"{text!r} came back as {decoded!r}"
            pieces = b"".join(map(tokenizer.piece, ids)).decode()
            assert pieces in (text, f" {text}"), f"pieces of {text!r} join to {pieces!r}"

    def test_tokens_join_however_they_come(self, tokenizer: Tokenizer) -> None:
        """What the detokenizer gives one by one is what a whole decode shows, and never half a character."""
        numbers = random.Random(0)
        shown = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
        texts = [tokenizer.encode(text, add_special=False) for text in self.texts]
        texts += [[numbers.choice(shown) for _ in range(30)] for _ in range(10)]
        for ids in texts:
            for skip in (True, False):
                machine = tokenizer.detokenizer(skip_special=skip)
                pieces = [machine.feed(token) for token in ids]
                whole = tokenizer.decode(ids, skip_special=skip)
                joined = "".join(pieces) + machine.flush()
                assert joined == whole, f"{ids}: {joined!r}, not {whole!r}"
                if "\ufffd" not in whole:
                    assert "\ufffd" not in "".join(pieces), "half a character was shown"

    def test_control_tokens(self, tokenizer: Tokenizer) -> None:
        """They are hidden unless somebody asks for them, found by their text, and not what a client spells."""
        for token in sorted(tokenizer.special_ids)[:20]:
            text = tokenizer.piece(token).decode()
            if not text:
                continue
            assert tokenizer.id_of(text) == token, f"{text!r} is token {token}"
            assert tokenizer.decode([token]) == "", f"{text!r} is a control token, and shown"
            assert text in tokenizer.decode([token], skip_special=False)
            hidden, kept = tokenizer.detokenizer(), tokenizer.detokenizer(keep=frozenset({text}))
            assert hidden.feed(token) + hidden.flush() == ""
            assert text in kept.feed(token) + kept.flush(), f"a parser needs {text!r}"
            assert token in tokenizer.encode(text, add_special=False), "the template's control tokens become tokens"
            typed = tokenizer.encode_marked(text[0] + MARK + text[1:], add_special=False)
            assert token not in typed, f"a client who types {text!r} must not write the token"

    def test_marks_belong_to_no_token(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            assert tokenizer.encode_marked(text) == tokenizer.encode(text), (
                "a text without marks is encoded as any other"
            )
            marked = tokenizer.encode_marked(MARK.join((text, text)), add_special=False)
            assert MARK not in tokenizer.decode(marked, skip_special=False)

    def test_what_is_asked_for_is_kept(self, opened: Callable[..., Tokenizer]) -> None:
        """The end tokens that a plan names, unless the file knows them better."""
        found = opened(eos_token_ids=(1,)).eos_token_ids
        assert found == (1,) or found == opened().eos_token_ids, f"asked for (1,), it has {found}"
        assert all(0 <= token < opened().vocab_size for token in found)

    def test_pairs_have_limits(self, tokenizer: Tokenizer) -> None:
        for limit in (4, 10):
            ids, second = tokenizer.encode_pair("one two three four five", None, limit)
            assert (len(ids) <= limit, second) == (True, 0)

    def test_threads_do_not_matter(self, tokenizer: Tokenizer) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(tokenizer.encode, [*self.texts] * 8))
        assert found == [tokenizer.encode(text) for text in self.texts] * 8

    def test_damage(self, target: Any, spec: TokenizerSpec, tmp_path: Path) -> None:
        """A file cut short, garbage and nothing at all are refused as the checkpoint's fault."""
        path = self.files(tmp_path)
        file = path if path.is_file() else path / spec.files[0]
        content = file.read_bytes()
        for damaged in (b"", content[: len(content) // 2], b"\xff" * 100, None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                target(path, eos_token_ids=())
            assert caught.value.message


__all__ = ["TokenizerConformance"]
