"""Queries of the dashboard and the alerts: valid PromQL that reads series which are really exported."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("promql_parser", reason="`make install-test` installs the parser of PromQL")
from monitoring_queries import parse, selectors

from infra.addons import gpu, monitoring
from infra.monitoring.alerts import ALERTS, rules
from infra.monitoring.board import ROWS, dashboard

ROOT = Path(__file__).resolve().parents[2]
#: Fields in the DCGM exporter's default list (etc/dcp-metrics-included.csv of 4.x), including those in its comments.
PUBLISHED = {
    "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_MEM_CLOCK", "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_DEC_UTIL",
    "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_THERMAL_VIOLATION",
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION", "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION", "DCGM_FI_DEV_LOW_UTIL_VIOLATION",
    "DCGM_FI_DEV_RELIABILITY_VIOLATION", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_RESERVED",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "DCGM_FI_DEV_RETIRED_SBE",
    "DCGM_FI_DEV_RETIRED_DBE", "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES",
    "DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES",
}  # fmt: skip
#: Series of kube-state-metrics and node exporter that queries read, with their default labels.
OTHERS = {
    "kube_node_spec_unschedulable": {"node"},
    "kube_node_status_condition": {"node", "condition", "status"},
    "kube_pod_container_info": {"namespace", "pod", "container", "image"},
    "kube_pod_container_status_restarts_total": {"namespace", "pod", "container"},
    "kube_pod_info": {"namespace", "pod", "node", "created_by_kind"},
    "kube_pod_status_phase": {"namespace", "pod", "phase"},
    "node_infiniband_port_data_received_bytes_total": {"device", "port"},
    "node_infiniband_port_data_transmitted_bytes_total": {"device", "port"},
    "node_network_receive_bytes_total": {"device"},
    "node_network_transmit_bytes_total": {"device"},
}
#: Labels that a PodMonitor adds to every series.
SCRAPED = {"namespace", "pod", "container", "endpoint", "instance", "job"}


def all_queries() -> list[Any]:
    queries = {panel.title: list(panel.queries.values()) for row in ROWS.values() for panel in row}
    queries |= {alert.name: [alert.query] for alert in ALERTS}
    return [pytest.param(query, id=f"{name}: {query}"[:90]) for name, listed in queries.items() for query in listed]


QUERIES = all_queries()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Return the series of the trainer's endpoint after every kind of event, with their labels."""
    pytest.importorskip("torch", reason="needs the trainer's metrics endpoint")
    from trainer.metrics.prometheus import Prometheus

    sink = Prometheus("127.0.0.1", 0, "criteo")
    numbers = {"loss": 0.4, "ne": 0.8, "auc": 0.7, "calibration": 1.0}
    speed = {"samples_per_second": 1e6, "step_ms": 6.0, "memory_gib": 4.0, "learning_rate_factor": 1.0}
    try:
        sink.event("start", {"restart": 1})
        sink.event("resume", {"step": 1, "position": 8192})
        sink.event("train", {"step": 2, "position": 16384, "samples_since_last": 8192, **numbers, **speed})
        sink.event("eval", {"step": 2, **numbers})
        sink.event("checkpoint", {"step": 2})
        sink.event("checkpoint_failed", {"step": 2, "error": "disk full"})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink._server.server_address[1]}/metrics") as page:
            text = page.read().decode()
    finally:
        sink.close()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    assert 'trainer_checkpoint_failures_total{run="criteo"} 1.0' in text
    assert 'trainer_restarts{run="criteo"} 1.0' in text
    return found


def counters() -> Iterator[list[str]]:
    lines = [line for line in gpu.COUNTERS.read_text().splitlines() if line and not line.startswith("#")]
    yield from csv.reader(lines, skipinitialspace=True)


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_exported_series_and_existing_labels(query: str, exported: dict[str, set[str]]) -> None:
    names = {row[0] for row in counters()}
    found = list(selectors(query))
    assert found, "a query without a series has no result"
    for name, labels in found:
        if name.startswith("trainer_"):
            assert name in exported, "the trainer exports no such series"
            assert labels <= exported[name] | SCRAPED
        elif name.startswith("DCGM_"):
            assert name in names, "it is missing in infra/monitoring/counters.csv"
        else:
            assert labels <= OTHERS[name] | SCRAPED


