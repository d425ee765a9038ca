"""Which nodes could take an engine's pod, and why the others cannot. No promise: the scheduler has the last word, and
its own message is quoted for pods that it leaves Pending."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_operator.api.enums import AcceleratorType, Allocation, ConditionStatus, DomainPolicy
from sluice_operator.api.spec import ModelDeploymentSpec
from sluice_operator.decide.observed import GPU_RESOURCE, Node, Pod, Taint
from sluice_operator.decide.reasons import Reason, cut, sentence, tell
from sluice_operator.names import ENGINE_ROLES, PodRole
from sluice_operator.placement.node_affinity import Term, required_terms, unmet

MAJOR_LABEL, PRODUCT_LABEL = "nvidia.com/gpu.compute.major", "nvidia.com/gpu.product"
# The scheduler's own check of a PreferNoSchedule taint is a preference.
HARD_EFFECTS = ("NoSchedule", "NoExecute")
# Of the scheduler's words in a message; status.placement.reasons has more of them.
MAX_QUOTE = 300
# What the node controllers write on a node that is not Ready, and on one that is cordoned.
NOT_READY_TAINT = Taint("node.kubernetes.io/not-ready")
CORDONED_TAINT = Taint("node.kubernetes.io/unschedulable")


@dataclass(frozen=True, slots=True)
class Request:
    """What one engine's pod asks of a node. `gpus`: 0 for CPU and for claims, which nodes do not count.

    `affinity`: alternatives of the template, see node_affinity. `domain`: the label that policy Required goes by, else
    empty."""

    role: PodRole
    replicas: int
    gpus: int
    majors: tuple[int, ...] = ()
    products: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: tuple[Term, ...] = ()
    domain: str = ""
    resource: str = GPU_RESOURCE


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node cannot take a pod. `problem`: the same text for the same problem, so that nodes can be counted by it.
    `detail`: what this node has instead. `passes`: only the node's present load is in the way."""

    problem: str
    detail: str
    passes: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One node and one role in the why-not table. `refusal` None: it matches."""

    node: str
    role: PodRole
    refusal: Refusal | None


@dataclass(frozen=True, slots=True)
class Placement:
    """`status`, `reason`, `message`: of the condition Placed. `matching`: nodes that could take either role."""

    status: ConditionStatus
    reason: Reason
    message: str
    matching: int = 0
    reasons: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()


def requests_of(spec: ModelDeploymentSpec) -> tuple[Request, ...]:
    return tuple(_request(spec, role) for role in ENGINE_ROLES)


def _request(spec: ModelDeploymentSpec, role: PodRole) -> Request:
    engine = spec.prefill if role is PodRole.PREFILL else spec.decode
    pod = engine.template.get("spec", {}) if isinstance(engine.template.get("spec", {}), Mapping) else {}
    gpu = spec.accelerator.gpu if spec.accelerator.type is AcceleratorType.GPU else None
    by_plugin = gpu is not None and gpu.allocation is Allocation.DEVICE_PLUGIN
    selector, tolerations = pod.get("nodeSelector"), pod.get("tolerations")
    return Request(
        role=role,
        replicas=engine.replicas,
        gpus=engine.parallelism.tensor if by_plugin else 0,
        majors=gpu.compute_major if gpu is not None and by_plugin else (),
        products=gpu.products if gpu is not None and by_plugin else (),
        selector=dict(selector) if isinstance(selector, Mapping) else {},
        tolerations=tuple(t for t in tolerations if isinstance(t, Mapping)) if isinstance(tolerations, list) else (),
        affinity=required_terms(pod),
        domain=gpu.domain.topology_key if gpu is not None and gpu.domain.policy is DomainPolicy.REQUIRED else "",
        resource=gpu.resource_name if gpu is not None else GPU_RESOURCE,
    )


# -- one node ---------------------------------------------------------------------------------------------------------

NodeCheck = Callable[[Node, Request], Refusal | None]


def _ready(node: Node, request: Request) -> Refusal | None:
    if node.ready or _is_tolerated(NOT_READY_TAINT, request):
        return None
    return Refusal("not Ready", "its condition Ready is not True")


def _cordoned(node: Node, request: Request) -> Refusal | None:
    if not node.cordoned or _is_tolerated(CORDONED_TAINT, request):
        return None
    return Refusal("cordoned", "spec.unschedulable is true")


def _tainted(node: Node, request: Request) -> Refusal | None:
    bad = [taint for taint in node.taints if taint.effect in HARD_EFFECTS and not _is_tolerated(taint, request)]
    if not bad:
        return None
    taint = bad[0]
    return Refusal(f"taint {taint.key} is not tolerated", f"{taint.key}={taint.value}:{taint.effect}")


def _selected(node: Node, request: Request) -> Refusal | None:
    for key, value in sorted(request.selector.items()):
        if node.labels.get(key) != value:
            return Refusal(f"label {key} is not {value}", node.labels.get(key, "label is missing"))
    return None


def _required(node: Node, request: Request) -> Refusal | None:
    told = unmet(request.affinity, node)
    return Refusal("the template's node affinity is not met", told) if told else None


def _has_gpu(node: Node, request: Request) -> Refusal | None:
    if request.gpus and not node.offers(request.resource):
        return Refusal(f"no {request.resource}", "it offers none")
    return None


def _discovered(node: Node, request: Request) -> Refusal | None:
    wanted = [(MAJOR_LABEL, request.majors), (PRODUCT_LABEL, request.products)]
    missing = [label for label, values in wanted if values and label not in node.labels]
    return Refusal("no labels of GPU Feature Discovery", f"{missing[0]} is missing") if missing else None


def _major(node: Node, request: Request) -> Refusal | None:
    found = node.labels.get(MAJOR_LABEL, "")
    if not request.majors or found in [str(major) for major in request.majors]:
        return None
    return Refusal(
        f"compute major is not {_any_of(request.majors)}", f"{found} ({node.labels.get(PRODUCT_LABEL, '?')})"
    )


def _product(node: Node, request: Request) -> Refusal | None:
    found = node.labels.get(PRODUCT_LABEL, "")
    if not request.products or found in request.products:
        return None
    return Refusal(f"product is not {_any_of(request.products)}", found)


def _in_domain(node: Node, request: Request) -> Refusal | None:
    if not request.domain or request.domain in node.labels:
        return None
    return Refusal(f"no label {request.domain}", "it has no NVLink domain")


def _large_enough(node: Node, request: Request) -> Refusal | None:
    has = node.offers(request.resource)
    return None if has >= request.gpus else Refusal(f"fewer than {request.gpus} GPUs", f"{has}")


def _free(node: Node, request: Request) -> Refusal | None:
    """Of other names than the usual one it is not known how many are free: the scheduler tells."""
    if request.resource != GPU_RESOURCE or node.free_gpus is None or node.free_gpus >= request.gpus:
        return None
    problem = "no free GPU" if request.gpus == 1 else f"fewer than {request.gpus} free GPUs"
    return Refusal(problem, f"{node.free_gpus} of {node.gpus} are free", passes=True)


CHECKS: tuple[NodeCheck, ...] = (
    _ready,
    _cordoned,
    _tainted,
    _selected,
    _required,
    _has_gpu,
    _discovered,
    _major,
    _product,
    _in_domain,
    _large_enough,
    _free,
)


_UNLESS_FULL = tuple(check for check in CHECKS if check is not _free)


def why_not(node: Node, request: Request, checks: Sequence[NodeCheck] = CHECKS) -> Refusal | None:
    return next((refusal for check in checks if (refusal := check(node, request)) is not None), None)


def _is_tolerated(taint: Taint, request: Request) -> bool:
    return any(tolerates(toleration, taint) for toleration in request.tolerations)


def tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """As the scheduler does."""
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    key = toleration.get("key") or ""
    if toleration.get("operator", "Equal") == "Exists":
        return key in ("", taint.key)
    return bool(key == taint.key and (toleration.get("value") or "") == taint.value)


# -- all nodes --------------------------------------------------------------------------------------------------------


def place(spec: ModelDeploymentSpec, nodes: Sequence[Node] | None, pods: Iterable[Pod]) -> Placement:
    """The first thing that is wrong, in the order in which somebody would want to know."""
    quotes = scheduler_quotes(pods)
    if nodes is None and quotes:
        text = tell(Reason.UNSCHEDULABLE, _quoted(quotes))
        return Placement(ConditionStatus.FALSE, Reason.UNSCHEDULABLE, text, 0, quotes)
    if nodes is None:
        return Placement(ConditionStatus.UNKNOWN, Reason.NODES_UNKNOWN, tell(Reason.NODES_UNKNOWN))
    requests = [request for request in requests_of(spec) if request.replicas]
    rows = tuple(Row(node.name, request.role, why_not(node, request)) for request in requests for node in nodes)
    fits = {row.node for row in rows if row.refusal is None}
    matching = len({row.node for row in rows if row.refusal is None or row.refusal.passes})
    # Status has room for a few only, and what the scheduler says is worth most.
    reasons = (*quotes, *_counted(rows))

    def no(reason: Reason, detail: str) -> Placement:
        return Placement(ConditionStatus.FALSE, reason, tell(reason, detail), matching, reasons, rows)

    if detail := _too_large(requests, nodes):
        return no(Reason.TENSOR_EXCEEDS_NODE, detail)
    if detail := _unmatched(requests, rows):
        return no(Reason.NO_NODE_MATCHES, detail)
    if detail := _domain_too_small(requests, nodes):
        return no(Reason.DOMAIN_TOO_SMALL, detail)
    if quotes:
        return no(Reason.UNSCHEDULABLE, _quoted(quotes))
    full = "" if fits or not requests else " (all of them are full now)"
    message = f"{matching} of {_nodes(len(nodes))} can be used{full}."
    return Placement(ConditionStatus.TRUE, Reason.PLACED, message, matching, reasons, rows)


def scheduler_quotes(pods: Iterable[Pod]) -> tuple[str, ...]:
    """The scheduler's own words, once each, with one pod that they are about."""
    told = {pod.unschedulable: pod.name for pod in pods if not pod.node and pod.unschedulable and pod.is_member}
    return tuple(f"Pod {name}: {words}" for words, name in sorted(told.items()))


