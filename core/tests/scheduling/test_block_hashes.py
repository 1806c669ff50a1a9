"""What enters the name of a block: everything that changes its KV, and nothing else."""

from __future__ import annotations

from array import array
from hashlib import sha256
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import MediaItem
from lmkit.scheduling.hashes import block_hash, extend_hashes, media_bytes, root_hash
from lmkit_testing.stepper import make_request


def test_each_part_of_the_root_counts():
    parts = [
        ("model", "bfloat16", None, None),
        ("model2", "bfloat16", None, None),
        ("model", "float8_e4m3fn", None, None),
        ("model", "bfloat16", "adapter", None),
        ("model", "bfloat16", None, "adapter"),
        ("model", "bfloat16", "", None),
        ("model", "bfloat16", None, ""),
        ("modelb", "float16", None, None),
        ("model", "bfloat16", "ab", "c"),
        ("model", "bfloat16", "a", "bc"),
    ]
    for a, b in combinations(parts, 2):
        assert root_hash(*a) != root_hash(*b)
    assert root_hash(*parts[3]) == root_hash(*parts[3])


def test_a_block_is_named_by_its_parent_and_tokens():
    assert block_hash(b"p" * 32, [1, 2]) == sha256(b"p" * 32 + array("I", [1, 2]).tobytes()).digest()
    assert block_hash(b"p" * 32, [1, 2]) != block_hash(b"q" * 32, [1, 2])
    assert block_hash(b"p" * 32, [1, 2]) != block_hash(b"p" * 32, [2, 1])


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30), st.integers(1, 5))
def test_names_are_equal_exactly_where_prefixes_are(a, b, size):
    first, second = make_request("a", [9, *a]), make_request("b", [9, *b])
    num_whole = min(len(first.tokens), len(second.tokens)) // size
    pairs = zip(extend_hashes(first, num_whole, size), extend_hashes(second, num_whole, size), strict=True)
    for i, (x, y) in enumerate(pairs):
        end = (i + 1) * size
        assert (x == y) == (first.tokens[:end] == second.tokens[:end])


def test_salt_and_adapter_separate_all_blocks():
    requests = [make_request("r", range(8), adapter=a, salt=s) for a in (None, "x") for s in (None, "y")]
    names = [digest for r in requests for digest in extend_hashes(r, 2, 4)]
    assert len(set(names)) == 8


def test_names_made_step_by_step_are_the_same():
    whole, steps = make_request("a", range(12)), make_request("b", range(12))
    for n in (1, 1, 2, 3):
        extend_hashes(steps, n, 4)
    assert steps.block_hashes == extend_hashes(whole, 3, 4)
    assert len(extend_hashes(whole, 1, 4)) == 3, "names that exist are kept"


def test_media_enter_the_blocks_they_touch():
    item = MediaItem("image", b"h1", start=2, num_tokens=4)  # positions 2 .. 5
    assert media_bytes([item], 0, 2) == b""
    assert media_bytes([item], 6, 8) == b""
    inside = {media_bytes([item], start, start + 2) for start in (2, 4)}
    assert len(inside) == 2, "the part of the image counts"
    assert b"" not in inside
    other = MediaItem("image", b"h2", start=2, num_tokens=4)
    assert media_bytes([item], 2, 4) != media_bytes([other], 2, 4)


def test_equal_tokens_with_other_media_share_only_what_is_before():
    plain, pictured = make_request("a", [7] * 12), make_request("b", [7] * 12)
    pictured.media = (MediaItem("image", b"picture", 5, 3),)
    a, b = extend_hashes(plain, 3, 4), extend_hashes(pictured, 3, 4)
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert a[2] != b[2], "everything after an image saw it"
