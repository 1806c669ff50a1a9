"""Runs the tests of routes that come with the official SDKs, and writes what they say into docs/clients.md.

The tests are those of the source distributions on PyPI, in environments of their own, against `lmkit serve demo`. They
make up the ids that they ask for: a relay puts those of objects that exist in their place, and changes nothing else.
`python tools/sdk_suites.py` writes its part of the page anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
FOLDER = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / ".nox" / "client-environments")).resolve() / "sdk-suites"
NAMES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "model", "text-embedding-3-small", "claude-opus-5-5")  # of models
# dist -> what its tests need, the end of its address, and the files of tests: those of routes that are here
SUITES: dict[str, tuple[list[str], str, list[str]]] = {
    "openai": (
        ["pytest>=9", "pytest-asyncio", "inline-snapshot", "nest_asyncio", "httpx_aiohttp", "aiohttp", "rich"],
        "/v1",
        ["chat", "test_completions.py", "test_responses.py", "responses", "test_models.py", "test_files.py",
         "test_uploads.py", "uploads", "test_batches.py"],
    ),
    "anthropic": (
        ["pytest", "pytest-asyncio", "inline-snapshot", "http-snapshot[httpx]", "httpx_aiohttp", "aiohttp", "respx",
         "rich", "dirty-equals", "time-machine", "opentelemetry-sdk"],
        "",
        ["test_messages.py", "test_models.py"],
    ),
}  # fmt: skip
TITLE = "## The SDKs' own tests\n"
_HEAD = f"""{TITLE}
What comes with the SDKs for Python: each method of the routes that are here, called in three ways by five clients, with
the least and with all of its parameters, whose values are made up; models go by the names in them, and ids that are
asked for are those of objects that exist. A test fails where such a value is refused, by name and whatever the others
are, and where there is no route.

