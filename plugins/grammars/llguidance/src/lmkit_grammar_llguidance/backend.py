"""The grammar backend over llguidance: a lexer of derivatives and an Earley parser, masks in microseconds.

What the library enforces it enforces to the letter (its JSON schemas are conjunctions of all keywords), and it refuses
keywords that it does not know how to enforce. This module adds the refusals it lacks: old keywords, options smuggled in
through a schema, nesting that is too deep, and grammars without any sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import llguidance
import numpy as np
from lmkit.api import Grammar, GrammarError, Vocabulary, checked_schema
from lmkit_structured_output_masks.sources import choices_of, json_of

from lmkit_grammar_llguidance.lark import MAX_DEPTH as MAX_TAG_DEPTH
from lmkit_grammar_llguidance.lark import OPTIONS, TagGrammar
from lmkit_grammar_llguidance.schema import rewrite

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_DEPTH = 256  # of a schema
_CONTROL = re.compile(r"(?<!\\)(\\\\)*\\u00[01]")  # as json.dumps writes them; OPTIONS leaves no way to
# What a grammar takes is measured when it is tried out; states come while it is used.
LIMITS = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


class LlGuidance:
    """Implements lmkit.api.GrammarBackend."""

    kinds = frozenset({"json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        ends = list(vocabulary.eos_token_ids) or [0]  # the engine decides about ends; the library wants one
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary, ends[0])), n_vocab=vocabulary.size, eos_token=ends
        )

    def compile(self, grammar: Grammar) -> bytes:
        source = self._source(grammar)
        matcher = self._matcher(source)
        if not any(matcher.compute_bitmask()) and not matcher.is_accepting():
            raise GrammarError("nothing satisfies it")
        _check(matcher)
        return source.encode()

    def load(self, compiled: bytes) -> LoadedGrammar:
        return LoadedGrammar(self._matcher(compiled.decode()), len(compiled))

    def _matcher(self, source: str) -> LLMatcher:
        """Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        _check(matcher)
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError("; ".join(warnings)[:1000])
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """The grammar in the library's own form. Raises GrammarError."""
        match grammar.kind:
            case "json_schema":
                schema = json_of(grammar.source, MAX_DEPTH)
                schema = _enforceable(schema)
                return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast(Any, OPTIONS))
            case "json_object":
                return llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=cast(Any, OPTIONS))
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(grammar.source)
            case "choice":
                choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in choices_of(grammar.source))
                return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
            case "ebnf":
                return llguidance.LLMatcher.grammar_from_lark(_from_ebnf(grammar.source))
            case "structural_tag":
                tag = json_of(grammar.source, MAX_DEPTH + 2 * MAX_TAG_DEPTH)
                lark = TagGrammar(self._vocabulary, _enforceable_part).build(tag)
                return llguidance.LLMatcher.grammar_from_lark(lark)
        _check_lark(grammar.source)
        return llguidance.LLMatcher.grammar_from_lark(grammar.source)


class LoadedGrammar:
    """Implements lmkit.api.CompiledGrammar. Matchers are copies of one that has not moved."""

    def __init__(self, fresh: LLMatcher, size: int) -> None:
        self._fresh = fresh
        self.nbytes = (1 << 17) + 32 * size

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self._fresh.deep_copy())


class GuidanceMatcher:
    """Implements lmkit.api.Matcher."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, ids: Sequence[int]) -> int:
        accepted = self._matcher.try_consume_tokens(list(ids))
        if accepted < len(ids):
            _check(self._matcher)
        return accepted

    def rollback(self, n: int) -> None:
        if not self._matcher.rollback(n):
            _check(self._matcher)
            raise AssertionError("rolls back at most what was accepted")

    def fill(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        _check(self._matcher)

    def forced(self) -> Sequence[int]:
        found = self._matcher.compute_ff_tokens()  # the library's masks insist on just these tokens
        _check(self._matcher)
        return found

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def exhausted(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


class _Tokens:
    """The vocabulary as llguidance's TokenizerWrapper wants it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id = end
        # a mask is as wide as this list: logits often have more columns than there are tokens
        self.tokens = [*vocabulary.pieces, *[b""] * (vocabulary.size - len(vocabulary.pieces))]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(vocabulary.pieces):
            if piece and token not in vocabulary.special_ids:
                self._ids.setdefault(piece, token)
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """The tokens of forced text, as the model would write them."""
        if self._encode is not None:
            ids = self._encode(data.decode(errors="replace"))
            if b"".join(self.tokens[i] for i in ids) == data:
                return ids
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((e for e in ends if data[at:e] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def _refuse(schema: object) -> None:
    """Refuses what llguidance would pass over. Raises GrammarError."""
    if schema is False:
        raise GrammarError("nothing satisfies the schema false")
    if _CONTROL.search(json.dumps(schema)):
        raise GrammarError("control characters other than \\b \\f \\n \\r \\t cannot be written")
    if '"x-guidance"' in json.dumps(schema):
        raise GrammarError("x-guidance is not a keyword of JSON schema")


def _enforceable(schema: Any) -> dict[str, Any]:
    """In the words that llguidance enforces. Raises GrammarError."""
    schema = checked_schema(schema)
    _refuse(schema)
    return rewrite(schema)


def _enforceable_part(schema: object) -> dict[str, Any]:
    """What can be enforced of a structural tag; the rest is refused, shortly. Raises GrammarError."""
    made = _enforceable(schema)
    source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(made), overrides=cast(Any, OPTIONS))
    if problem := llguidance.LLMatcher.validate_grammar(source, limits=LIMITS):
        raise GrammarError(_told(problem))
    return made


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_told(matcher.get_error()))


def _told(problem: str) -> str:
    """One line: the library goes on with the grammar as text."""
    message = problem.replace("<non-verbose/>", "").strip().split("\n   1 | ")[0]
    message = message.split("\n  while processing")[0]  # a place in the schema as it was rewritten
    return "nothing satisfies it" if message.startswith("NoExtension") else message[:600]


def _from_ebnf(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as e:  # the converter has no error type of its own
        raise GrammarError(f"the EBNF rules cannot be read: {str(e)[:300]}") from None


def _check_lark(source: str) -> None:
    if "x-guidance" in source or "%llguidance" in source:
        raise GrammarError("options of llguidance are not accepted")
