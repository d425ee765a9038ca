"""The Grafana dashboards of charts/sluice, from tables: `generate.py` writes the JSON.

A panel is a title, a unit and its queries; size and place follow from their order. `$namespace` and `$deployment` are
the dashboard's variables, in SERVED and OWN.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SERVED = 'namespace=~"$namespace", sluice_dev_deployment=~"$deployment"'
OWN = 'namespace=~"$namespace"'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit`: as Grafana calls it. `queries`: (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`variables`: (name, PromQL of Grafana's label_values)."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]


def _served(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join((SERVED, *matchers))}}}"


def _own(name: str) -> str:
    return f"{name}{{{OWN}}}"


def _sum(selector: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) ({selector})" if labels else f"sum({selector})"


def _rate(selector: str, *labels: str) -> str:
    return _sum(f"rate({selector}[$__rate_interval])", *labels)


def _transfers(event: str) -> str:
    return _rate(_served("sluice_transfer_events_total", event), "service")


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    """Of a histogram."""
    rate = _rate(_served(f"{name}_bucket"), "le")
    return tuple((f"histogram_quantile({share}, {rate})", f"p{round(100 * share)}") for share in (0.5, 0.95, 0.99))


def _mean(name: str) -> str:
    return f"{_rate(_served(f'{name}_sum'))} / {_rate(_served(f'{name}_count'))}"


def _requests(event: str) -> str:
    return _rate(_served("sluice_gateway_events_total", f'event="{event}"'))


PAGES = _served("sluice_records", 'pool="page"')
SICK = _served("sluice_verdict", 'verdict=~"slow|wedged|dead"')

SERVING = Dashboard(
    "sluice-serving",
    "Sluice: serving",
    (
        ("namespace", "label_values(sluice_ready, namespace)"),
        ("deployment", 'label_values(sluice_ready{namespace=~"$namespace"}, sluice_dev_deployment)'),
    ),
    (
        Panel("Ready services", "short", ((_sum(_served("sluice_ready"), "role"), "{{role}}"),)),
        Panel(
            "Verdicts that are not well",
            "short",
            ((_sum(SICK, "service", "verdict") + " > 0", "{{service}} {{verdict}}"),),
        ),
        Panel(
            "Draining and quarantined",
            "short",
            (
                (_sum(_served("sluice_draining"), "role"), "{{role}} draining"),
                (_sum(_served("sluice_quarantined"), "role"), "{{role}} quarantined"),
            ),
        ),
        Panel(
            "Requests",
            "reqps",
            tuple((_requests(event), event) for event in ("requests", "answered", "refused", "failed", "disconnected")),
        ),
        Panel(
            "Waiting and running at the gateways",
            "short",
            (
                (_sum(_served("sluice_gateway_queued")), "waiting"),
                (_sum(_served("sluice_gateway_running")), "running"),
            ),
        ),
        Panel("Time to first token", "s", _quantiles("sluice_time_to_first_token_seconds")),
        Panel("Between two tokens", "s", _quantiles("sluice_inter_token_latency_seconds")),
        Panel("Whole request", "s", _quantiles("sluice_e2e_request_latency_seconds")),
        Panel("Wait in the queue", "s", _quantiles("sluice_request_queue_time_seconds")),
        Panel("Prefill", "s", _quantiles("sluice_request_prefill_time_seconds")),
        Panel("Handoff", "s", _quantiles("sluice_request_handoff_time_seconds")),
        Panel(
            "Tokens per request",
            "short",
            (
                (_mean("sluice_request_prompt_tokens"), "prompt"),
                (_mean("sluice_request_generation_tokens"), "answer"),
            ),
        ),
        Panel(
            "Tokens per second",
            "short",
            (
                (_rate(_served("sluice_request_prompt_tokens_sum")), "in"),
                (_rate(_served("sluice_request_generation_tokens_sum")), "out"),
            ),
        ),
        Panel("Requests tried again", "reqps", ((_requests("retries"), "retries"),)),
        Panel(
            "Sequences by phase",
            "short",
            ((_sum(_served("sluice_sequences"), "role", "phase"), "{{role}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Age of the oldest without a token",
            "s",
            ((f"max by (role) ({_served('sluice_oldest_waiting_seconds')})", "{{role}}"),),
        ),
        Panel("Steps", "ops", ((_rate(_served("sluice_steps_total"), "role", "service"), "{{service}}"),)),
        Panel(
            "Pages by state",
            "percentunit",
            (
                (
                    f"{_sum(PAGES, 'role', 'state')} / on (role) group_left () {_sum(PAGES, 'role')}",
                    "{{role}} {{state}}",
                ),
            ),
            stacked=True,
        ),
        Panel("Open rooms", "short", ((_sum(_served("sluice_rooms"), "role", "side"), "{{role}} {{side}}"),)),
        Panel("Pulled", "Bps", ((_transfers('event="bytes"'), "{{service}}"),)),
        Panel(
            "Records checked, and found wrong",
            "ops",
            (
                (_transfers('event="records_verified"'), "{{service}} checked"),
                (_transfers('event=~"mismatch_.*"'), "{{service}} wrong"),
            ),
        ),
        Panel(
            "Stranded records",
            "short",
            ((_sum(_served("sluice_transfer_stranded_records"), "service"), "{{service}}"),),
        ),
        Panel(
            "Longest waits for a thread",
            "s",
            ((f"topk(5, {_served('sluice_thread_pending_seconds')})", "{{service}} {{thread}}"),),
        ),
        Panel(
            "Resident memory", "bytes", ((_sum(_served("sluice_process_resident_bytes"), "service"), "{{service}}"),)
        ),
    ),
)

OPERATOR = Dashboard(
    "sluice-operator",
    "Sluice: operator",
    (("namespace", "label_values(sluice_operator_leader, namespace)"),),
    (
        Panel("Who leads", "short", ((_own("sluice_operator_leader"), "{{pod}}"),)),
        Panel("Age of the Lease", "s", ((_own("sluice_operator_lease_age_seconds"), "{{pod}}"),)),
        Panel("Since the last full look", "s", ((_own("sluice_operator_last_look_seconds"), "{{pod}}"),)),
        Panel("Reconciles", "ops", ((_rate(_own("sluice_operator_reconciles_total"), "pod"), "{{pod}}"),)),
        Panel(
            "Time of a reconcile",
            "s",
            (
                (
                    f"{_rate(_own('sluice_operator_reconcile_seconds_total'), 'pod')}"
                    f" / {_rate(_own('sluice_operator_reconciles_total'), 'pod')}",
                    "{{pod}}",
                ),
            ),
        ),
        Panel("Failures", "ops", ((_rate(_own("sluice_operator_failures_total"), "reason"), "{{reason}}"),)),
        Panel("Queue", "short", ((_own("sluice_operator_queue"), "{{pod}}"),)),
        Panel("Lateness of its oldest", "s", ((_own("sluice_operator_queue_age_seconds"), "{{pod}}"),)),
        Panel("Actions", "ops", ((_rate(_own("sluice_operator_actions_total"), "action"), "{{action}}"),)),
        Panel(
            "Requests to the API server",
            "reqps",
            ((_rate(_own("sluice_operator_api_requests_total"), "method"), "{{method}}"),),
        ),
        Panel(
            "Requests that failed", "reqps", ((_rate(_own("sluice_operator_api_errors_total"), "error"), "{{error}}"),)
        ),
    ),
)
DASHBOARDS = {"serving": SERVING, "operator": OPERATOR}


def render_json(dashboard: Dashboard) -> str:
    told = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["sluice"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *(_variable(name, query) for name, query in dashboard.variables)]},
        "panels": [_panel(index, panel) for index, panel in enumerate(dashboard.panels)],
    }
    return json.dumps(told, indent=1) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 20} if panel.stacked else {}
    return {
        "id": index + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": stacking}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for number, (expr, legend) in enumerate(panel.queries)
        ],
    }
