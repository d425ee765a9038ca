"""What `sluice plan` says: the operator's own functions over a file instead of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sluice_operator.api.enums import ConditionStatus, ScalingMode
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.api.value import Invalid, Problem, from_json
from sluice_operator.decide.accept import parse
from sluice_operator.decide.actions import Action, Apply, Certify, EnsureSecret
from sluice_operator.decide.groups import Group, RolloutView, capacity
from sluice_operator.decide.observed import Memory, Observed
from sluice_operator.decide.plan import defect, plan
from sluice_operator.decide.reasons import Reason
from sluice_operator.decide.rollout import Grow, Regrow, is_complete, step
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.placement.node import read_node, used_gpus
from sluice_operator.placement.placement import Row, place
from sluice_operator.pod_fields import template_of, unknown_fields
from sluice_operator.render.children import OwnerRef, engine_objects
from sluice_operator.render.revision import StandardRenderer, revision_hash, role_data

# Nothing here takes that many steps; a rollout that does has a defect.
MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Line:
    """`status`: what the command should exit with for its sake; 1: not accepted, or no place for its pods."""

    text: str
    status: int = 0


class NotAccepted(ValueError):
    """`problems`: what speaks against the spec, a line each."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def report(
    namespace: str, name: str, raw: object, nodes: Sequence[Mapping[str, Any]] | None, control_image: str
) -> Iterator[Line]:
    spec = parse(name, raw)
    if isinstance(spec, tuple):
        yield Line("Accepted: False", 1)
        yield from (Line(f"  {reason}: {problem}") for reason, problem in spec)
        yield from _placed_all_the_same(raw, nodes)
        return
    if problems := tuple(_unknown_fields(spec)):
        yield Line("Accepted: False", 1)
        yield from (Line(f"  {Reason.TEMPLATE_INVALID}: {problem}") for problem in problems)
        yield from _placement(spec, nodes)
        return
    revision = revision_hash(spec)
    try:
        steps = tuple(_first_steps(namespace, name, spec, control_image))
    except Exception as error:
        reason, problem = defect(error)
        yield Line("Accepted: False", 1)
        yield Line(f"  {reason}: {problem}")
        return
    yield Line("Accepted: True")
    yield Line(f"revision {revision}")
    yield Line("")
    yield Line("first steps, in a namespace that has nothing of it:")
    yield from (Line(f"  {step}") for step in steps)
    yield from _placement(spec, nodes)


def objects(namespace: str, name: str, raw: object, control_image: str) -> tuple[Mapping[str, Any], ...]:
    """All that the operator would make, as it is in the end; without owner references, for the ModelDeployment has no
    uid yet, and without Secrets, for only the operator knows what is in them. Raises NotAccepted."""
    spec = parse(name, raw)
    if isinstance(spec, tuple):
        raise NotAccepted(tuple(f"{reason}: {problem}" for reason, problem in spec))
    if problems := tuple(_unknown_fields(spec)):
        raise NotAccepted(tuple(f"{Reason.TEMPLATE_INVALID}: {problem}" for problem in problems))
    try:
        made = [action.object for action in _first_actions(namespace, name, spec, control_image)
                if isinstance(action, Apply)]  # fmt: skip
        made += _engine_objects(namespace, name, spec, control_image)
    except Exception as error:
        reason, problem = defect(error)
        raise NotAccepted((f"{reason}: {problem}",)) from error
    return tuple(_without_owner(item) for item in made)


