"""docs/metrics.md, from the tables of the services and of the operator."""

from __future__ import annotations

from sluice_engine.supervisor.engine_metrics import ENGINE_METRICS
from sluice_gateway.status.gateway_metrics import GATEWAY_METRICS
from sluice_operator.decide.metrics import METRICS as OPERATOR_METRICS
from sluice_runtime.health.exposition import HEALTH_METRICS
from sluice_runtime.health.metrics import table

SERVICE_METRICS = (*HEALTH_METRICS, *ENGINE_METRICS, *GATEWAY_METRICS)
_ABOUT = """# Metrics

A service's supervisor answers `GET /metrics`, also while everything it watches is stuck. All of these have the labels
`service` and `role`; counters end in `_total`. Every replica of the operator answers `GET /metrics` on its probe port.
`make proto` generates this page from the tables in the code.
"""
_PARTS = (
    ("Every service", HEALTH_METRICS),
    ("Engines", ENGINE_METRICS),
    ("Gateways", GATEWAY_METRICS),
    ("The operator", OPERATOR_METRICS),
)


def render_markdown() -> str:
    """The whole page."""
    return "\n".join([_ABOUT, *("\n".join([f"## {title}", "", *table(specs), ""]) for title, specs in _PARTS)])
