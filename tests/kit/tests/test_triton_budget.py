"""Which case is compiled for which device, and what of it is held against which device's limits."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

from lmkit_testing.triton_budget import FAMILIES, SHARED, Case, Usage, asked, over


def case(kernel: str, **how) -> Case:
    return Case(SimpleNamespace(__name__=kernel), {}, {}, **how)


CASES = [
    *(case("a", note=str(i)) for i in range(7)),
    *(case("b", archs=("sm_80", "sm_90", "gfx1100")) for _ in range(2)),
    case("c"),
    case("c", everywhere=True),
]


def test_families_are_all_devices() -> None:
    assert sorted(arch for family in FAMILIES for arch in family) == sorted(SHARED)


def test_every_kernel_for_every_device_and_every_case_for_every_family() -> None:
    found = defaultdict(set)
    for number, (each, arch, like) in enumerate(asked(CASES)):
        found[id(each)].add(arch)
        for other in like:
            assert other in each.archs, number
            found[id(each), "stood for"].add(other)
    for each in CASES:
        compiled, rest = found[id(each)], found[id(each), "stood for"]
        assert compiled | rest == set(each.archs)
        assert not compiled & rest
        assert all(compiled & set(family) for family in FAMILIES if set(family) & set(each.archs))
    assert found[id(CASES[0])] == found[id(CASES[9])] == found[id(CASES[10])] == set(SHARED)
    assert set.union(*(found[id(each)] for each in CASES[1:4])) == set(SHARED), "turn about"


def test_all_are_asked_for() -> None:
    assert [(id(each), arch) for each, arch, _ in asked(CASES, every=True)] == [
        (id(each), arch) for each in CASES for family in FAMILIES for arch in family if arch in each.archs
    ]
    assert {(arch, tuple(like)) for _, arch, like in asked(CASES, ["gfx950"])} == {("gfx950", ())}


def test_limits_of_devices_that_it_stands_for() -> None:
    """What sm_80 has room for is too much for sm_89: shared memory of a block, and threads of a multiprocessor."""
    large = Usage(32, 0, 120_000, 4, frozenset())
    assert over(case("a"), "sm_80", large) == []
    (found,) = over(case("a"), "sm_80", large, ["sm_120"])[:1]
    assert "120000 bytes of shared memory, a block of sm_120 has 101376" in found
    many = Usage(32, 0, 0, 4, frozenset())
    assert over(case("a", blocks=16), "sm_80", many) == []
    assert over(case("a", blocks=16), "sm_80", many, ["sm_89"]) == [
        "12 blocks per multiprocessor of sm_89, 16 are planned"
    ]
