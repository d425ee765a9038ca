"""An API server that is offered pod templates in dry runs, as far as TemplateCheck sees it."""

from __future__ import annotations

from operator_cluster import Cluster as Simulated
from operator_cluster import manifest, with_tag

from sluice_operator.decide.accept import parse
from sluice_operator.live.cluster import Conflict, Invalid
from sluice_operator.live.template_check import TemplateCheck
from sluice_operator.pod_fields import unknown_fields
from sluice_operator.render.revision import StandardRenderer


class Api:
    """Refuses unknown fields as the real one does. `lacks`: fields that ours may set, and that it does not know."""

    def __init__(self, lacks=(), invalid=""):
        self.lacks, self.invalid = lacks, invalid
        self.offered, self.labels = [], []

    async def create(self, item, **query):
        assert query["dryRun"] == "All"
        self.labels.append(item["metadata"]["labels"])
        self.offered.append((item["metadata"]["labels"]["sluice.dev/role"], query["fieldValidation"]))
        found = [p.path for p in unknown_fields(item["spec"]["template"], "spec.template")]
        found += [f"spec.template.spec.{name}" for name in self.lacks if name in item["spec"]["template"]["spec"]]
        if found and query["fieldValidation"] == "Strict":
            words = ", ".join(f'unknown field "{path}"' for path in found)
            raise Invalid(400, "BadRequest", f"cannot be handled as a Deployment: strict decoding error: {words}")
        if self.invalid:
            raise Invalid(422, "Invalid", self.invalid)
        raise Conflict(409, "AlreadyExists", "it is there")


async def look(api, seen, checked=None, renderer=None, **changes):
    spec = parse("m", manifest(image=with_tag("A"), **changes))
    assert not isinstance(spec, tuple), spec
    check = TemplateCheck(api, renderer or StandardRenderer("control:1"))
    said = await check.look(seen, spec, {} if checked is None else checked)
    return str(said["dry_run"] or ""), said["warning"]


def nothing():
    return Simulated(manifest(image=with_tag("A"))).observe()
