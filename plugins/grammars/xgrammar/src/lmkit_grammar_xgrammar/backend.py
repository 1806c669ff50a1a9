"""The grammar backend over xgrammar: pushdown automata with masks prepared per state of the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar
from lmkit.api import Grammar, GrammarError, Vocabulary
from lmkit_structured_output_masks.sources import choices_of, json_of

from lmkit_grammar_xgrammar.schema import check_anchors, enforced

MAX_DEPTH = 128
_SOURCE = re.compile(r"(\[[\d:.]+\] )?(/[\w.+-]+)+\.\w+:\d+(:\d+)?:? *")  # where in the library something was raised


class XGrammar:
    """Implements lmkit.api.GrammarBackend."""

    kinds = frozenset({"json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ends = list(vocabulary.eos_token_ids)
        hidden = vocabulary.special_ids.difference(self._ends)
        # control tokens as empty pieces: the library keeps those out of every text
        pieces = [b"" if i in hidden else piece for i, piece in enumerate(vocabulary.pieces)]
        self._control = [vocabulary.pieces[i].decode(errors="replace") for i in vocabulary.special_ids]
        self._tokens = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=self._ends or None
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> bytes:
        try:
            return self._compile(grammar).serialize_json().encode()
        except GrammarError:
            raise
        except (RuntimeError, ValueError, TypeError) as e:  # the library has no error type of its own
            raise GrammarError(_SOURCE.sub("", str(e)).strip()[:600] or type(e).__name__) from None

    def load(self, compiled: bytes) -> LoadedGrammar:
        return LoadedGrammar(xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._tokens), self._ends)

    def _compile(self, grammar: Grammar) -> Any:
        compiler = self._compiler
        match grammar.kind:
            case "json_schema":
                schema = enforced(json_of(grammar.source, MAX_DEPTH))
                return compiler.compile_json_schema(json.dumps(schema), any_whitespace=True, strict_mode=False,
                                                    max_whitespace_cnt=32)  # fmt: skip
            case "json_object":
                return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True, strict_mode=False,
                                                    max_whitespace_cnt=32)  # fmt: skip
            case "regex":
                if "(?" in grammar.source:
                    raise GrammarError("groups that begin with (? are not supported")
                check_anchors(grammar.source)
                return compiler.compile_regex(grammar.source)
            case "choice":
                choices = " | ".join(map(json.dumps, choices_of(grammar.source)))
                return compiler.compile_grammar(f"root ::= {choices}")
            case "structural_tag":
                tag = self._checked_tag(json_of(grammar.source, MAX_DEPTH))
                return compiler.compile_structural_tag(json.dumps(tag))
        return compiler.compile_grammar(grammar.source)

    def _checked_tag(self, tag: Any) -> Any:
        """The tag with every schema in it as it is enforced. Raises GrammarError, also for a text of it that is a
        control token, which would never be written.
        """
        if isinstance(tag, dict):
            is_schema = tag.get("type") == "json_schema"
            return {
                key: enforced(part)
                if key == "schema" or (is_schema and key == "json_schema")
                else self._checked_tag(part)
                for key, part in tag.items()
            }
        if isinstance(tag, list):
            return [self._checked_tag(part) for part in tag]
        if isinstance(tag, str) and any(text and text in tag for text in self._control):
            raise GrammarError(f"structural tags with control tokens ({tag[:60]!r}) are not supported")
        return tag


class LoadedGrammar:
    """Implements lmkit.api.CompiledGrammar."""

    def __init__(self, compiled: Any, ends: Sequence[int]) -> None:
        self._compiled, self._ends = compiled, list(ends)
        self.nbytes = (1 << 14) + compiled.memory_size_bytes

    def matcher(self) -> XMatcher:
        return XMatcher(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=self._ends or None))


class XMatcher:
    """Implements lmkit.api.Matcher."""

    exhausted = False  # a mask without tokens says it too

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, ids: Sequence[int]) -> int:
        for i, token in enumerate(ids):
            if not self._matcher.accept_token(token):
                return i
        return len(ids)

    def rollback(self, n: int) -> None:
        if n:
            self._matcher.rollback(n)

    def fill(self, row: np.ndarray) -> None:
        # False says that everything is allowed, and then nothing was written
        if not self._matcher.fill_next_token_bitmask(torch.from_numpy(row).unsqueeze(0)):
            row[:] = -1

    def forced(self) -> Sequence[int]:
        return ()  # the library knows text that must follow, which other tokens may write too

    @property
    def complete(self) -> bool:
        return self._matcher.is_completed()