def _quoted(quotes: Sequence[str]) -> str:
    """One of them, for a message holds no two, and not so much of it that the remedy is cut off."""
    first = sentence(cut(quotes[0], MAX_QUOTE))
    more = f" (And {len(quotes) - 1} more in status.placement.reasons.)" if len(quotes) > 1 else ""
    return first + more


def _counted(rows: Iterable[Row]) -> tuple[str, ...]:
    """The why-not table in short: for each problem, of how many nodes it is the first."""
    counts = Counter((row.role, row.refusal.problem) for row in rows if row.refusal is not None)
    return tuple(f"{role}: {_unusable(n, what)}" for (role, what), n in sorted(counts.items()))


def _unusable(count: int, what: str) -> str:
    return f"{_nodes(count)} cannot be used: {what}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _too_large(requests: Iterable[Request], nodes: Sequence[Node]) -> str:
    """Only if nodes match but for their size: else what does not match is the news."""
    for request in requests:
        sizes = [
            n.offers(request.resource)
            for n in nodes
            if why_not(n, request, [c for c in CHECKS if c not in (_large_enough, _free)]) is None
        ]
        if sizes and max(sizes) < request.gpus:
            return f"{request.role}: {request.gpus} ranks, and the largest matching node has {max(sizes)} GPUs."
    return ""


