"""Fields of a pod template that Kubernetes does not know: it drops them without a word, typing errors among them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import Problem
from sluice_operator.names import PodRole
from sluice_operator.render.merge import KEYS

Object = Mapping[str, Any]
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


@cache
def _schema() -> Any:
    """See tools/house/pod_schema.py."""
    return json.loads((files("sluice_operator") / "pod_schema.json").read_text())


def schema_version() -> str:
    """Of the Kubernetes whose fields are known here."""
    return str(_schema()["kubernetes"])


def template_of(spec: ModelDeploymentSpec, role: PodRole) -> Object:
    templates: Mapping[PodRole, Object] = {
        PodRole.PREFILL: spec.prefill.template,
        PodRole.DECODE: spec.decode.template,
        PodRole.GATEWAY: spec.gateway.template,
    }
    return templates[role]


def unknown_fields(template: Object, path: str) -> Iterator[Problem]:
    """Those that the Kubernetes of `schema_version` does not have. `path`: of the template."""
    yield from _unknown(template, _schema()["root"], path)


def _unknown(value: object, kind: str, path: str) -> Iterator[Problem]:
    if kind.startswith("[]"):
        for number, item in enumerate(value if isinstance(value, list) else ()):
            yield from _unknown(item, kind[2:], f"{path}[{number}]")
    elif kind.startswith("{}"):
        for key, item in (value if isinstance(value, Mapping) else {}).items():
            yield from _unknown(item, kind[2:], f"{path}[{key}]")
    elif kind and isinstance(value, Mapping):
        fields = _schema()["types"][kind]
        for name, item in value.items():
            if name in fields:
                yield from _unknown(item, fields[name], f"{path}.{name}")
            else:
                yield Problem(
                    f"{path}.{name}", f"is no field that Kubernetes {schema_version()} has", _hint(name, fields)
                )


def _hint(name: str, fields: Mapping[str, str]) -> str:
    near = get_close_matches(str(name), fields, 1, 0.6)
    return f"did you mean {near[0]}?" if near else "correct or remove it"


def refused_fields(message: str, rendered: Object, template: Object, path: str) -> tuple[Problem, ...]:
    """Which fields of `template`, at `path` in the spec, the API server does not know: by the words with which it has
    refused a Deployment of the pod template `rendered` (strict field validation), less what we have put there."""
    told = []
    for found in _UNKNOWN.findall(message):
        where = _in_template(found.removeprefix("spec.template"), rendered, template)
        if where is not None:
            told.append(Problem(f"{path}{where}", "is no field that this cluster has", "correct or remove it"))
    return tuple(told)


def _in_template(path: str, rendered: Any, template: Any) -> str | None:
    """A path of the rendered template as one of the user's, whose list items may stand at other places."""
    steps, told, name = list(_STEP.findall(path)), "", ""
    for field, number in steps:
        if field:
            if not isinstance(template, Mapping) or field not in template:
                return None
            rendered = rendered.get(field) if isinstance(rendered, Mapping) else None
            template, told, name = template[field], f"{told}.{field}", field
            continue
        items = rendered if isinstance(rendered, list) else []
        item = items[int(number)] if int(number) < len(items) else None
        place = _place(item, template, KEYS.get(name, ""))
        if place is None:
            return None
        rendered, template, told = item, template[place], f"{told}[{place}]"
    return told


def _place(item: Any, theirs: Any, key: str) -> int | None:
    """Where an item of a rendered list stands in the template's."""
    for place, other in enumerate(theirs if isinstance(theirs, list) else ()):
        is_same = other == item
        if key and isinstance(item, Mapping) and isinstance(other, Mapping):
            is_same = other.get(key) == item.get(key)
        if is_same:
            return place
    return None
