"""`spec` of a ModelDeployment: the one definition that schema, parser, CRD and docs are made from.

v1alpha1 only grows: no field is removed or retyped, none becomes required, no default changes, no rule gets tighter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sluice_operator.api.enums import (
    AcceleratorType,
    Allocation,
    CacheFormat,
    DomainPolicy,
    GatewayScalingMode,
    IndexKeyFormat,
    PolicyType,
    PullPolicy,
    ScalingMode,
    SelectPolicy,
    ServiceType,
    VerifyLevel,
)
from sluice_operator.api.field import RawObject, Rule, api

MAX_REPLICAS = 512
_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
_URL = r"^https?://[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?(/[A-Za-z0-9._-]+)*$"
_LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
# What may stand in a path: it becomes part of command lines and mounts.
_PATH = r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*"
URI_PATTERN = (
    rf"^(pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/{_PATH}|image:///{_PATH}"
    r"|hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9._-]*)$"
)


@dataclass(frozen=True, slots=True)
class HubSpec:
    """Of a model that comes from the Hugging Face hub."""

    token_secret: str | None = api(
        "Secret whose key `token` holds the access token; none for public models.", None, max_size=253, pattern=_NAME
    )
    cache_claim: str | None = api(
        "PersistentVolumeClaim (ReadWriteMany if pods share nodes) that keeps downloads; none: each pod downloads into"
        " its own scratch volume.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    endpoint: str | None = api(
        "Address of a mirror, as HF_ENDPOINT has it; absent: https://huggingface.co. The token goes there too.",
        None,
        max_size=255,
        pattern=_URL,
    )
    proxy: str | None = api(
        "HTTP proxy of downloads, such as http://proxy.example:3128 (HTTPS_PROXY and HTTP_PROXY); policies let pods go"
        " to its port instead of the hub's. For one with a password set env of the template's init container"
        " `download`.",
        None,
        max_size=255,
        pattern=_URL,
    )
    ca_config_map: str | None = api(
        "ConfigMap whose key `ca.crt` holds all authorities that downloads trust, PEM; absent: those of the image.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    egress_ports: tuple[int, ...] = api(
        "More TCP ports that policies let these pods go to.", (), max_size=16, minimum=1, maximum=65535
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    RULES: ClassVar = (
        Rule("!has(self.hub) || self.uri.startsWith('hf://')", "hub is for hf:// models only: remove it"),
    )

    uri: str = api(
        "Where the model is: pvc://CLAIM/PATH, image:///PATH (inside the engine image) or hf://OWNER/NAME@REVISION."
        " Buckets (s3://, gs://) are not read: mount them as a claim, or copy the model into one. Cannot be changed:"
        " make a second ModelDeployment.",
        max_size=512,
        pattern=URI_PATTERN,
        pattern_remedy="give pvc://CLAIM/PATH, image:///PATH or hf://OWNER/NAME@REVISION; mount a bucket (s3://, gs://)"
        " as a claim or copy it into one: docs/kubernetes/production.md",
        rules=(Rule("self == oldSelf", "uri cannot be changed: create another ModelDeployment for another model"),),
    )
    served_names: tuple[str, ...] = api(
        "The name that clients ask for; default: the ModelDeployment's name.",
        (),
        max_size=1,
        item_max=128,
        item_pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$",
    )
    hub: HubSpec | None = api("How to download, for hf:// models.", None)


@dataclass(frozen=True, slots=True)
class ImageSpec:
    RULES: ClassVar = (
        Rule("has(self.tag) != has(self.digest)", "exactly one of tag and digest: set one and remove the other"),
    )

    repository: str = api(
        "The engine image without tag.", min_size=1, max_size=255, pattern=r"^[a-z0-9][a-z0-9._/:-]*$"
    )
    tag: str | None = api("A tag that never moves.", None, max_size=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    digest: str | None = api("The image's digest, sha256:....", None, max_size=71, pattern=r"^sha256:[a-f0-9]{64}$")
    pull_policy: PullPolicy = api("When to pull.", PullPolicy.IF_NOT_PRESENT)
    pull_secrets: tuple[str, ...] = api(
        "Names of image pull Secrets in the same namespace. The gateways' image, which is the operator's, is pulled"
        " with them too.",
        (),
        max_size=8,
        item_pattern=_NAME,
    )


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    RULES: ClassVar = (
        Rule(
            "self.kv != 'Auto' || self.indexKeys == 'Auto'",
            "indexKeys needs kv: set kv to FP32, BF16 or FP8, or leave both Auto",
        ),
    )

    kv: CacheFormat = api("Format of the cache's key-value sections; Auto: as the weights.", CacheFormat.AUTO)
    index_keys: IndexKeyFormat = api("Format of index keys; Auto: as kv.", IndexKeyFormat.AUTO)


@dataclass(frozen=True, slots=True)
class DomainSpec:
    topology_key: str = api(
        "Node label whose value names an NVLink domain.", "nvidia.com/gpu.clique", max_size=317, pattern=_LABEL_KEY
    )
    policy: DomainPolicy = api(
        "Keep prefill and decode in one domain: None, Preferred (soft) or Required (pods stay Pending otherwise).",
        DomainPolicy.PREFERRED,
    )


@dataclass(frozen=True, slots=True)
class GpuSpec:
    compute_major: tuple[int, ...] = api(
        "Compute capabilities (major) that will do, matched on nvidia.com/gpu.compute.major: 10 is B200 and"
        " GB200, 12 is RTX PRO. Empty: any.",
        (),
        max_size=8,
        minimum=1,
        maximum=99,
    )
    products: tuple[str, ...] = api(
        "Products that will do, matched on nvidia.com/gpu.product. Empty: any.",
        (),
        max_size=16,
        item_max=63,
        item_pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    )
    allocation: Allocation = api(
        "How GPUs are asked for: nvidia.com/gpu of the device plugin, or a DRA ResourceClaim.", Allocation.DEVICE_PLUGIN
    )
    device_class: str = api(
        "DeviceClass of the ResourceClaim; of no effect with DevicePlugin.",
        "gpu.nvidia.com",
        max_size=253,
        pattern=_NAME,
    )
    resource_name: str = api(
        "What the device plugin calls a GPU: nvidia.com/gpu, nvidia.com/gpu.shared, or a MIG profile such as"
        " nvidia.com/mig-3g.40gb. Of no effect with ResourceClaim.",
        "nvidia.com/gpu",
        max_size=128,
        pattern=r"^nvidia\.com/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    )
    domain: DomainSpec = api("NVLink domain of prefill and decode.", DomainSpec)


@dataclass(frozen=True, slots=True)
class AcceleratorSpec:
    RULES: ClassVar = (
        Rule(
            "self.type == 'GPU' ? has(self.gpu) : !has(self.gpu)",
            "gpu belongs to type GPU: set gpu: {} with it, remove gpu with type CPU",
        ),
    )

    type: AcceleratorType = api("GPU, or CPU: the reference kernels, for kind and CI.")
    gpu: GpuSpec | None = api("Which GPUs, with type GPU.", None)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Absent means derived from the model."""

    chunk_tokens: int | None = api("Most tokens of one prefill chunk.", None, minimum=16, maximum=1048576)
    page_tokens: int | None = api("Tokens of a cache page.", None, minimum=16, maximum=4096)
    max_context_tokens: int | None = api(
        "Longest sequence, prompt and output together.", None, minimum=16, maximum=16777216
    )
    cache_mebibytes: int | None = api("Memory of all cache pools of one engine.", None, minimum=16, maximum=16777216)


