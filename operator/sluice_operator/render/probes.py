"""Probes: the numbers of the design, the same for everybody but for the startup budget."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
LIVENESS_PERIOD_S, LIVENESS_FAILURES = 10, 3
READINESS_PERIOD_S, READINESS_FAILURES = 2, 2
STARTUP_PERIOD_S = 10
TIMEOUT_S = 2
# A frozen container has nothing left to finish: it must not sit out the long grace.
LIVENESS_GRACE_S = 10


def probes(port: str, startup_path: str, startup_max_s: int) -> Object:
    """The three probes of a container. `startup_max_s` is rounded up to whole periods."""

    def http(path: str, period: int, failures: int) -> Object:
        return {
            "httpGet": {"path": path, "port": port, "scheme": "HTTP"},
            "periodSeconds": period,
            "timeoutSeconds": TIMEOUT_S,
            "failureThreshold": failures,
            "successThreshold": 1,
        }

    return {
        "startupProbe": http(startup_path, STARTUP_PERIOD_S, -(-startup_max_s // STARTUP_PERIOD_S)),
        "livenessProbe": http("/livez", LIVENESS_PERIOD_S, LIVENESS_FAILURES)
        | {"terminationGracePeriodSeconds": LIVENESS_GRACE_S},
        "readinessProbe": http("/readyz", READINESS_PERIOD_S, READINESS_FAILURES),
    }
