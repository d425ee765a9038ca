"""The words that the API's fields choose from."""

from __future__ import annotations

from enum import StrEnum


class AcceleratorType(StrEnum):
    GPU = "GPU"
    CPU = "CPU"


class Allocation(StrEnum):
    DEVICE_PLUGIN = "DevicePlugin"
    RESOURCE_CLAIM = "ResourceClaim"


class DomainPolicy(StrEnum):
    NONE = "None"
    PREFERRED = "Preferred"
    REQUIRED = "Required"


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class CacheFormat(StrEnum):
    AUTO = "Auto"
    FP32 = "FP32"
    BF16 = "BF16"
    FP8 = "FP8"


class IndexKeyFormat(StrEnum):
    AUTO = "Auto"
    FP32 = "FP32"
    BF16 = "BF16"
    FP8 = "FP8"
    FP4 = "FP4"


class ScalingMode(StrEnum):
    STATIC = "Static"
    AUTO = "Auto"
    EXTERNAL = "External"


class GatewayScalingMode(StrEnum):
    STATIC = "Static"
    EXTERNAL = "External"


class SelectPolicy(StrEnum):
    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class PolicyType(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class VerifyLevel(StrEnum):
    FULL = "Full"
    SAMPLE = "Sample"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"
