"""`python -m sluice_operator`: one replica of the operator. Several may run; one of them leads."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
import uuid
from pathlib import Path

from sluice_operator.decide.lease import Timing
from sluice_operator.live.connection import Connection, ConnectionInvalid, from_kubeconfig, from_pod
from sluice_operator.live.ending import end
from sluice_operator.live.fleet import Fleet
from sluice_operator.live.fleet_client import LiveFleet
from sluice_operator.live.handlers import WatchSilent
from sluice_operator.live.run import Operator, Options
from sluice_operator.render.engine import USER
from sluice_operator.render.policies import DNS, HTTPS
from sluice_operator.render.revision import StandardRenderer

FAILED, SILENT = 1, 5
log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sluice_operator", description="The operator of ModelDeployments")
    parser.add_argument("--control-image", required=True, help="image of the gateways: the operator's own")
    parser.add_argument("--kubeconfig", type=Path, help="outside of a cluster")
    parser.add_argument("--namespace", action="append", default=[], help="serve only this one; may be repeated")
    parser.add_argument("--lease-namespace", default="", help="where the Lease is; default: the operator's own")
    parser.add_argument("--lease-name", default="sluice-operator", help="one for each release; its replicas share it")
    parser.add_argument("--nodes", action="store_true", help="look at nodes (needs the optional cluster role)")
    parser.add_argument(
        "--api-server-port",
        type=_port,
        action="append",
        default=[],
        help="NetworkPolicies let gateways go there; may be repeated; default: 443 and 6443",
    )
    parser.add_argument(
        "--dns-port",
        type=_port,
        action="append",
        default=[],
        help="NetworkPolicies let all pods go to name servers there; may be repeated; default: 53 (OpenShift: 5353)",
    )
    parser.add_argument(
        "--pod-user",
        type=_user,
        default=USER,
        help="user and group id of the pods, or 'none': the cluster chooses, as OpenShift wants it; default: 65532",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--resync-s", type=float, default=60.0, help="seconds from one full listing to the next")
    parser.add_argument("--probe-host", default="", help="default: every address, of IPv6 too")
    parser.add_argument("--probe-port", type=int, default=0, help="/livez and /status; 0: the system picks one")
    for name, default in (("duration", 20.0), ("deadline", 10.0), ("period", 2.0), ("call", 8.0)):
        parser.add_argument(f"--lease-{name}-s", type=float, default=default)
    return parser


def _user(text: str) -> int | None:
    """Raises ValueError."""
    if text == "none":
        return None
    if not 0 < (user := int(text)) < 1 << 31:
        raise ValueError(text)
    return user


def _port(text: str) -> int:
    """Raises ValueError."""
    port = int(text)
    if not 0 < port < 65536:
        raise ValueError(text)
    return port


def main(argv: list[str] | None = None, fleet: Fleet | None = None) -> int:
    """`fleet`: for tests whose pods only exist in the API."""
    args = parser().parse_args(argv)
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(level=args.log_level.upper(), format=form, stream=sys.stderr)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        connection = _connection(args.kubeconfig)
        options = _options(args, connection)
    except (ConnectionInvalid, ValueError) as error:
        print(f"sluice-operator: {error}", file=sys.stderr)
        return 2
    renderer = StandardRenderer(
        args.control_image, tuple(args.api_server_port) or HTTPS, tuple(args.dns_port) or DNS, args.pod_user
    )
    return asyncio.run(_run(connection, options, renderer, fleet or LiveFleet()))


async def _run(connection: Connection, options: Options, renderer: StandardRenderer, fleet: Fleet) -> int:
    """The exit status. Ends the process itself where a library's task does not let the loop end."""
    status = 0
    try:
        await Operator(connection, options, renderer, fleet).run()
    except WatchSilent as error:
        log.error("%s", error)
        status = SILENT
    except Exception:
        log.exception("the operator fails")
        status = FAILED
    finally:
        await fleet.close()
    if hung := await end(asyncio.all_tasks() - {asyncio.current_task()}):
        log.warning("left behind: %s", ", ".join(sorted(task.get_name() for task in hung)))
        logging.shutdown()
        os._exit(status)
    return status


def _connection(kubeconfig: Path | None) -> Connection:
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig)
    return from_pod(os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", ""))


def _options(args: argparse.Namespace, connection: Connection) -> Options:
    # A restarted container has the pod's name too, and is another life.
    name = os.environ.get("POD_NAME") or socket.gethostname()
    timing = Timing(args.lease_duration_s, args.lease_deadline_s, args.lease_period_s, args.lease_call_s)
    return Options(
        identity=f"{name}-{uuid.uuid4().hex[:8]}",
        lease_namespace=args.lease_namespace or connection.namespace,
        lease_name=args.lease_name,
        namespaces=tuple(args.namespace) or ("",),
        may_see_nodes=args.nodes,
        resync_s=args.resync_s,
        timing=timing,
        probe_host=args.probe_host,
        probe_port=args.probe_port,
    )


if __name__ == "__main__":
    sys.exit(main())
