"""Required node affinity of a pod template, held against one node as the scheduler does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluice_operator.decide.observed import Node

Term = Mapping[str, Any]
_NAME_FIELD = "metadata.name"


def required_terms(pod: Mapping[str, Any]) -> tuple[Term, ...]:
    """The alternatives of a pod spec; none if nothing is required, or if it has no shape: the API server refuses it."""
    value: object = pod
    for name in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"):
        value = value.get(name) if isinstance(value, Mapping) else None
    terms = value if isinstance(value, list) else []
    return tuple(terms) if all(_is_term(term) for term in terms) else ()


def unmet(terms: Sequence[Term], node: Node) -> str:
    """What `node` lacks for the first of the alternatives; empty if it fulfils any of them."""
    told = [_unmet(term, node) for term in terms]
    return told[0] if told and all(told) else ""


def _unmet(term: Term, node: Node) -> str:
    fields = {_NAME_FIELD: node.name}
    for part, known in (("matchExpressions", node.labels), ("matchFields", fields)):
        for told in term.get(part) or []:
            found = known.get(told["key"])
            values = [str(value) for value in _items(told.get("values"))]
            if not _OPERATORS[told["operator"]](found, values):
                wanted = f"{told['key']} {told['operator']} {', '.join(values)}".rstrip()
                return f"{wanted}: {'label is missing' if found is None else found}"
    # A term without any requirement matches no node.
    return "" if any(term.get(part) for part in ("matchExpressions", "matchFields")) else "a term without requirements"


def _greater(found: str | None, values: list[str], sign: int) -> bool:
    try:
        return found is not None and sign * (int(found) - int(values[0])) > 0
    except (ValueError, IndexError):
        return False


_OPERATORS: Mapping[str, Callable[[str | None, list[str]], bool]] = {
    "In": lambda found, values: found in values,
    "NotIn": lambda found, values: found not in values,
    "Exists": lambda found, values: found is not None,
    "DoesNotExist": lambda found, values: found is None,
    "Gt": lambda found, values: _greater(found, values, 1),
    "Lt": lambda found, values: _greater(found, values, -1),
}


def _is_term(term: object) -> bool:
    if not isinstance(term, Mapping):
        return False
    parts = [term.get(part) or [] for part in ("matchExpressions", "matchFields")]
    return all(isinstance(part, list) and all(_is_requirement(told) for told in part) for part in parts)


def _is_requirement(told: object) -> bool:
    if not isinstance(told, Mapping):
        return False
    return isinstance(told.get("key"), str) and any(told.get("operator") == known for known in _OPERATORS)


def _items(value: object) -> list[object]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
