"""Grammars without a library: for tests of the engine around them, and the conformance kit of grammar backends.

from lmkit_testing import GrammarConformance

class TestMine(GrammarConformance):
    plugin = "grammar:mine"
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from lmkit.api import CompiledGrammar, Grammar, GrammarBackend, GrammarError, Matcher, Vocabulary
from lmkit.plugins import load_target
from lmkit_structured_output_masks.compile_process import try_out as try_out
from lmkit_structured_output_masks.compiler import Compilation, Compiler, Wanted

from lmkit_testing.specs import PluginConformance, find_plugin


def byte_vocabulary(*control: str, extra: Sequence[bytes] = ()) -> Vocabulary:
    """One token per byte, then `extra` pieces, then control tokens, of which the first ends an output."""
    pieces = [bytes([i]) for i in range(256)] + list(extra) + [c.encode() for c in control]
    first = 256 + len(extra)
    return Vocabulary(pieces, frozenset(range(first, len(pieces))), (first,) if control else (), len(pieces))


class Stairs:
    """A grammar over ids: token n of the output is n modulo `period`, and a whole number of periods is complete."""

    nbytes = 100

    def __init__(self, vocab_size: int, period: int) -> None:
        self.vocab_size, self.period = vocab_size, period

    def matcher(self) -> StairsMatcher:
        return StairsMatcher(self)


class StairsMatcher:
    """Implements Matcher."""

    exhausted = False

    def __init__(self, grammar: Stairs) -> None:
        self._grammar = grammar
        self.num = 0

    def accept(self, ids: Sequence[int]) -> int:
        for i, token in enumerate(ids):
            if token % self._grammar.period != self.num % self._grammar.period:
                return i
            self.num += 1
        return len(ids)

    def rollback(self, n: int) -> None:
        assert 0 <= n <= self.num, "takes back more than there was"
        self.num -= n

    def fill(self, row: np.ndarray) -> None:
        period = self._grammar.period
        bits = np.zeros(32 * len(row), np.uint8)
        bits[self.num % period : self._grammar.vocab_size : period] = 1
        row[:] = np.packbits(bits, bitorder="little").view("<i4")

    def forced(self) -> Sequence[int]:
        """Ids from the last step of the stairs: in a vocabulary of less than two periods it is one id."""
        period, num = self._grammar.period, self.num % self._grammar.period
        return range(num, period) if num and num + period >= self._grammar.vocab_size else ()

    @property
    def complete(self) -> bool:
        return self.num % self._grammar.period == 0


class StairsBackend:
    """A grammar backend that compiles Grammar("regex", "3") to Stairs of period 3."""

    kinds = frozenset({"regex"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size

    def compile(self, grammar: Grammar) -> bytes:
        if not grammar.source.isdigit():
            raise GrammarError("not a number")
        return grammar.source.encode()

    def load(self, compiled: bytes) -> CompiledGrammar:
        return Stairs(self._size, int(compiled))


class StairsCompiler(Compiler):
    """Compiles Grammar("regex", "3") to Stairs of period 3, when told to."""

    def __init__(self, vocabulary: Vocabulary, at_once: bool = True) -> None:
        super().__init__([], lambda: vocabulary)
        self._at_once = at_once
        self.waiting: list[Compilation] = []

    def submit(self, wanted: Wanted) -> Compilation:
        compilation = Compilation(wanted)
        self.waiting.append(compilation)
        if self._at_once:
            self.finish()
        return compilation

    def finish(self) -> None:
        for compilation in self.waiting:
            try:
                self._prepare(compilation)
                if compilation.wanted.grammar is not None:
                    compilation.compiled = self._stairs(compilation.wanted.grammar)
            except GrammarError as error:
                compilation.error = error.info()
            compilation.done = True
        self.waiting = []

    def _stairs(self, grammar: Grammar) -> CompiledGrammar:
        if not grammar.source.isdigit():
            raise GrammarError("not a number")
        return Stairs(self._open_vocabulary().size, int(grammar.source))


# ------------------------------------------------------------------------------------------------- conformance

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "integer"},
        "of": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}  # fmt: skip

# kind -> (source, texts that are sentences, texts that are not)
SAMPLES: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "json_schema": (
        json.dumps(_SCHEMA),
        ['{"name": "x", "n": 1}', '{"name":"\u00e9\\"","n":-20,"of":["a","b"]}'],
        [
            '{"name": "x"}',
            '{"name": 1, "n": 1}',
            '{"name": "x", "n": 1, "of": ["c"]}',
            "[]",
            "",
            '{"name": "x", "n": 1.5}',
        ],
    ),
    "json_object": ("", ['{"a": [1, null, {"b": "c"}]}', "{}"], ["[1]", '"a"', '{"a" 1}', "{"]),
    "regex": (r"[a-c]{2,3}-(\d+|x)", ["ab-1", "abc-x", "cc-123"], ["a-1", "abcc-1", "ab-", "AB-1", "ab-1 "]),
    "choice": ('["red", "dark red", "\u00e9\\"/"]', ["red", "dark red", '\u00e9"/'], ["dark", "re", "blue", ""]),
    "ebnf": ('root ::= "x" digit+ ("." digit)?\ndigit ::= [0-9]', ["x1", "x12.3"], ["x", "x1.", "1"]),
    "lark": ('start: "x" DIGIT+\nDIGIT: /[0-9]/', ["x1", "x12"], ["x", "y1"]),
}
GARBAGE: Mapping[str, Sequence[str]] = {
    "json_schema": ["{", "[]", '{"type": "strin"}', '{"$ref": "#/$defs/none"}', '{"$ref": "http://localhost/x.json"}',
                    '{"minLength": "3"}', '{"type": "string", "pattern": "("}', "[" * 300 + "]" * 300],
    "regex": ["(", "a{2,1}", "[z-a]"],
    "choice": ["", "{}", "[]", "[1]", '[""]'],
    "ebnf": ["root ::= missing", "::="],
    "lark": ["start: missing", "start"],
    "structural_tag": ["{}", "[]", '{"type": "structural_tag"}',
                       '{"type": "structural_tag", "format": {"type": "none"}}'],
}  # fmt: skip


class GrammarConformance(PluginConformance):
    """For kind grammar."""

    def backend(self, vocabulary: Vocabulary) -> GrammarBackend:
        return load_target(find_plugin(self.plugin)[2].target)(vocabulary)

    @pytest.fixture
    def bytewise(self) -> GrammarBackend:
        return self.backend(byte_vocabulary("<|end|>", "<|x|>"))

    def test_kinds_are_those_of_the_spec(self, bytewise: GrammarBackend) -> None:
        assert bytewise.kinds == find_plugin(self.plugin)[2].kinds  # type: ignore[attr-defined]

    def _each(self, backend: GrammarBackend) -> list[tuple[str, CompiledGrammar, Sequence[str], Sequence[str]]]:
        return [
            (kind, backend.load(backend.compile(Grammar(kind, source))), good, bad)  # type: ignore[arg-type]
            for kind, (source, good, bad) in SAMPLES.items()
            if kind in backend.kinds
        ]

    def test_sentences_are_generated_token_by_token(self, bytewise: GrammarBackend) -> None:
        for kind, compiled, good, bad in self._each(bytewise):
            for text in good:
                assert generates(compiled.matcher(), text.encode()), f"{kind}: {text!r}"
            for text in bad:
                assert not generates(compiled.matcher(), text.encode()), f"{kind}: {text!r}"

    def test_masks_say_what_is_accepted(self, bytewise: GrammarBackend) -> None:
        for kind, compiled, good, _ in self._each(bytewise):
            matcher = compiled.matcher()
            for byte in good[0].encode():
                allowed = allowed_ids(matcher, 258)
                for token in range(256):
                    taken = matcher.accept([token])
                    assert taken == (token in allowed), f"{kind}: {bytes([token])!r} before {bytes([byte])!r}"
                    matcher.rollback(taken)
                assert matcher.accept([byte]) == 1

    def test_rollback_is_as_if_it_had_not_been(self, bytewise: GrammarBackend) -> None:
        source = random.Random(0)
        for kind, compiled, good, _ in self._each(bytewise):
            text = list(good[0].encode())
            matcher, at = compiled.matcher(), 0
            for _ in range(60):
                n = source.randint(1, 5)
                if source.random() < 0.5:
                    assert matcher.accept(text[at : at + n]) == len(text[at : at + n])
                    at = min(len(text), at + n)
                else:
                    n = min(n, at)
                    matcher.rollback(n)
                    at -= n
                straight = compiled.matcher()
                straight.accept(text[:at])
                assert allowed_ids(matcher, 258) == allowed_ids(straight, 258), f"{kind} at {at}"
                assert matcher.complete == straight.complete

    def test_forced_tokens_are_all_that_the_masks_allow(self, bytewise: GrammarBackend) -> None:
        for kind, compiled, good, _ in self._each(bytewise):
            matcher, text = compiled.matcher(), list(good[0].encode())
            for at, token in enumerate(text):
                forced = list(matcher.forced())
                for i, only in enumerate(forced):
                    assert not matcher.complete, f"{kind} at {at}: it may end"
                    assert allowed_ids(matcher, 258) == {only}, f"{kind} at {at}, {i} of {forced}"
                    assert matcher.accept([only]) == 1
                matcher.rollback(len(forced))
                assert matcher.accept([token]) == 1

    def test_accept_stops_at_the_first_that_does_not_fit(self, bytewise: GrammarBackend) -> None:
        for kind, compiled, good, _ in self._each(bytewise):
            matcher, text = compiled.matcher(), list(good[0].encode())
            assert matcher.accept([*text[:2], 0, *text[2:]]) == 2, kind
            assert matcher.accept(text[2:]) == len(text) - 2, f"{kind}: the state must have stayed"
            assert matcher.complete

    def test_matchers_are_independent(self, bytewise: GrammarBackend) -> None:
        for _, compiled, good, _ in self._each(bytewise):
            first, second = compiled.matcher(), compiled.matcher()
            first.accept(list(good[0].encode()))
            assert generates(second, good[-1].encode())

    def test_garbage_is_refused_with_a_reason(self, bytewise: GrammarBackend) -> None:
        for kind in bytewise.kinds & set(GARBAGE):
            for source in GARBAGE[kind]:
                with pytest.raises(GrammarError) as caught:
                    bytewise.compile(Grammar(kind, source))  # type: ignore[arg-type]
                assert caught.value.message, f"{kind}: {source}"

    def test_control_tokens_are_no_text(self, bytewise: GrammarBackend) -> None:
        for kind, compiled, _, _ in self._each(bytewise):
            assert not allowed_ids(compiled.matcher(), 258) & {257}, kind

    def test_columns_without_a_token_are_never_allowed(self) -> None:
        """Logits have more columns than the vocabulary has tokens."""
        vocab = byte_vocabulary("<|end|>")
        vocab = dataclasses.replace(vocab, size=vocab.size + 1000)
        for _, compiled, good, _ in self._each(self.backend(vocab)):
            assert max(allowed_ids(compiled.matcher(), vocab.size)) < 256
            assert generates(compiled.matcher(), list(good[0].encode()), vocab.size)

    def test_long_tokens_span_parts(self) -> None:
        vocabulary = byte_vocabulary("<|end|>", extra=[b'{"', b'name":', b'": "x", "n": 1}', b'"}'])
        backend = self.backend(vocabulary)
        if "json_schema" in backend.kinds:
            matcher = backend.load(backend.compile(Grammar("json_schema", SAMPLES["json_schema"][0]))).matcher()
            assert matcher.accept([256, *b"name", 258]) == 6
            assert matcher.complete


def allowed_ids(matcher: Matcher, size: int, ends: Sequence[int] = (256,)) -> set[int]:
    """What the mask allows, ends aside."""
    if matcher.exhausted:
        return set()
    row = np.zeros(-(-size // 32), np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) - set(ends)


def generates(matcher: Matcher, ids: Sequence[int], size: int = 258) -> bool:
    """Whether the masks let a sampler write `ids` and end."""
    for token in ids:
        if token not in allowed_ids(matcher, size) or matcher.accept([token]) != 1:
            return False
    return matcher.complete
