"""charts/sluice/README.md: the table of values, from values.schema.json and values.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_HEADER = """\
# The operator's chart

<!-- Generated from values.schema.json and values.yaml by tools/house/chart_values.py (`make proto`). -->

```sh
helm install sluice-crds charts/sluice-crds -n sluice --create-namespace
helm install sluice charts/sluice -n sluice --wait --set-string image.repository=REPOSITORY,image.tag=TAG
helm test sluice -n sluice
```

How to use it: [docs/kubernetes.md](../../docs/kubernetes.md). A value that the table does not have is refused.

| value | type | default | meaning |
| --- | --- | --- | --- |
"""


def render_markdown(chart: Path) -> str:
    """Raises KeyError for a value without a default, or without a description."""
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    return _HEADER + "".join(f"{row}\n" for row in _rows(schema, values, ""))


def _rows(schema: Mapping[str, Any], values: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, member in schema["properties"].items():
        here = f"{path}{name}"
        if "properties" in member:
            yield from _rows(member, values[name], f"{here}.")
        elif here != "global":  # helm's own
            default = json.dumps(values[name])
            yield f"| `{here}` | {_type(member)} | `{default}` | {member['description']} |"


def _type(member: Mapping[str, Any]) -> str:
    if "enum" in member:
        return " / ".join(member["enum"])
    kind = _kind(member["type"])
    if kind == "array":
        return f"list of {_kind(member['items']['type'])}"
    if "minimum" in member:
        return f"{kind}, {member['minimum']}-{member['maximum']}"
    return kind


def _kind(told: str | list[str]) -> str:
    return told if isinstance(told, str) else " or ".join(told)