def _without_owner(item: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = {key: value for key, value in item["metadata"].items() if key != "ownerReferences"}
    return {**item, "metadata": meta}


def _unknown_fields(spec: ModelDeploymentSpec) -> Iterator[Problem]:
    for role in PodRole:
        yield from unknown_fields(template_of(spec, role), f"spec.{role}.template")


def rollout_report(name: str, old_raw: object, new_raw: object) -> Iterator[str]:
    """The steps from what runs to what is wanted, if every new pod becomes ready."""
    old, new = parse(name, old_raw), parse(name, new_raw)
    if isinstance(old, tuple) or isinstance(new, tuple):
        yield "no rollout: one of the two is not accepted"
        return
    before, after = revision_hash(old), revision_hash(new)
    yield ""
    if before == after:
        yield f"no rollout: revision {after} stays, no engine restarts"
    else:
        yield f"rollout from {before} to {after}:"
    yield from (f"  {text}" for text in _rollout(old, _with_kept_replicas(old, new, new_raw), before, after))


def _with_kept_replicas(old: ModelDeploymentSpec, new: ModelDeploymentSpec, raw: object) -> ModelDeploymentSpec:
    """What the autoscaler has set stays where the file says nothing, as with `kubectl apply` of one that never did."""
    decode = raw.get("decode") if isinstance(raw, Mapping) else None
    is_told = isinstance(decode, Mapping) and decode.get("replicas") is not None
    if is_told or new.decode.scaling.mode is not ScalingMode.AUTO:
        return new
    return replace(new, decode=replace(new.decode, replicas=old.decode.replicas))


def _first_steps(namespace: str, name: str, spec: ModelDeploymentSpec, control_image: str) -> Iterator[str]:
    for action in _first_actions(namespace, name, spec, control_image):
        if isinstance(action, Apply | EnsureSecret | Certify):
            yield str(action)
    for item in _engine_objects(namespace, name, spec, control_image):
        yield f"apply {item['kind']} {item['metadata']['name']}"
    for role, wanted in _wanted(spec).items():
        yield f"scale {role} from 0 to {wanted}"


def _first_actions(namespace: str, name: str, spec: ModelDeploymentSpec, control_image: str) -> tuple[Action, ...]:
    observed = Observed(namespace, name, "", 1, Memory(0.0))
    return plan(spec, observed, 0.0, StandardRenderer(control_image))


def _engine_objects(
    namespace: str, name: str, spec: ModelDeploymentSpec, control_image: str
) -> Iterator[Mapping[str, Any]]:
    """With the replicas that they have in the end."""
    revision, owner = revision_hash(spec), OwnerRef(namespace, name, "", spec.metadata)
    data = StandardRenderer(control_image).engine(name, spec, revision)
    for role, wanted in _wanted(spec).items():
        for item in engine_objects(owner, role, revision, role_data(data, role)):
            is_deployment = item["kind"] == "Deployment"
            yield {**item, "spec": {**item["spec"], "replicas": wanted}} if is_deployment else item


def _wanted(spec: ModelDeploymentSpec) -> dict[PodRole, int]:
    return {PodRole.PREFILL: spec.prefill.replicas, PodRole.DECODE: spec.decode.replicas}


def _rollout(old: ModelDeploymentSpec, new: ModelDeploymentSpec, before: str, after: str) -> Iterator[str]:
    running = _wanted(old)
    groups = tuple(Group(role, before, before, n, n) for role, n in running.items())
    if before != after:
        groups += tuple(Group(role, after, after, 0, 0) for role in ENGINE_ROLES)
    view = RolloutView(_wanted(new), new.rollout.max_surge, new.rollout.max_unavailable, after, groups)
    for _ in range(MAX_STEPS):
        moves = step(view)
        if is_complete(view) or not moves:
            return
        for move in moves:
            assert not isinstance(move, Regrow), "no pod is lost here"
            if isinstance(move, Grow):
                yield f"grow {move.role} of {after} to {move.replicas}, wait until all gateways route to them"
                view = _with(view, move.role, after, move.replicas)
            else:
                there = next(g for g in view.groups if (g.role, g.revision) == (move.role, move.revision))
                yield f"drain one {move.role} of {move.revision}, then shrink to {there.replicas - 1}"
                view = _with(view, move.role, move.revision, there.replicas - 1)
        yield f"  capacity {float(capacity(view.groups, view.wanted)):.0%}, pods {_pods(view)}"


def _with(view: RolloutView, role: PodRole, revision: str, replicas: int) -> RolloutView:
    groups = tuple(
        replace(g, replicas=replicas, useful=replicas) if (g.role, g.revision) == (role, revision) else g
        for g in view.groups
    )
    return replace(view, groups=groups)


def _pods(view: RolloutView) -> str:
    return ", ".join(f"{sum(g.replicas for g in view.groups if g.role is role)} {role}" for role in ENGINE_ROLES)


def _placed_all_the_same(raw: object, nodes: Sequence[Mapping[str, Any]] | None) -> Iterator[Line]:
    """Where a spec could go that is not accepted yet, such as one with several ranks."""
    try:
        spec = from_json(ModelDeploymentSpec, raw, "spec")
    except Invalid:
        return
    yield from _placement(spec, nodes)


def _placement(spec: ModelDeploymentSpec, raw_nodes: Sequence[Mapping[str, Any]] | None) -> Iterator[Line]:
    if raw_nodes is None:
        return
    pods = [item for item in raw_nodes if item.get("kind") == "Pod"]
    used = used_gpus(pods)
    nodes = [read_node(item) for item in raw_nodes if item.get("kind", "Node") == "Node"]
    if pods:
        # What is free can only be said by who has seen who uses it.
        nodes = [replace(node, free_gpus=node.gpus - used.get(node.name, 0)) for node in nodes]
    placement = place(spec, nodes, ())
    is_placed = placement.status is ConditionStatus.TRUE
    yield Line("")
    yield Line(f"Placed: {placement.status} ({placement.reason}): {placement.message}", 0 if is_placed else 1)
    width = max((len(node.name) for node in nodes), default=0)
    yield from (Line(f"  {row.node:<{width}}  {row.role:<8} {_why(row)}") for row in placement.rows)


def _why(row: Row) -> str:
    return "matches" if row.refusal is None else f"no: {row.refusal.problem}: {row.refusal.detail}"
