"""Progress bars are gone before anything else is printed."""

from __future__ import annotations

from typing import Any

import pytest
from lmkit_bench.command import _engine
from lmkit_cli.settings import gather


def test_the_bar_of_the_start_is_gone_before_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    class Bar:
        def __enter__(self) -> Bar:
            said.append("bar")
            return self

        def __exit__(self, *_: object) -> None:
            said.append("bar is gone")

    class Engine:
        def __init__(self, *_: Any) -> None:
            said.append("loaded")

        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None:
            said.append("closed")

    monkeypatch.setattr("lmkit_cli.progress.StartBar", Bar)
    monkeypatch.setattr("lmkit_bench.engine.BenchEngine", Engine)
    with _engine(gather({})):
        said.append("figures")
    assert said == ["bar", "loaded", "bar is gone", "figures", "closed"]
