"""Regenerate what is generated from something else; `--check` fails when a committed file is stale.

Usage: generate.py [--check]
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

import chart_values
import dashboards
import metrics_page
from grpc_tools import protoc

from sluice_operator.api import crd, reference
from sluice_operator.decide import reasons
from sluice_protocol import handoff

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ("sluice_protocol/v1/engine.proto", "sluice_protocol/v1/fleet.proto", "sluice_protocol/v1/source.proto")


def render_protos() -> dict[str, str]:
    """Path below the root -> text, for every file that protoc and its plugins write."""
    include = str(files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as out:
        for proto in PROTOS:
            flags = [f"-I{ROOT / 'protocol'}", f"-I{include}", f"--python_out={out}", f"--mypy_out={out}"]
            if protoc.main(["protoc", *flags, f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", proto]) != 0:
                raise SystemExit(f"protoc failed on {proto}")
        return {
            f"protocol/{path.relative_to(out)}": path.read_text()
            for path in sorted(Path(out).rglob("*"))
            if path.is_file()
        }


def main() -> int:
    rendered = render_protos() | {
        "docs/protocol.md": handoff.render_markdown(),
        "docs/metrics.md": metrics_page.render_markdown(),
        "docs/modeldeployment.md": reference.render_markdown(),
        "docs/kubernetes/troubleshooting.md": reasons.render_troubleshooting(),
        "charts/sluice-crds/templates/modeldeployments.yaml": crd.render_yaml(),
        "charts/sluice/README.md": chart_values.render_markdown(ROOT / "charts" / "sluice"),
        **{
            f"charts/sluice/monitoring/dashboards/{name}.json": dashboards.render_json(dashboard)
            for name, dashboard in dashboards.DASHBOARDS.items()
        },
    }
    stale = [name for name, text in rendered.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"stale: {name} (run `make proto`)", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(rendered[name])
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
