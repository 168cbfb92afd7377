"""The Grafana dashboard and the alerts ask for nothing that /metrics does not have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import Running

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
# `by (a, b)`, `on (a)`, and labels in braces.
LABELS = re.compile(r"(?:by|on) \(([\w, ]*)\)|{(\w+)=~")


@pytest.fixture(scope="module")
def board() -> Any:
    return json.loads((FOLDER / "grafana.json").read_text())


@pytest.fixture(scope="module")
def exposed(running: Running) -> dict[str, set[str]]:
    """Sample name → labels, after a request."""
    running.complete("the cat", max_tokens=30)
    families = text_string_to_metric_families(running.get("/metrics").text)
    return {s.name: set(s.labels) for family in families for s in family.samples}


def expressions(board: Any) -> list[str]:
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    [group] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["spec"]["groups"]
    shown += [rule["expr"] for rule in group["rules"]]
    return shown + [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]


def test_no_panel_stays_empty_under_vllm(board: Any) -> None:
    """It has none of the metrics that begin with peagle:."""
    for panel in board["panels"]:
        asked = [target["expr"] for target in panel["targets"]]
        assert any("peagle:" not in expression for expression in asked), panel["title"]


def test_every_metric_is_there(board: Any, exposed: dict[str, set[str]]) -> None:
    assert len(expressions(board)) > 20
    for expression in expressions(board):
        names = re.findall(r"(?:vllm|peagle):\w+", expression)
        assert names and set(names) <= set(exposed), expression
        asked = set(re.findall(r"\w+", " ".join(map("".join, LABELS.findall(expression)))))
        assert asked <= set().union(*(exposed[name] for name in names)), expression
        counters = [name for name in names if name.endswith(("_total", "_bucket"))]
        assert expression.count("rate(") == len(counters), "a counter is read by its rate"


def test_what_grafana_needs(board: Any) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(board)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert {"type", "title", "fieldConfig", "options", "gridPos"} <= set(panel)
        marks = [target["refId"] for target in panel["targets"]]
        assert marks and len(set(marks)) == len(marks)
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for variable in re.findall(r"\$(\w+)", " ".join(t["expr"] for t in panel["targets"])):
            assert variable in variables or variable == "__rate_interval"
