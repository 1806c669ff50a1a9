"""Requests are read and results written: whole lines, one for each request, wherever a process was killed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import ConfigError
from lmkit_http.dialect import Answer, Incoming
from lmkit_run_batch.lines import Fault, Line, check_lines, read_lines
from lmkit_run_batch.play import AT_ONCE, MAX_BYTES, play
from lmkit_run_batch.results import Results

BODIES = st.sampled_from([b"{}", b'{"a": "\\n"}', b'{\n"a": 1\n}', b"not json", "\u2028".encode(), b"\xff"])
_slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=_slow)
@given(
    done=st.lists(st.tuples(st.sampled_from([200, 200, 400, 503]), BODIES), max_size=6),
    cut=st.integers(0, 400), junk=st.sampled_from([b"", b"\0" * 20, b'{"id":"ba', b'{"id":"batch_req_x"}\n']),
    together=st.booleans(),
)  # fmt: skip
def test_results_go_on_where_a_file_was_cut(
    tmp_path: Path, done: list[tuple[int, bytes]], cut: int, junk: bytes, together: bool
) -> None:
    output = tmp_path / "out"
    errors = output if together else tmp_path / "err"
    for path in (output, errors):
        path.unlink(missing_ok=True)
    first = Results(output, errors)
    for i, (status, body) in enumerate(done):
        first.answered(f"r{i}", Answer(body, status, headers={"x-request-id": "q"}))
    first.close()
    before = output.read_bytes()
    left = before[: max(0, len(before) - cut)]
    output.write_bytes(left + junk if left.endswith(b"\n") or not left else left)

    again = Results(output, errors)
    kept = set(again.ids)
    assert kept <= {f"r{i}" for i in range(len(done))}
    for i, (status, body) in enumerate(done):
        again.answered(f"r{i}", Answer(body, status))
        again.given_up(f"r{i}", "never", "twice")
    again.close()
    found = [json.loads(line) for path in {output, errors} for line in path.read_bytes().split(b"\n")[:-1]]
    assert sorted(line["custom_id"] for line in found) == sorted(f"r{i}" for i in range(len(done)))
    assert {line["custom_id"]: line["response"]["status_code"] for line in found} == {
        f"r{i}": status for i, (status, _) in enumerate(done)
    }
    assert again.num_completed == sum(status == 200 for status, _ in done)
    whole = [line for line in before.split(b"\n") if line and json.loads(line)["custom_id"] in kept]
    assert output.read_bytes().split(b"\n")[: len(whole)] == whole  # what was kept was not written again


@pytest.mark.parametrize("content", [b"precious", b"precious\n", b'{"id": 1}\n', b'{"id":"batch_req_1"}\nprecious\n'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ConfigError, match="no result"):
        Results(tmp_path / "out", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


@settings(max_examples=80, deadline=None, suppress_health_check=_slow)
@given(st.binary(max_size=200) | st.lists(st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), inner, max_size=4),
    max_leaves=8), max_size=4).map(lambda lines: b"\n".join(json.dumps(line).encode() for line in lines)))  # fmt: skip
def test_any_file_is_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    total, faults = check_lines(path)
    assert total or faults
    assert all(isinstance(line, (Line, Fault)) for line in read_lines(path))
    assert len(faults) <= 32


def test_too_many_requests(tmp_path: Path) -> None:
    path = tmp_path / "in"
    line = {"method": "POST", "url": "/v1/completions", "body": {}}
    path.write_bytes(b"\n".join(msgspec.json.encode(line | {"custom_id": str(i)}) for i in range(11)))
    assert check_lines(path, most=11) == (11, [])
    total, (fault,) = check_lines(path, most=10)
    assert (total, fault.code) == (10, "too_many_requests")


async def test_requests_at_once_are_bounded_in_number_and_bytes(tmp_path: Path) -> None:
    at_once, most = Counter[str](), Counter[str]()

    async def ask(incoming: Incoming) -> Answer:
        at_once.update(num=1, size=len(incoming.body))
        most.update({name: max(0, value - most[name]) for name, value in at_once.items()})
        await asyncio.sleep(0.001)
        at_once.subtract(num=1, size=len(incoming.body))
        return Answer(b"{}")

    for size, num, expected in ((10, 600, AT_ONCE), (MAX_BYTES // 3, 9, 3), (MAX_BYTES * 2, 2, 1)):
        at_once.clear(), most.clear()
        results = Results(tmp_path / f"{size}", tmp_path / f"{size}")
        await play([Line(i, str(i), "/x", b"x" * size) for i in range(num)], results, ask)
        results.close()
        assert (len(results.ids), most["num"]) == (num, expected)


def test_a_byte_order_mark_at_the_beginning_is_ignored(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}).encode()
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line.replace(b'"a"', b'"b"') + b"\r\n")
    assert check_lines(path) == (2, [])
    path.write_bytes(line + b"\n\xef\xbb\xbf" + line)  # elsewhere it is no mark
    assert [type(found) for found in read_lines(path)] == [Line, Fault]
