"""What the API server says of pod templates, asked by dry runs with strict field validation: once for each.

A template that is new is refused for a field that the cluster does not have: it would vanish without a word. One that
was accepted before, by an operator that did not ask, goes on to be served, with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypedDict

from sluice_operator.api.enums import ConditionStatus
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import Problem
from sluice_operator.decide.observed import Observed
from sluice_operator.live.cluster import Cluster, Conflict, Failed, Forbidden, Invalid, Refused
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.pod_fields import refused_fields, template_of, unknown_fields
from sluice_operator.render.children import OwnerRef, engine_objects, gateway_deployment
from sluice_operator.render.revision import Renderer, gateway_hash, revision_hash, role_data

Object = Mapping[str, Any]
log = logging.getLogger(__name__)
# The API server says so before it looks at values, and then says nothing of these.
_DENIED = re.compile(
    r"admission webhook \"[^\"]*\" denied the request|ValidatingAdmissionPolicy '[^']*' .*denied request"
)
STRICT, LENIENT = "Strict", "Ignore"


class Said(TypedDict):
    """Members of Observed."""

    dry_run: Problem | None
    warning: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A Deployment to be tried. `key`: equal for equal templates. `is_new`: nobody has accepted its template yet."""

    role: PodRole
    key: str
    deployment: Object
    is_new: bool


class TemplateCheck:
    def __init__(self, cluster: Cluster, renderer: Renderer) -> None:
        self._cluster, self._renderer = cluster, renderer

    async def look(self, seen: Observed, spec: ModelDeploymentSpec, checked: MutableMapping[str, str]) -> Said:
        """`checked`: by key, what was said of those that may be served: nothing, or a warning. Grows."""
        try:
            offers = tuple(self._offers(seen, spec))
        except Exception as error:
            # Plan renders the same, fails over it too, and has it told.
            log.warning("%s/%s: no dry run: %r", seen.namespace, seen.name, error)
            return Said(dry_run=None, warning="")
        for offer in offers:
            if offer.key in checked:
                continue
            problem, warning = await self._try(offer, spec)
            if problem is not None:
                return Said(dry_run=problem, warning="")
            checked[offer.key] = warning
        warnings = dict.fromkeys(checked[offer.key] for offer in offers)
        return Said(dry_run=None, warning=" ".join(filter(None, warnings)))

    def _offers(self, seen: Observed, spec: ModelDeploymentSpec) -> Iterator[Offer]:
        """What has not run here before, and what would lose fields."""
        owner = OwnerRef(seen.namespace, seen.name, seen.uid, spec.metadata)
        wanted, gateway = revision_hash(spec), gateway_hash(spec, self._renderer)
        is_new = wanted not in {revision.hash for revision in seen.revisions}
        for role in ENGINE_ROLES:
            if is_new or _has_unknown(spec, role):
                data = role_data(self._renderer.engine(seen.name, spec, wanted), role)
                (made,) = (i for i in engine_objects(owner, role, wanted, data) if i["kind"] == "Deployment")
                yield Offer(role, f"{role} {wanted} {is_new}", _free(made, seen.name, role), is_new)
        there = next((w for w in seen.workloads if w.role is PodRole.GATEWAY), None)
        if there is None or there.revision != gateway or _has_unknown(spec, PodRole.GATEWAY):
            # Another operator renders another template of the same spec: that one was accepted all the same.
            is_new = there is None or (there.revision != gateway and not _is_accepted(seen))
            made = gateway_deployment(owner, 0, gateway, self._renderer.gateway(seen.name, spec, gateway))
            yield Offer(PodRole.GATEWAY, f"gateway {gateway} {is_new}", _free(made, seen.name, PodRole.GATEWAY), is_new)

    async def _try(self, offer: Offer, spec: ModelDeploymentSpec) -> tuple[Problem | None, str]:
        """(why it is refused, what to warn of)."""
        strict = await self._refusal(offer.deployment, STRICT)
        if strict is None:
            return None, ""
        path = f"spec.{offer.role}.template"
        rendered = offer.deployment["spec"]["template"]
        unknown = refused_fields(strict.message, rendered, template_of(spec, offer.role), path)
        if unknown and offer.is_new:
            paths = ", ".join(problem.path for problem in unknown)
            return Problem(paths, unknown[0].problem, unknown[0].remedy), ""
        # What is left of the refusal may be a field of ours that an old API server does not know.
        other = await self._refusal(offer.deployment, LENIENT) if "strict decoding error" in strict.message else strict
        if other is not None:
            return Problem("spec", other.message, "correct the template"), ""
        return None, " ".join(f"{problem.path} {problem.problem}, and is without effect." for problem in unknown)

    async def _refusal(self, deployment: Object, validation: str) -> Invalid | None:
        try:
            await self._cluster.create(deployment, dryRun="All", fieldValidation=validation)
        except (Conflict, Forbidden, Failed):
            # A quota or a webhook says the same when the object is made in earnest, and is told as WriteRefused.
            return None
        except Invalid as error:
            return None if is_denial(error.message) else error
        except Refused as error:
            if not is_denial(error.message):
                raise
        return None


def is_denial(message: str) -> bool:
    """Whether an admission webhook or a ValidatingAdmissionPolicy refuses, with whatever code it likes. It judges the
    whole object, so this is no fault of a template, and passes when the policy or the labels change."""
    return _DENIED.search(message) is not None


def _has_unknown(spec: ModelDeploymentSpec, role: PodRole) -> bool:
    """By our own table: only then is it worth a question of what has run for long."""
    return any(True for _ in unknown_fields(template_of(spec, role), ""))


def _is_accepted(seen: Observed) -> bool:
    """The spec as it is now, by an earlier look; taken for so where status has been lost."""
    accepted = next((c for c in seen.status.conditions if c.type == "Accepted"), None)
    if accepted is None:
        return True
    return accepted.status is ConditionStatus.TRUE and seen.status.observed_generation == seen.generation


def _free(deployment: Object, name: str, role: PodRole) -> Object:
    """Under a name that is free: only the template is in question."""
    return {**deployment, "metadata": {**deployment["metadata"], "name": f"{name}-{role}-dry-run"}}