| SDK | tests | passed | failed |
|---|---|---|---|
"""
_MADE_UP = re.compile(r"input_file_id|file_id|batch_id|response_id|resp_677efb5139a88190b512bc3fef8e535d|"
                      r"upload_abc123|model_id")  # fmt: skip


class Relay:
    """ASGI: each request with an id that was made up is about an object that has just been made."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body, path = await request.body(), scope["path"]
        if (found := _MADE_UP.search(path)) is not None:
            made, parts = await self._made(found[0], path)
            path = path.replace(found[0], made)
            if path.endswith("/complete"):
                body = json.dumps({**json.loads(body), "part_ids": parts}).encode()
        elif b'"input_file_id":"input_file_id"' in body.replace(b" ", b""):
            body = json.dumps({**json.loads(body), "input_file_id": await self._file()}).encode()
        headers = [(k, v) for k, v in request.headers.items() if k not in ("host", "content-length", "connection")]
        answer = await self._client.request(
            request.method, path, content=body, headers=headers, params=request.url.query
        )
        kept = {k: v for k, v in answer.headers.items() if k not in ("content-length", "transfer-encoding")}
        await Response(answer.content, answer.status_code, kept)(scope, receive, send)

    async def _made(self, name: str, path: str) -> tuple[str, list[str]]:
        """The id of an object; of an upload, those of its parts, too, where it is to be completed."""
        parts: list[str] = []
        if name == "model_id":
            return "demo", parts
        if "file" in name:
            return await self._file(), parts
        if name == "batch_id":
            body: Mapping[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}
            return await self._id("/v1/batches", {**body, "input_file_id": await self._file()}), parts
        if name == "upload_abc123":
            body = {"filename": "a", "bytes": 4096, "purpose": "batch", "mime_type": "text/plain"}
            whole = path.endswith("/complete")
            id = await self._id("/v1/uploads", {**body, "bytes": 2} if whole else body)
            if whole:
                part = await self._client.post(f"/v1/uploads/{id}/parts", files={"data": ("a", b"{}")})
                parts.append(part.json()["id"])
            return id, parts
        background = path.endswith("/cancel")
        return await self._id("/v1/responses", {"input": "Hi", "max_output_tokens": 9, "background": background}), parts

    async def _file(self) -> str:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
        files: dict[str, Any] = {"file": ("a.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
        id: str = (await self._client.post("/v1/files", files=files)).raise_for_status().json()["id"]
        return id

    async def _id(self, path: str, body: Mapping[str, Any]) -> str:
        id: str = (await self._client.post(path, json=body)).raise_for_status().json()["id"]
        return id


@contextmanager
def relayed(url: str) -> Iterator[str]:
    """The address of a relay to the server at `url`."""
    server = uvicorn.Server(uvicorn.Config(Relay(url), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join()


@contextmanager
def serving() -> Iterator[str]:
    """The demo under the names of models that the tests know, with a place for files."""
    output, files = FOLDER / "server", FOLDER / "files"
    names = [word for name in ("demo", *NAMES) for word in ("--served-name", name)]
    command = [
        sys.executable,
        "-m",
        "lmkit",
        "serve",
        "demo",
        "--port",
        "0",
        "--dialect.batches.dir",
        str(files),
        *names,
    ]
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(r"curl (http://\S+)/v1", output.read_text())):
            if process.poll() is not None:
                raise SystemExit(output.read_text())
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def suite(dist: str, url: str) -> Path:
    """The report of a suite, whose sources and environment are made where they are not there."""
    needs, end, files = SUITES[dist]
    release, python = f"{dist}=={version(dist)}", FOLDER / f"{dist}-{version(dist)}-env" / "bin" / "python"
    if not python.exists():
        download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(FOLDER), release]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        with tarfile.open(FOLDER / f"{dist}-{version(dist)}.tar.gz") as sources:
            sources.extractall(FOLDER, filter="data")
        subprocess.run(["uv", "venv", "-q", str(python.parents[1])], check=True)
        install = ["uv", "pip", "install", "-q", "--python", str(python), release, "pytest-timeout", *needs]
        subprocess.run(install, check=True)
    report = FOLDER / f"{dist}.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=no", "--no-summary", "--timeout=120"]
    paths = [f"tests/api_resources/{file}" for file in files]
    env = os.environ | {"TEST_API_BASE_URL": url + end}
    command = [str(python), "-m", "pytest", *options, f"--junitxml={report}", *paths]
    subprocess.run(command, cwd=FOLDER / f"{dist}-{version(dist)}", env=env, check=False)
    return report


def rows(dist: str, report: Path) -> Iterator[str]:
    """The part of the table that is about a suite."""
    passed, failed = Counter[str](), dict[str, Counter[str]]()
    for case in ElementTree.parse(report).iter("testcase"):
        what = case.find("failure") if case.find("failure") is not None else case.find("error")
        file = (
            (case.get("classname") or "").removeprefix("tests.api_resources.").rpartition(".")[0].replace("test_", "")
        )
        if what is not None:
            name = case.get("name") or ""
            method = re.sub(r"\[.*|^test_|streaming_response_|raw_response_|method_|_overload_\d", "", name)
            said = (what.get("message") or "").partition("\n")[0]
            said = re.sub(r".*?'message': [\"']|[\"']}}$|^.*Error code: ", "", said)
            failed.setdefault(file, Counter())[f"{method.replace('_', ' ')}: {said[:150].replace('|', '/')}"] += 1
        elif case.find("skipped") is None:
            passed[file] += 1
    for file in sorted(passed.keys() | failed.keys()):
        wrong = failed.get(file, Counter[str]())
        reasons = "; ".join(f"{reason} ({num})" for reason, num in wrong.items()) or "-"
        yield f"| `{dist}` {version(dist)} | {file} | {passed[file]} of {passed[file] + wrong.total()} | {reasons} |\n"


def section() -> str:
    """The part of the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serving() as url, relayed(url) as relay:
        return _HEAD + "".join(row for dist in SUITES for row in rows(dist, suite(dist, relay)))


def main() -> int:
    before, _, after = PAGE.read_text(encoding="utf-8").partition(TITLE)
    follows = re.search(r"^## ", after, re.MULTILINE)
    rest = "\n" + after[follows.start() :] if follows is not None else ""
    PAGE.write_text(before.rstrip() + "\n\n" + section() + rest, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
