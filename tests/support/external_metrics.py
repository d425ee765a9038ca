"""A stub of external.metrics.k8s.io behind the API server's aggregator: one metric, whose value the test sets."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from cluster_client import ClusterClient

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
METRIC = "queued-requests"


class ExternalMetrics:
    """`value`: what the metric is from now on. Registered while entered; localhost, a port that the system picks."""

    def __init__(self, client: ClusterClient, certificate: Path, key: Path) -> None:
        self.value = 0
        self._client = client
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="external-metrics")

    def __enter__(self) -> Self:
        self._thread.start()
        # The aggregator takes an external name for an address, and loopback is no valid endpoint.
        service = {"metadata": {"name": "metrics"}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
        self._client.create("/api/v1/namespaces/kube-system/services", service)
        spec = {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": "kube-system", "name": "metrics", "port": self._server.server_address[1]},
        }
        self._client.create(self._registration, {"metadata": {"name": f"{VERSION}.{GROUP}"}, "spec": spec})
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.delete(f"{self._registration}/{VERSION}.{GROUP}")
        self._client.delete("/api/v1/namespaces/kube-system/services/metrics")
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    @property
    def _registration(self) -> str:
        return "/apis/apiregistration.k8s.io/v1/apiservices"

    def answer(self, path: str) -> Any:
        if path.rstrip("/") == ROOT:
            resource = {"name": METRIC, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            return {"kind": "APIResourceList", "groupVersion": f"{GROUP}/{VERSION}", "resources": [resource]}
        if path.endswith(f"/{METRIC}"):
            item = {"metricName": METRIC, "timestamp": "2026-01-01T00:00:00Z", "value": str(self.value)}
            return {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "items": [item]}
        return None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                told = stub.answer(self.path.partition("?")[0])
                body = json.dumps(told).encode()
                self.send_response(404 if told is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: object) -> None:
                pass

        return Handler
