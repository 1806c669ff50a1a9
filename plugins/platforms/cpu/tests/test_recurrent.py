"""Native operators of recurrent layers against torch's, on every instruction set of the machine."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import PluginError
from lmkit_decoders.recurrent import TorchRecurrentOps
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.recurrent import NativeRecurrentOps
from lmkit_testing.recurrent import CLOSE, NAMES, batch_of, operands

native = load()
if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


REFERENCE = TorchRecurrentOps()
ISAS = [name for name in native.isas if name != "avx512_vnni"]  # here that is avx512
SIZES = [(16, 16, 1), (5, 6, 2), (40, 33, 1), (64, 128, 2)]


@pytest.fixture(scope="module", params=ISAS)
def ops(request: pytest.FixtureRequest) -> Iterator[NativeRecurrentOps]:
    native.set_isa(request.param)
    yield NativeRecurrentOps()
    native.set_isa("auto")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_values_and_states_are_the_references(ops: NativeRecurrentOps, name: str, data: st.DataObject) -> None:
    prompts = data.draw(st.lists(st.integers(2, 90), max_size=2))
    decode = data.draw(st.integers(0 if prompts else 1, 3))
    dtype = data.draw(st.sampled_from(list(CLOSE)))
    rows = batch_of(decode, prompts)
    found = operands(
        name, int(rows.query_start[-1]), decode + len(prompts) + 1, data.draw(st.sampled_from(SIZES)), dtype,
        data.draw(st.integers(0, 99)),
    )  # fmt: skip
    if data.draw(st.booleans()):
        found[-1] = found[-1].float()
    theirs = [*found[:-1], found[-1].clone()]
    wanted, got = getattr(REFERENCE, name)(*theirs, rows), getattr(ops, name)(*found, rows)
    assert got.dtype == wanted.dtype
    for mine, reference in ((got.float(), wanted.float()), (found[-1].float(), theirs[-1].float())):
        limit = CLOSE[got.dtype] * max(1.0, float(reference.abs().max()))
        torch.testing.assert_close(mine, reference, rtol=0, atol=limit)


@pytest.mark.parametrize("name", NAMES)
def test_where_a_prompt_is_cut_changes_no_bit(ops: NativeRecurrentOps, name: str) -> None:
    given = operands(name, 37, 2, (24, 16, 1), torch.float32)
    whole, cut = given[-1].clone(), given[-1].clone()
    wanted = getattr(ops, name)(*given[:-1], whole, batch_of(0, [37]))
    parts, done = [], 0
    for length in (1, 17, 2, 17):
        rows = batch_of(1, []) if length == 1 else batch_of(0, [length])
        piece = [x[done : done + length] if torch.is_tensor(x) and len(x) == 37 else x for x in given[:-1]]
        parts.append(getattr(ops, name)(*piece, cut, rows))
        done += length
    assert torch.equal(torch.cat(parts), wanted)
    assert torch.equal(cut, whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_bits_in_any_company(ops: NativeRecurrentOps, name: str) -> None:
    given = operands(name, 9, 4, (40, 33, 1), torch.float32)
    alone, state = batch_of(0, [7]), given[-1].clone()
    together = batch_of(2, [7])
    alone.slots = together.slots[2:]
    mine = [x[2:] if torch.is_tensor(x) and len(x) == 9 else x for x in given[:-1]]
    wanted, got = getattr(ops, name)(*mine, state, alone), getattr(ops, name)(*given, together)
    assert torch.equal(got[2:], wanted)
    assert torch.equal(given[-1][alone.slots], state[alone.slots])


def test_channels_that_decay_on_their_own(ops: NativeRecurrentOps) -> None:
    q, k, v, _, beta, state = operands("gated_delta_rule", 30, 4, (8, 8, 1), torch.float32)
    decay, rows, other = -torch.rand(30, 2, 8), batch_of(1, [29]), state.clone()
    wanted = REFERENCE.gated_delta_rule(q, k, v, decay, beta, other, rows)
    torch.testing.assert_close(ops.gated_delta_rule(q, k, v, decay, beta, state, rows), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


def test_what_is_not_finite_is_seen(ops: NativeRecurrentOps) -> None:
    for name in NAMES[1:]:
        given = operands(name, 1, 2, (16, 16, 1), torch.float32)
        given[1][:] = torch.nan
        assert getattr(ops, name)(*given, batch_of(1, [])).isnan().all(), name


def test_operands_that_do_not_fit_are_refused(ops: NativeRecurrentOps) -> None:
    for name in NAMES:
        given = operands(name, 3, 4, (16, 16, 1), torch.float32)
        with pytest.raises(PluginError, match=name):
            getattr(ops, name)(*given[:-1], given[-1][:, :1], batch_of(3, []))
