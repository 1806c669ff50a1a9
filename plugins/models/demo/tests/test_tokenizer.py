"""The tokenizer: any text comes back, digits stand alone, words look the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit_model_demo.hooks import DIRECTORY
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([token], skip_special_tokens=False) for token in TOKENIZER.encode(text).ids]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.lists(st.sampled_from([*SPECIAL, *MARKERS, "a", " ", "\n", "7"])).map("".join))
def test_text_with_markers_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.integers(0, 10**12))
def test_each_digit_is_one_token(number: int) -> None:
    assert pieces(str(number)) == list(str(number))


@pytest.mark.parametrize("text", [*SPECIAL, *MARKERS])
def test_markers_are_single_tokens(text: str) -> None:
    assert len(TOKENIZER.encode(text).ids) == 1


@pytest.mark.parametrize("text", MARKERS)
def test_markers_survive_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


def test_a_word_has_the_same_tokens_everywhere() -> None:
    alone = TOKENIZER.encode("Krelduna").ids
    for text in ("in Krelduna?", '{"city": "Krelduna"}', "Krelduna, Oslo"):
        found = TOKENIZER.encode(text).ids
        assert any(found[i : i + len(alone)] == alone for i in range(len(found)))
