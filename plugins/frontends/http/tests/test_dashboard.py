"""The dashboard for Grafana asks for what /metrics says, and nothing else."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from lmkit_testing.serving import hashed
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[4] / "deploy/grafana/lmkit.json"
METRIC = re.compile(r"\b(lmkit_\w+|vllm:\w+)")
SELECTOR = re.compile(r"\b(lmkit_\w+|vllm:\w+)\{([^}]*)\}")
GROUPED = re.compile(r"sum by \((\w+)\) \(rate\((\w+)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


def expressions(dashboard: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return asked + [one["definition"] for one in dashboard["templating"]["list"] if "definition" in one]


async def test_every_metric_and_label_that_it_names_exists(connect: Any, dashboard: dict[str, Any]) -> None:
    async with hashed() as llm:
        client = connect(llm)
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        families = text_string_to_metric_families((await client.get("/metrics")).text)
    labels: dict[str, set[str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        labels.setdefault(sample.name, set()).update(sample.labels)
    asked = expressions(dashboard)
    named = {name for text in asked for name in METRIC.findall(text)}
    assert len(named) > 15
    assert not named - set(labels)
    for text in asked:
        for name, matchers in SELECTOR.findall(text):
            assert set(re.findall(r"(\w+)=~?", matchers)) <= labels[name], text
        for label, name in GROUPED.findall(text):
            assert label in labels[name], text


def test_panels_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart = any(a[at] + a[size] <= b[at] for at, size in ("xw", "yh") for a, b in ((one, other), (other, one)))
        assert apart, (one, other)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["targets"]
