"""Write operator/sluice_operator/pod_schema.json: the names of all fields of a pod template, from Kubernetes' own
OpenAPI.

Usage: pod_schema.py VERSION OPENAPI, for instance

    go mod download -json k8s.io/kubernetes@v1.37.2        # prints Dir
    python tools/house/pod_schema.py 1.37.2 DIR/api/openapi-spec/v3/apis__apps__v1_openapi.json

`types`: by name, the fields of each object and what stands in them: a type of this table, a list (`[]`) or map (`{}`)
of one, or nothing where any JSON may stand (scalars, maps of scalars).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = "PodTemplateSpec"
OUT = Path(__file__).resolve().parents[2] / "operator" / "sluice_operator" / "pod_schema.json"
Object = Mapping[str, Any]


def collect(schemas: Mapping[str, Object]) -> dict[str, dict[str, str]]:
    by_short = {name.rpartition(".")[2]: schema for name, schema in schemas.items()}
    types: dict[str, dict[str, str]] = {}
    todo = [ROOT]
    while todo:
        name = todo.pop()
        if name in types:
            continue
        fields = by_short[name].get("properties", {})
        types[name] = {field: _kind(schema, by_short) for field, schema in sorted(fields.items())}
        todo += [kind.lstrip("[]{}") for kind in types[name].values() if kind]
    return dict(sorted(types.items()))


def _kind(schema: Object, by_short: Mapping[str, Object]) -> str:
    if "items" in schema:
        inner = _kind(schema["items"], by_short)
        return f"[]{inner}" if inner else ""
    if isinstance(schema.get("additionalProperties"), Mapping):
        inner = _kind(schema["additionalProperties"], by_short)
        return f"{{}}{inner}" if inner else ""
    parts = [schema, *schema.get("allOf", ())]
    found = next((part["$ref"].rpartition(".")[2] for part in parts if "$ref" in part), "")
    # Quantities, times and the like are no objects, and of some objects nothing is said.
    return found if found and by_short[found].get("properties") else ""


def main() -> int:
    version, source = sys.argv[1], Path(sys.argv[2])
    schemas = json.loads(source.read_text())["components"]["schemas"]
    told = {"kubernetes": version, "root": ROOT, "types": collect(schemas)}
    OUT.write_text(json.dumps(told, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"wrote {OUT}: {len(told['types'])} types")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
