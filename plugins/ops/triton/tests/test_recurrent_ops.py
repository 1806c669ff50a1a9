"""Recurrent operators in the laboratory: the reference's values and states, in bounds, no races, every output written,
and no more bytes than must move."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_decoders.recurrent import TorchRecurrentOps
from lmkit_op_triton.recurrent import TritonRecurrentOps
from lmkit_testing import PluginConformance
from lmkit_testing.recurrent import CLOSE, NAMES, batch_of, operands
from lmkit_testing.triton_lab import Seen, lab

OPS, REFERENCE = TritonRecurrentOps(), TorchRecurrentOps()
DTYPES = st.sampled_from(list(CLOSE))
PROMPTS = st.lists(st.integers(2, 40), max_size=2)


class TestTriton(PluginConformance):
    plugin = "op:recurrent_triton"


def compared(
    name: str, decode: int, prompts: list[int], sizes: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> Seen:
    rows = batch_of(decode, prompts)
    given = operands(name, int(rows.query_start[-1]), decode + len(prompts) + 1, sizes, dtype, seed)
    theirs = [*given[:-1], given[-1].clone()]
    wanted = getattr(REFERENCE, name)(*theirs, rows)
    with lab(unwritten=("out",), shuffle=seed) as seen:
        found = getattr(OPS, name)(*given, rows)
    assert found.dtype == wanted.dtype
    for mine, reference in ((found.float(), wanted.float()), (given[-1].float(), theirs[-1].float())):
        limit = CLOSE[found.dtype] * max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(mine, reference, rtol=0, atol=limit)
    return seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_values_and_states_are_the_references(name: str, data: st.DataObject) -> None:
    prompts = data.draw(PROMPTS)
    decode = data.draw(st.integers(0 if prompts else 1, 3))
    sizes = data.draw(st.sampled_from([(16, 16, 1), (5, 6, 2), (40, 33, 1)]))
    compared(name, decode, prompts, sizes, data.draw(DTYPES), data.draw(st.integers(0, 99)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_where_a_prompt_is_cut_does_not_matter(name: str) -> None:
    given = operands(name, 37, 2, (24, 16, 1), torch.float32)
    whole, cut = given[-1].clone(), given[-1].clone()
    with lab():
        wanted = getattr(OPS, name)(*given[:-1], whole, batch_of(0, [37]))
        parts, done = [], 0
        for length in (1, 17, 2, 17):
            rows = batch_of(1, []) if length == 1 else batch_of(0, [length])
            piece = [x[done : done + length] if torch.is_tensor(x) and len(x) == 37 else x for x in given[:-1]]
            parts.append(getattr(OPS, name)(*piece, cut, rows))
            done += length
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("prompts", [[], [48]], ids=["decode", "prompt"])
def test_bytes_are_those_that_must_move(name: str, prompts: list[int]) -> None:
    """Sizes of real models: a state is read and written once, all else is read or written once."""
    sizes = {"selective_scan": (128, 16, 1), "ssd": (64, 128, 1), "gated_delta_rule": (128, 128, 1)}[name]
    decode = 0 if prompts else 2
    seen = compared(name, decode, prompts, sizes, torch.float32)
    rows, tokens = batch_of(decode, prompts), decode + sum(prompts)
    given = operands(name, tokens, decode + len(prompts) + 1, sizes, torch.float32)
    state = 2 * len(rows.slots) * given[-1][0].nbytes
    out = given[2 if name == "gated_delta_rule" else 0].nbytes
    assert seen.moved <= 1.05 * (state + out + sum(x.nbytes for x in given[:-1]))


def test_channels_that_decay_on_their_own_are_the_references() -> None:
    q, k, v, _, beta, state = operands("gated_delta_rule", 3, 4, (8, 8, 1), torch.float32)
    decay, rows, other = -torch.rand(3, 2, 8), batch_of(3, []), state.clone()
    assert torch.equal(
        OPS.gated_delta_rule(q, k, v, decay, beta, state, rows),
        REFERENCE.gated_delta_rule(q, k, v, decay, beta, other, rows),
    )
