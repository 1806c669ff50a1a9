"""Results are whole lines, one for each request, wherever a process was killed; and files that strangers wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import ConfigError, RequestError
from lmkit.front.dialect import Answer
from lmkit_dialect_batches.form import read_form
from lmkit_dialect_batches.lines import Line, check_lines, read_lines
from lmkit_dialect_batches.records import Batch, Fault
from lmkit_dialect_batches.results import Results
from lmkit_dialect_batches.store import Store, StoreFull, new_id

KILLS = int(os.environ.get("BATCH_KILLS", "2"))
NUM = 150
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


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=120), st.sampled_from(["a", "----x", "", 'a"']), st.booleans())
def test_any_form_is_read_or_refused(content: bytes, boundary: str, framed: bool) -> None:
    line = b"--" + boundary.encode()
    name = b'Content-Disposition: form-data; name="file"\r\n\r\n'
    body = line + b"\r\n" + name + content + b"\r\n" + line + b"--\r\n" if framed else content
    try:
        parts = read_form(f"multipart/form-data; boundary={boundary}", body)
    except RequestError:
        assert not framed or boundary not in ("a", "----x") or line in content
    else:
        assert not framed or line in content or bytes(parts["file"].data) == content


def test_many_parts_and_twice_the_same_are_refused() -> None:
    def form(*names: str) -> bytes:
        parts = b"".join(b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\nv\r\n' % n.encode() for n in names)
        return parts + b"--x--\r\n"

    assert read_form("multipart/form-data; boundary=x", form("a", "b"))["b"].text() == "v"
    for names in (("a", "a"), tuple(map(str, range(17)))):
        with pytest.raises(RequestError, match="several parts"):
            read_form("multipart/form-data; boundary=x", form(*names))
    with pytest.raises(RequestError, match="does not end"):
        read_form("multipart/form-data; boundary=x", form("a")[:-8])


def test_too_many_requests(tmp_path: Path) -> None:
    path = tmp_path / "in"
    line = {"method": "POST", "url": "/v1/completions", "body": {}}
    path.write_bytes(b"\n".join(msgspec.json.encode(line | {"custom_id": str(i)}) for i in range(11)))
    assert check_lines(path, most=11) == (11, [])
    total, (fault,) = check_lines(path, most=10)
    assert (total, fault.code) == (10, "too_many_requests")


def test_results_that_find_no_room_fail_the_batch_and_keep_what_there_is(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    batch = Batch(new_id("batch_"), "", "/x", "file-x", new_id("file-"), new_id("file-"), 0, 0, 9)
    store.add_batch(batch)
    results = Results(store.path(batch.output_id), store.path(batch.error_id), store.grow)
    results.answered("a", Answer(b"{}"))
    with pytest.raises(StoreFull):
        results.answered("b", Answer(msgspec.json.encode("x" * 1000)))
    assert results.ids == {"a"}
    results.close()
    store.fail(batch, [Fault("storage", "full")])
    store.close()
    again = Store(tmp_path, 1000)
    (found,) = again.batches("")
    assert (found.status, found.has_output, found.has_errors) == ("failed", True, False)
    assert again.path(again.file("", batch.output_id).id).read_bytes().count(b"\n") == 1
    again.close()


SERVER = """
import asyncio, sys
from lmkit_dialect_batches.dialect import Batches
from lmkit_http.dialects import installed_dialects
from lmkit_testing.serving import listening, scripted
from msgspec.structs import replace

async def main():
    dialects = [*(d for d in installed_dialects() if not isinstance(d, Batches)), Batches(sys.argv[1])]
    llm = scripted("hello", delay=0.02)
    llm.client.facts = replace(llm.facts, max_rows=8)  # 16 requests in the background at a time
    async with listening(llm, dialects=dialects) as url:
        print(url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def kill(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGKILL)
    server.communicate()


@pytest.mark.full("lmkit-dialect-batches", "lmkit-http")
def test_a_batch_survives_kill_9(tmp_path: Path) -> None:
    """Killed in the middle, again and again: every request has one line in the end, and none is lost or changed."""
    body = {"prompt": "x", "max_tokens": 5}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    bodies = [line | {"custom_id": str(i), "body": body | ({"top_p": 7} if i % 10 == 3 else {})} for i in range(NUM)]
    content = b"".join(msgspec.json.encode(one) + b"\n" for one in bodies)
    server, url = serve(tmp_path)
    try:
        form: dict[str, Any] = {"files": {"file": content}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{url}/v1/files", **form, timeout=60).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        id = httpx.post(f"{url}/v1/batches", json=asked, timeout=60).json()["id"]
        kept: dict[Path, bytes] = {}
        for n in range(KILLS):
            wanted = (n + 1) * NUM // (KILLS + 2)
            while sum(batch_of(url, id)["request_counts"][name] for name in ("completed", "failed")) < wanted:
                time.sleep(0.002)
            kill(server)
            for path, written in kept.items():
                assert path.read_bytes().startswith(written)
            kept = {path: whole_lines(path) for path in (tmp_path / "files").glob("*.data")}
            server, url = serve(tmp_path)
        while (batch := batch_of(url, id))["status"] != "completed":
            assert batch["status"] in ("in_progress", "finalizing")
            time.sleep(0.01)
        counts = batch["request_counts"]
        assert counts == {"total": NUM, "completed": NUM - NUM // 10, "failed": NUM // 10}
        found = []
        for name in ("output_file_id", "error_file_id"):
            text = httpx.get(f"{url}/v1/files/{batch[name]}/content", timeout=60).content
            assert text.startswith(kept[tmp_path / "files" / f"{batch[name]}.data"])
            found += [json.loads(one) for one in text.splitlines()]
        assert sorted(int(one["custom_id"]) for one in found) == list(range(NUM))
        for one in found:
            status = 400 if int(one["custom_id"]) % 10 == 3 else 200
            assert one["response"]["status_code"] == status
    finally:
        kill(server)


def batch_of(url: str, id: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/batches/{id}", timeout=60).json()
    return answer


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]