@pytest.mark.parametrize("query", ["sum by run (trainer_step)", "rate(trainer_samples_total)", "trainer_step{"])
def test_invalid_promql_is_rejected(query: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own words change
        parse(query)


def test_every_series_of_the_trainer_is_in_a_panel(exported: dict[str, set[str]]) -> None:
    shown = {name for query in QUERIES for name, _ in selectors(query.values[0])}
    # Memory is in DCGM's panel; the other two are inputs for queries of users.
    without_panel = {"trainer_memory_bytes", "trainer_learning_rate_factor", "trainer_samples_total"}
    own = {name for name in exported if not name.endswith("_created")}
    assert own - shown == without_panel


def test_the_exporter_reads_existing_fields_and_the_chart_passes_all_of_them() -> None:
    rows = list(counters())
    assert all(len(row) == 3 and row[1] in ("gauge", "counter") for row in rows)
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    assert set(names) <= PUBLISHED
    values: Any = gpu.dcgm_exporter(_pool()).values
    assert values["customMetrics"] == gpu.COUNTERS.read_text()


def _pool() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(node_selector={}, tolerations=(), chart=None)


def test_queries_use_rates_of_counters_and_values_of_gauges() -> None:
    kinds = {row[0]: row[1] for row in counters()}
    for query in (item.values[0] for item in QUERIES):
        for name in re.findall(r"DCGM_\w+", query):
            in_rate = re.search(rf"(rate|increase)\({name}\[", query)
            assert bool(in_rate) == (kinds[name] == "counter"), f"{name} is a {kinds[name]}: {query}"


def test_panels_do_not_overlap_and_have_a_description_and_a_unit() -> None:
    panels: Any = dashboard()["panels"]
    occupied = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & occupied, f"{panel['title']} covers another panel"
        assert place["x"] + place["w"] <= 24
        occupied |= cells
    graphs = [panel for panel in panels if panel["type"] == "timeseries"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in graphs)
    assert len(graphs) == sum(len(row) for row in ROWS.values())


def test_the_dashboards_variables_are_those_that_queries_use() -> None:
    variables: Any = dashboard()["templating"]
    queries = {item["name"]: item["query"] for item in variables["list"]}
    assert set(queries) == {"datasource", "namespace", "run"}
    used = set(re.findall(r"\$(\w+)", json.dumps([item.values[0] for item in QUERIES])))
    assert used == {"namespace", "run"}, "an undefined variable matches nothing"


def test_every_alert_has_a_unique_name_a_summary_and_an_action() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names))
    assert all(alert.summary and alert.action for alert in ALERTS)
    for alert in ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert.summary))
        available = {
            label for group in re.findall(r"by \(([^)]*)\)", alert.query) for label in re.split(r",\s*", group)
        }
        assert used <= available, f"{alert.name} uses a label that its query drops"


def test_the_alerts_are_installed_with_prometheus() -> None:
    request = monitoring.prometheus_stack()
    (rule,) = request.resources
    assert (rule.api_version, rule.kind) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert rule.spec == rules()
    values: Any = request.values
    assert values["prometheus"]["prometheusSpec"]["ruleSelectorNilUsesHelmValues"] is False, (
        "otherwise it reads only the chart's rules"
    )


@pytest.mark.parametrize(("what", "key"), [("dashboard", "panels"), ("alerts", "groups")])
def test_dashboard_and_alerts_can_be_printed_for_import(what: str, key: str) -> None:
    words = [sys.executable, "-m", "infra.monitoring", what]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)[key]


def test_a_typo_is_reported_in_one_line() -> None:
    words = [sys.executable, "-m", "infra.monitoring", "alert"]
    answer = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert "dashboard" in answer.stderr, "the error must list the allowed values"
