"""Stop strings: found at every border, nothing leaked, nothing lost (T1, T3)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.text.stops import Stops
from lmkit_testing.clock import least


def run(strings: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    stops = Stops(strings, include=include)
    out = ""
    for piece in pieces:
        text, found = stops.feed(piece)
        out += text
        if found is not None:
            return out, found
    return out + stops.flush(), None


ALPHABET = st.text("ab\n", max_size=12)


@given(st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(ALPHABET, max_size=8))
def test_any_split_gives_the_same(strings: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = run(strings, [text])
    assert run(strings, pieces) == whole
    assert run(strings, list(text)) == whole
    out, found = whole
    if found is None:
        assert out == text
        assert not any(s in text for s in strings)
    else:
        assert text.startswith(out + found)
        assert not any(s in out for s in strings)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(ALPHABET, max_size=8))
def test_no_beginning_of_a_match_is_emitted_early(strings: list[str], pieces: list[str]) -> None:
    """At any moment, what was emitted is a prefix of the final answer."""
    final, _ = run(strings, pieces)
    stops, out = Stops(strings), ""
    for piece in pieces:
        text, found = stops.feed(piece)
        out += text
        assert final.startswith(out)
        if found:
            break


def test_the_match_that_ends_first_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["c", "bc"], ["abc"]) == ("a", "bc")


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), ALPHABET, st.data())
def test_what_ends_in_the_exempt_part_does_not_count(strings: list[str], text: str, data: st.DataObject) -> None:
    border = data.draw(st.integers(0, len(text)))
    ends = [at + len(s) for s in strings for at in range(len(text)) if text.startswith(s, at) and at + len(s) > border]
    for pieces in ([text], list(text)):
        stops, out, found, fed = Stops(strings), "", None, 0
        for piece in pieces:
            shown, found = stops.feed(piece, max(0, min(len(piece), border - fed)))
            out, fed = out + shown, fed + len(piece)
            if found is not None:
                break
        assert (found is None) == (not ends)
        assert out + (found or stops.flush()) == (text[: min(ends)] if ends else text)


def test_include() -> None:
    assert run(["END"], ["x E", "ND y"], include=True) == ("x END", "END")


@pytest.mark.parametrize("unit", ["a", "ab", "aab", "\n"])
def test_linear(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))

    def seconds() -> float:
        begin = time.process_time()
        assert run(["a" * 1023 + "c", "ab" * 400 + "c", "\n" * 1000 + "x"], [text]) == (text, None)
        assert run(["aaab" * 250], [text[i : i + 4] for i in range(0, 40_000, 4)])[1] is None
        return time.process_time() - begin

    assert least(seconds, 2) < 2
