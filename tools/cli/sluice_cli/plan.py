"""`sluice plan`: what the operator would do with a ModelDeployment, and where its pods could go. Asks no cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class PlanError(ValueError):
    """A file that holds something else than it should; names it and what would."""


@dataclass(frozen=True, slots=True)
class Manifest:
    namespace: str
    name: str
    spec: object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "print what the operator would do with a ModelDeployment, and which nodes could take its pods"
    parser.add_argument(
        "-f", "--file", type=Path, required=True, metavar="MDEP", help="a ModelDeployment (YAML); -: stdin"
    )
    parser.add_argument(
        "--nodes",
        type=Path,
        metavar="NODES",
        help="nodes, as `kubectl get nodes -o yaml` prints them: adds the why-not table; with their pods, as"
        " `kubectl get nodes,pods -A -o yaml` does, it knows which GPUs are free",
    )
    parser.add_argument(
        "--from", dest="running", type=Path, metavar="OLD", help="the ModelDeployment that runs now: plan the rollout"
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "yaml"), default="text",
        help="yaml: print the objects that the operator would make, instead of the steps",
    )  # fmt: skip
    parser.add_argument("--control-image", default="sluice-control:dev", help="of operator and gateway")


def run(args: argparse.Namespace) -> int:
    try:
        wanted = read_manifest(args.file)
        nodes = None if args.nodes is None else read_documents(args.nodes)
        running = None if args.running is None else read_manifest(args.running)
    except (OSError, PlanError) as error:
        print(f"sluice plan: {error}", file=sys.stderr)
        return 2
    if args.output == "yaml":
        return _print_objects(wanted, args)
    from sluice_operator import offline

    lines = offline.report(wanted.namespace, wanted.name, wanted.spec, nodes, args.control_image)
    status = 0
    for line in lines:
        print(line.text)
        status = max(status, line.status)
    if running is not None and status == 0:
        for text in offline.rollout_report(wanted.name, running.spec, wanted.spec):
            print(text)
    return status


def _print_objects(wanted: Manifest, args: argparse.Namespace) -> int:
    if args.nodes is not None or args.running is not None:
        print("sluice plan: -o yaml prints objects alone: leave --nodes and --from out", file=sys.stderr)
        return 2
    import yaml

    from sluice_operator import offline

    try:
        objects = offline.objects(wanted.namespace, wanted.name, wanted.spec, args.control_image)
    except offline.NotAccepted as error:
        print("sluice plan: not accepted", *error.problems, sep="\n  ", file=sys.stderr)
        return 1
    print(yaml.safe_dump_all(map(_plain, objects), sort_keys=False), end="")
    return 0


def _plain(value: Any) -> Any:
    """Without types and shared parts that YAML would name."""
    return json.loads(json.dumps(value))


def read_manifest(path: Path) -> Manifest:
    """Raises PlanError, OSError."""
    documents = [d for d in read_documents(path) if d.get("kind") == "ModelDeployment"]
    if len(documents) != 1:
        raise PlanError(f"{path} holds {len(documents)} ModelDeployments; give a file with one")
    meta = documents[0].get("metadata")
    name = meta.get("name") if isinstance(meta, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(name, str):
        raise PlanError(f"{path}: metadata.name is missing; set it")
    return Manifest(str(meta.get("namespace") or "default"), name, documents[0].get("spec"))


def read_documents(path: Path) -> Sequence[Mapping[str, Any]]:
    """All objects of a YAML file, those inside lists too. Raises PlanError, OSError."""
    try:
        import yaml
    except ImportError as error:
        raise PlanError("reading YAML needs PyYAML: pip install 'sluice-serve[operator]'") from error
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        return list(_objects(yaml.safe_load_all(text), path))
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is no YAML: {error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is no text: {error}") from error


def _objects(documents: Iterator[Any], path: Path) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, Mapping):
            raise PlanError(f"{path} holds something that is no Kubernetes object; give YAML with kind and metadata")
        items = document.get("items")
        if isinstance(items, list):
            yield from _objects(iter(items), path)
        else:
            yield document