@dataclass(frozen=True, slots=True)
class ParallelismSpec:
    tensor: int = api(
        "Ranks of one engine, one GPU each. More than 1 is answered by Accepted=False/TensorUnsupported so far.",
        1,
        minimum=1,
        maximum=64,
    )


_TEMPLATE = (
    "A native pod template (resources, tolerations, nodeSelector, volumes, ...); the container `main` is the engine or"
    " gateway. Command, args, ports, probes, engine environment and grace are the operator's."
)


@dataclass(frozen=True, slots=True)
class PrefillSpec:
    replicas: int = api("Prefill engines.", 1, minimum=0, maximum=MAX_REPLICAS)
    parallelism: ParallelismSpec = api("Ranks of an engine.", ParallelismSpec)
    max_rooms: int = api("Handoffs that one prefill engine has open at a time.", 8, minimum=1, maximum=4096)
    service_account_name: str | None = api(
        "A ServiceAccount that exists, instead of the operator's own; no token of it is mounted.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    template: RawObject = api(_TEMPLATE, {})


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    type: PolicyType = api("Pods: that many. Percent: that share of the replicas there are.")
    value: int = api("How many pods or percent.", minimum=1, maximum=10000)
    period_seconds: int = api("Within so long.", minimum=1, maximum=1800)


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """As in autoscaling/v2."""

    stabilization_window_seconds: int | None = api(
        "Up: the lowest, down: the highest wish within this window counts. Default: 0 up, 300 down.",
        None,
        minimum=0,
        maximum=3600,
    )
    select_policy: SelectPolicy = api("Which policy rules when there are several.", SelectPolicy.MAX)
    policies: tuple[ScalingPolicy, ...] = api(
        "How fast. Default: up 4 pods or 100 % in 15 s, down 100 % in 15 s.", (), max_size=4, atomic=True
    )


@dataclass(frozen=True, slots=True)
class BehaviorSpec:
    scale_up: ScalingRules = api("How to grow.", ScalingRules)
    scale_down: ScalingRules = api("How to shrink.", ScalingRules)


@dataclass(frozen=True, slots=True)
class AutoSpec:
    RULES: ClassVar = (
        Rule("self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas: raise one or lower the other"),
    )

    max_replicas: int = api("Never more.", minimum=1, maximum=MAX_REPLICAS)
    min_replicas: int = api("Never fewer; 0 lets an idle deployment sleep.", 1, minimum=0, maximum=MAX_REPLICAS)
    kv_utilization_percent: int = api(
        "Wanted share of cache pages in use by running sequences.", 70, minimum=1, maximum=100
    )
    queue_age_milliseconds: int = api(
        "Wanted upper bound of the oldest waiting request's age.", 500, minimum=1, maximum=3600000
    )
    inter_token_p95_milliseconds: int | None = api(
        "Wanted upper bound of the time between tokens (95th percentile); absent: not looked at.",
        None,
        minimum=1,
        maximum=60000,
    )
    pending_max_seconds: int = api(
        "How long a new pod may wait for a node before it is given back; longer than the cluster takes to buy one.",
        900,
        minimum=1,
        maximum=86400,
    )
    behavior: BehaviorSpec = api("How fast to grow and shrink, as in autoscaling/v2.", BehaviorSpec)


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    RULES: ClassVar = (
        Rule(
            "self.mode == 'Auto' ? has(self.auto) : !has(self.auto)",
            "auto belongs to mode Auto: set it with Auto, remove it with Static and External",
        ),
    )

    mode: ScalingMode = api(
        "Static: decode.replicas rules. Auto: the operator writes it. External: whoever uses /scale writes it.",
        ScalingMode.STATIC,
    )
    auto: AutoSpec | None = api("Limits and targets of mode Auto.", None)


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    replicas: int = api(
        "Decode engines; written by the operator in mode Auto, through /scale in mode External.",
        1,
        minimum=0,
        maximum=MAX_REPLICAS,
    )
    parallelism: ParallelismSpec = api("Ranks of an engine.", ParallelismSpec)
    max_running: int = api("Sequences that one decode engine runs at a time.", 64, minimum=1, maximum=4096)
    scaling: ScalingSpec = api("Who decides replicas.", ScalingSpec)
    service_account_name: str | None = api(
        "A ServiceAccount that exists, instead of the operator's own; no token of it is mounted.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    template: RawObject = api(_TEMPLATE, {})


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    type: ServiceType = api("Type of the gateway's Service.", ServiceType.CLUSTER_IP)
    annotations: Mapping[str, str] = api("Annotations of the gateway's Service.", {}, max_size=16, item_max=1024)
    labels: Mapping[str, str] = api("Labels of the gateway's Service.", {}, max_size=16, item_max=63)
    load_balancer_class: str | None = api(
        "Who makes the load balancer, with type LoadBalancer. Kubernetes lets nobody change it later.",
        None,
        max_size=317,
        pattern=_LABEL_KEY,
    )
    load_balancer_source_ranges: tuple[str, ...] = api(
        "Addresses that the load balancer lets in, in CIDR notation, with type LoadBalancer. Empty: all.",
        (),
        max_size=32,
        item_max=64,
        item_pattern=r"^[0-9A-Fa-f.:]+/[0-9]{1,3}$",
    )


@dataclass(frozen=True, slots=True)
class GatewayScalingSpec:
    mode: GatewayScalingMode = api(
        "Static: gateway.replicas rules. External: an autoscaler writes the replicas of the Deployment NAME-gateway;"
        " gateway.replicas is only what it begins with.",
        GatewayScalingMode.STATIC,
    )


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    replicas: int = api("Gateways.", 2, minimum=1, maximum=64)
    scaling: GatewayScalingSpec = api("Who decides how many gateways there are.", GatewayScalingSpec)
    api_keys_secret: str | None = api(
        "Secret whose key `keys` holds API keys, one a line; absent: everybody may come.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    max_queued: int = api("Requests that one gateway lets wait.", 1024, minimum=1, maximum=65536)
    service: ServiceSpec = api("The Service that clients use.", ServiceSpec)
    service_account_name: str | None = api(
        "A ServiceAccount that exists, instead of the operator's own. It is given the right to see EndpointSlices.",
        None,
        max_size=253,
        pattern=_NAME,
    )
    template: RawObject = api(_TEMPLATE, {})


@dataclass(frozen=True, slots=True)
class TransportSpec:
    verify: VerifyLevel = api("Digests of all pulled records, or of a sample.", VerifyLevel.FULL)


@dataclass(frozen=True, slots=True)
class ProbesSpec:
    startup_max_seconds: int = api("How long loading a model may take.", 1800, minimum=30, maximum=86400)
    wedge_floor_seconds: int = api("Nothing is called wedged earlier.", 30, minimum=5, maximum=3600)


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    RULES: ClassVar = (
        Rule("self.maxSurge > 0 || self.maxUnavailable > 0", "maxSurge and maxUnavailable are both 0: raise one"),
    )

    max_surge: int = api("Pods above replicas, per role, in a rollout.", 1, minimum=0, maximum=MAX_REPLICAS)
    max_unavailable: int = api("Pods below replicas, per role, in a rollout.", 0, minimum=0, maximum=MAX_REPLICAS)


@dataclass(frozen=True, slots=True)
class DrainSpec:
    timeout_seconds: int = api(
        "How long a pod that is to go may finish what runs; then its requests are retried elsewhere.",
        120,
        minimum=1,
        maximum=86400,
    )


@dataclass(frozen=True, slots=True)
class QuarantineSpec:
    max_pods: int = api("Pods kept for somebody to look at; 0: none.", 1, minimum=0, maximum=16)
    max_seconds: int = api("How long one is kept.", 300, minimum=1, maximum=3600)


@dataclass(frozen=True, slots=True)
class MonitoringSpec:
    pod_monitor: bool = api("Create a PodMonitor (needs the prometheus-operator's CRDs).", False)
    labels: Mapping[str, str] = api(
        "Labels of the PodMonitor, for a Prometheus that selects by label.", {}, max_size=16, item_max=63
    )
    otlp_endpoint: str | None = api(
        "Where traces go, OTLP over HTTP: the whole URL, such as http://collector.observability:4318/v1/traces; absent:"
        " none are made. Changing it replaces engines.",
        None,
        max_size=255,
        pattern=_URL,
    )


@dataclass(frozen=True, slots=True)
class MetadataSpec:
    """What policies of a cluster may demand of every object."""

    labels: Mapping[str, str] = api("Labels of every object that the operator makes.", {}, max_size=16, item_max=63)
    annotations: Mapping[str, str] = api(
        "Annotations of every object that the operator makes.", {}, max_size=16, item_max=1024
    )


@dataclass(frozen=True, slots=True)
class ModelDeploymentSpec:
    model: ModelSpec = api("What is served.")
    image: ImageSpec = api("What serves it.")
    accelerator: AcceleratorSpec = api("What it runs on: a union by type.")
    precision: PrecisionSpec = api("Formats of cache records.", PrecisionSpec)
    engine: EngineSettings = api("Sizes that prefill and decode share.", EngineSettings)
    prefill: PrefillSpec = api("Engines that read prompts.", PrefillSpec)
    decode: DecodeSpec = api("Engines that write answers.", DecodeSpec)
    gateway: GatewaySpec = api("The OpenAI-compatible front.", GatewaySpec)
    transport: TransportSpec = api("The way of cache records between engines.", TransportSpec)
    probes: ProbesSpec = api("Budgets of health probes.", ProbesSpec)
    rollout: RolloutSpec = api("How revisions replace each other.", RolloutSpec)
    drain: DrainSpec = api("How pods end.", DrainSpec)
    quarantine: QuarantineSpec = api("Wedged pods that are kept.", QuarantineSpec)
    monitoring: MonitoringSpec = api("Scraping and traces.", MonitoringSpec)
    metadata: MetadataSpec = api(
        "Labels and annotations of all children except pods, which have those of their template. Changing them replaces"
        " no pod; Secrets get them when they are written next.",
        MetadataSpec,
    )
    paused: bool = api("Change nothing but status.", False)
