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

from lmkit_grammar_xgrammar.schema import check, check_anchors

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
                schema = json_of(grammar.source, MAX_DEPTH)
                check(schema)
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
                tag = json_of(grammar.source, MAX_DEPTH)
                self._check_tag(tag)
                return compiler.compile_structural_tag(json.dumps(tag))
        return compiler.compile_grammar(grammar.source)

    def _check_tag(self, tag: Any) -> None:
        """Every schema in it, and that no text of it is a control token, which would never be written."""
        stack = [tag]
        while stack:
            here = stack.pop()
            if isinstance(here, dict):
                if here.get("type") == "json_schema":
                    check(here.get("json_schema"))
                    continue
                if "schema" in here:
                    check(here["schema"])
                stack.extend(v for k, v in here.items() if k != "schema")
            elif isinstance(here, list):
                stack.extend(here)
            elif isinstance(here, str) and any(text and text in here for text in self._control):
                raise GrammarError(f"structural tags with control tokens ({here[:60]!r}) are not supported")


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