def _unmatched(requests: Iterable[Request], rows: Sequence[Row]) -> str:
    for request in requests:
        mine = [row for row in rows if row.role is request.role]
        if all(row.refusal is not None and not row.refusal.passes for row in mine):
            counts = Counter(row.refusal.problem for row in mine if row.refusal is not None)
            told = "; ".join(_unusable(count, what) for what, count in sorted(counts.items()))
            return f"{request.role}: {told or 'there are no nodes'}."
    return ""


def _domain_too_small(requests: Sequence[Request], nodes: Sequence[Node]) -> str:
    """Whether some domain could hold all engines, were its GPUs free: the sum over its nodes of whole engines."""
    key = next((request.domain for request in requests if request.domain), "")
    if not key or not any(request.gpus for request in requests):
        return ""
    domains: dict[str, list[_Room]] = defaultdict(list)
    for node in nodes:
        roles = frozenset(r.role for r in requests if why_not(node, r, _UNLESS_FULL) is None)
        if roles:
            domains[node.labels[key]].append(_Room(node.offers(requests[0].resource), roles))
    need = sorted(((r.gpus, r.role) for r in requests for _ in range(r.replicas)), reverse=True)
    if any(_fits(rooms, need) for rooms in domains.values()):
        return ""
    largest = max(sum(room.gpus for room in rooms) for rooms in domains.values())
    asked = sum(gpus for gpus, _ in need)
    return f"{len(need)} engines ask for {asked} GPUs; the largest domain by {key} has {largest}."


@dataclass(frozen=True, slots=True)
class _Room:
    """A node that these roles may use."""

    gpus: int
    roles: frozenset[PodRole]


def _fits(rooms: Iterable[_Room], need: Sequence[tuple[int, PodRole]]) -> bool:
    """First fit, largest first, on nodes that few roles may use first: exact where all engines are of one size or sizes
    divide each other, and all nodes are for both roles or each for one."""
    left = sorted(rooms, key=lambda room: (len(room.roles), -room.gpus))
    for gpus, role in need:
        index = next((i for i, room in enumerate(left) if role in room.roles and room.gpus >= gpus), None)
        if index is None:
            return False
        left[index] = _Room(left[index].gpus - gpus, left[index].roles)
    return True


def _any_of(values: Sequence[object]) -> str:
    listed = ", ".join(str(value) for value in values)
    return listed if len(values) == 1 else f"one of {listed}"
