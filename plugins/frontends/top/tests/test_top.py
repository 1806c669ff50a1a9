"""Figures of real exposition texts, and a terminal's screen of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import ConfigError, EngineError, SchedStats
from lmkit.engine.messages import EngineStats
from lmkit_http.metrics import Metrics
from lmkit_top.command import top, watch
from lmkit_top.figures import COUNTERS, GAUGES, HISTOGRAMS, Snapshot, quantile, rate, read, share
from lmkit_top.screen import WIDTH, bars, screen
from lmkit_top.server import Server
from rich.console import Console

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
"""


def ours(**values: int) -> str:
    """What an lmkit server says."""
    metrics, stats = Metrics("demo"), EngineStats(SchedStats())
    for name, value in values.items():
        setattr(stats.sched, name, value)
    return metrics.render(stats, up=True).decode()


def shown(*args: Any) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(screen(*args))
    return console.export_text()


def test_every_name_is_one_of_the_servers() -> None:
    """A name that lmkit no longer has would be a line that is always empty."""
    text = ours()
    first = [names[0] for table in (GAUGES, COUNTERS, HISTOGRAMS) for names in table.values()]
    missing = [name for name in first if name.removesuffix("_total") not in text]
    assert not missing


def test_ours_are_read() -> None:
    looks = [
        read(ours(num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=4, num_output_tokens=100), 0.0),
        read(ours(num_running=3, num_blocks=10, num_free_blocks=5, num_output_tokens=150, num_steps=20), 2.0),
    ]
    assert looks[0].values["kv"] == pytest.approx(0.6)
    assert rate("output", *looks) == 25.0
    text = shown("http://here", looks)
    for part in ("http://here", "demo", "requests running", "3", "50%", "25", "10"):
        assert part in text
    assert "engine is down" not in text


def test_vllms_are_read_and_added_up() -> None:
    look = read(VLLM, 0.0)
    assert (look.values["running"], look.values["waiting"], look.values["output"]) == (3, 1, 120)
    assert look.model == "m"
    assert "requests waiting" in shown("http://there", [look], "it does not answer")


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "# TYPE up gauge\nup 1\n", "a{b 1"])
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(text, 0.0)


def test_a_server_that_began_anew_has_no_rates() -> None:
    before, after = (Snapshot(at, {"output": value}) for at, value in ((0.0, 50.0), (1.0, 3.0)))
    assert rate("output", before, after) is None
    assert share("output", "steps", before, after) is None


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_their_bucket(values: list[float], q: float) -> None:
    """As far as buckets tell: the bucket in which the share lies is the right one."""
    bounds = [0.01, 0.1, 1.0, 10.0, float("inf")]
    buckets = {"first": {b: float(sum(v <= b for v in values)) for b in bounds}}
    before = Snapshot(0.0, {}, {"first": dict.fromkeys(bounds, 0.0)})
    found = quantile("first", q, before, Snapshot(1.0, {}, buckets))
    assert found is not None
    rank = next(v for i, v in enumerate(sorted(values), 1) if i >= q * len(values))
    high = next(b for b in bounds if rank <= b)
    low = max([0.0, *(b for b in bounds if b < high)])
    assert low <= found <= min(high, 10.0)


def test_no_event_has_no_quantile() -> None:
    empty = Snapshot(0.0, {}, {"first": {1.0: 4.0, float("inf"): 4.0}})
    assert quantile("first", 0.5, empty, empty) is None
    assert quantile("next", 0.5, empty, empty) is None


@given(st.lists(st.none() | st.floats(0, 1e9), max_size=2 * WIDTH))
def test_bars(values: list[float | None]) -> None:
    line = bars(values)
    assert len(line) == WIDTH
    for value, mark in zip(values[-WIDTH:], line[-len(values) :] if values else "", strict=False):
        assert (mark == " ") == (not value)


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """A server on a real socket that gives the answers of a list, the last for ever."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    made = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", answers
    made.shutdown()
    made.server_close()


def test_a_server_is_watched(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url, answers = server
    answers += [(200, ours(num_output_tokens=n, num_running=1)) for n in (10, 20, 30)]
    top(url + "/v1", interval=0.1, api_key="", looks=3)
    assert capsys.readouterr().out.count("output tokens/s") == 2


def test_an_answer_that_fails_is_said_and_the_next_is_taken(server: Any) -> None:
    url, answers = server
    answers += [(200, ours()), (500, ""), (200, ours())]
    with Server(url) as made:
        seen = deque([made.look()])
        errors = list(watch(made, seen, 0.0, 3))
    assert "500" in errors[0]
    assert errors[1] == ""
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("answer", "words", "fix"),
    [
        ((401, "{}"), "key", "--api-key"),
        ((404, ""), "404", "lmkit serve"),
        ((200, "hello"), "cannot be read", "address"),
    ],
)
def test_what_is_wrong_at_the_beginning_is_said(server: Any, answer: tuple[int, str], words: str, fix: str) -> None:
    url, answers = server
    answers.append(answer)
    with pytest.raises(EngineError, match=words) as found, Server(url) as made:
        made.look()
    assert fix in found.value.fix


def test_addresses() -> None:
    with pytest.raises(ConfigError, match="no address"):
        Server("localhost:8000")
    with pytest.raises(EngineError, match="cannot be read"), Server("http://127.0.0.1:9") as made:
        made.look()
