"""Specs that must be refused, at admission or by Accepted=False: what is changed in a good one, and the path named."""

from __future__ import annotations

import copy

GPU = {"type": "GPU", "gpu": {}}
AUTO = {"mode": "Auto", "auto": {"maxReplicas": 4}}


def good():
    return {
        "model": {"uri": "pvc://models/tiny"},
        "image": {"repository": "registry.local/sluice-engine", "tag": "1"},
        "accelerator": copy.deepcopy(GPU),
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1, "scaling": copy.deepcopy(AUTO)},
        "gateway": {"replicas": 1},
    }


DELETE = object()
_MAIN = "decode.template.spec.containers"


def _main(**fields):
    return {_MAIN: [{"name": "main"} | fields]}


# One change each: dotted path -> value, in the good spec.
INVALID = [
    ({"model": DELETE}, "spec.model"),
    ({"image": DELETE}, "spec.image"),
    ({"accelerator": DELETE}, "spec.accelerator"),
    ({"model.uri": DELETE}, "spec.model.uri"),
    ({"model.uri": ""}, "spec.model.uri"),
    ({"model.uri": 3}, "spec.model.uri"),
    ({"model.uri": "s3://bucket/model"}, "spec.model.uri"),
    ({"model.uri": "pvc://models"}, "spec.model.uri"),
    ({"model.uri": "pvc://models/../etc"}, "spec.model.uri"),
    ({"model.uri": "pvc://models/a b"}, "spec.model.uri"),
    ({"model.uri": "image:///m; rm -rf /"}, "spec.model.uri"),
    ({"model.uri": "image://relative"}, "spec.model.uri"),
    ({"model.uri": "hf://owner/name"}, "spec.model.uri"),
    ({"model.uri": "pvc://models/" + "a" * 600}, "spec.model.uri"),
    ({"model.servedNames": ["a", "b"]}, "spec.model.servedNames"),
    ({"model.servedNames": "a"}, "spec.model.servedNames"),
    ({"model.servedNames": [""]}, "spec.model.servedNames[0]"),
    ({"model.hub": {}}, "spec.model.hub"),
    ({"model.uri": "hf://o/n@v", "model.hub": {"endpoint": "mirror.example"}}, "spec.model.hub.endpoint"),
    ({"model.uri": "hf://o/n@v", "model.hub": {"endpoint": "http://mirror:99999"}}, "spec.model.hub.endpoint"),
    ({"model.uri": "hf://o/n@v", "model.hub": {"endpoint": "http://mirror:0/x"}}, "spec.model.hub.endpoint"),
    ({"model.uri": "hf://o/n@v", "model.hub": {"tokenSecret": "a..b"}}, "spec.model.hub.tokenSecret"),
    ({"model.uri": "pvc://a.-b/x"}, "spec.model.uri"),
    ({"gateway.apiKeysSecret": "a..b"}, "spec.gateway.apiKeysSecret"),
    ({"gateway.service": {"annotations": {"bad key!": "x"}}}, "spec.gateway.service.annotations[bad key!]"),
    ({"gateway.service": {"annotations": {"a..b/c": "x"}}}, "spec.gateway.service.annotations[a..b/c]"),
    ({"gateway.service": {"loadBalancerClass": "example.com/lb"}}, "spec.gateway.service"),
    ({"gateway.service": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}, "spec.gateway.service"),
    (
        {"gateway.service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/99"]}},
        "spec.gateway.service.loadBalancerSourceRanges[0]",
    ),
    ({"gateway.service": {"labels": {"sluice.dev/role": "x"}}}, "spec.gateway.service.labels[sluice.dev/role]"),
    ({"gateway.serviceAccountName": "a..b"}, "spec.gateway.serviceAccountName"),
    ({"accelerator.gpu.resourceName": "amd.com/gpu"}, "spec.accelerator.gpu.resourceName"),
    ({"accelerator.gpu.deviceClass": "a..b"}, "spec.accelerator.gpu.deviceClass"),
    ({"accelerator.gpu.deviceClass": "a" * 64}, "spec.accelerator.gpu.deviceClass"),
    ({"accelerator.gpu.domain": {"topologyKey": "a..b/c"}}, "spec.accelerator.gpu.domain.topologyKey"),
    ({"monitoring": {"otlpEndpoint": "collector:4318"}}, "spec.monitoring.otlpEndpoint"),
    ({"monitoring": {"otlpEndpoint": "http://user:word@collector/x"}}, "spec.monitoring.otlpEndpoint"),
    ({"monitoring": {"otlpEndpoint": "http://collector:70000/v1/traces"}}, "spec.monitoring.otlpEndpoint"),
    ({"model.revision": "main"}, "spec.model.revision"),
    ({"image.tag": DELETE}, "spec.image"),
    ({"image.digest": "sha256:" + "a" * 64}, "spec.image"),
    ({"image.tag": DELETE, "image.digest": "sha256:abc"}, "spec.image.digest"),
    ({"image.tag": "-x"}, "spec.image.tag"),
    ({"image.repository": "Registry/UPPER"}, "spec.image.repository"),
    ({"image.repository": ""}, "spec.image.repository"),
    ({"image.pullPolicy": "Sometimes"}, "spec.image.pullPolicy"),
    ({"image.pullSecrets": ["Bad_Name"]}, "spec.image.pullSecrets[0]"),
    ({"precision": {"kv": "INT4"}}, "spec.precision.kv"),
    ({"precision": {"indexKeys": "FP8"}}, "spec.precision.indexKeys"),
    ({"precision": {"kv": "FP8", "indexKeys": "fp4"}}, "spec.precision.indexKeys"),
    ({"accelerator.type": "TPU"}, "spec.accelerator.type"),
    ({"accelerator.type": "CPU"}, "spec.accelerator.gpu"),
    ({"accelerator.gpu": DELETE}, "spec.accelerator.gpu"),
    ({"accelerator.gpu.computeMajor": ["10"]}, "spec.accelerator.gpu.computeMajor[0]"),
    ({"accelerator.gpu.computeMajor": [0]}, "spec.accelerator.gpu.computeMajor[0]"),
    ({"accelerator.gpu.computeMajor": list(range(1, 20))}, "spec.accelerator.gpu.computeMajor"),
    ({"accelerator.gpu.products": ["NVIDIA B200"]}, "spec.accelerator.gpu.products[0]"),
    ({"accelerator.gpu.allocation": "MIG"}, "spec.accelerator.gpu.allocation"),
    ({"accelerator.gpu.domain": {"policy": "Always"}}, "spec.accelerator.gpu.domain.policy"),
    ({"accelerator.gpu.domain": {"topologyKey": "bad key"}}, "spec.accelerator.gpu.domain.topologyKey"),
    ({"engine": {"chunkTokens": 0}}, "spec.engine.chunkTokens"),
    ({"engine": {"pageTokens": 1.5}}, "spec.engine.pageTokens"),
    ({"engine": {"maxContextTokens": "8k"}}, "spec.engine.maxContextTokens"),
    ({"engine": {"stepLoop": "Overlap"}}, "spec.engine.stepLoop"),
    ({"hicache": {}}, "spec.hicache"),
    ({"prefill.replicas": -1}, "spec.prefill.replicas"),
    ({"prefill.replicas": 100_000}, "spec.prefill.replicas"),
    ({"prefill.replicas": True}, "spec.prefill.replicas"),
    ({"prefill.maxRooms": 0}, "spec.prefill.maxRooms"),
    ({"prefill.parallelism": {"tensor": 0}}, "spec.prefill.parallelism.tensor"),
    ({"prefill.parallelism": {"tensor": 4}}, "spec.prefill.parallelism.tensor"),
    ({"decode.parallelism": {"tensor": 2}}, "spec.decode.parallelism.tensor"),
    ({"decode.maxRunning": 0}, "spec.decode.maxRunning"),
    ({"decode.scaling.mode": "Manual"}, "spec.decode.scaling.mode"),
    ({"decode.scaling.mode": "Static"}, "spec.decode.scaling.auto"),
    ({"decode.scaling.auto": DELETE}, "spec.decode.scaling.auto"),
    ({"decode.scaling.auto.maxReplicas": DELETE}, "spec.decode.scaling.auto.maxReplicas"),
    ({"decode.scaling.auto.minReplicas": 9}, "spec.decode.scaling.auto"),
    ({"decode.scaling.auto.kvUtilizationPercent": 101}, "spec.decode.scaling.auto.kvUtilizationPercent"),
    ({"decode.scaling.auto.behavior": {"scaleUp": {"policies": [{"type": "Pods"}]}}}, "policies[0].value"),
    ({"decode.scaling.auto.behavior": {"scaleDown": {"selectPolicy": "Avg"}}}, "scaleDown.selectPolicy"),
    ({"gateway.replicas": 0}, "spec.gateway.replicas"),
    ({"gateway.apiKeysSecret": "Bad Name"}, "spec.gateway.apiKeysSecret"),
    ({"gateway.service": {"type": "ExternalName"}}, "spec.gateway.service.type"),
    ({"transport": {"verify": "Never"}}, "spec.transport.verify"),
    ({"probes": {"startupMaxSeconds": 1}}, "spec.probes.startupMaxSeconds"),
    ({"probes": {"livenessProbe": {}}}, "spec.probes.livenessProbe"),
    ({"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "spec.rollout"),
    ({"rollout": {"maxSurge": "25%"}}, "spec.rollout.maxSurge"),
    ({"drain": {"timeoutSeconds": 0}}, "spec.drain.timeoutSeconds"),
    ({"quarantine": {"maxSeconds": 86400}}, "spec.quarantine.maxSeconds"),
    ({"paused": "yes"}, "spec.paused"),
    ({"decode.template": []}, "spec.decode.template"),
    ({"decode.template.kind": "Pod"}, "spec.decode.template.kind"),
    ({"decode.template.metadata": {"name": "x"}}, "template.metadata.name"),
    ({"decode.template.metadata": {"labels": {"sluice.dev/role": "x"}}}, "labels[sluice.dev/role]"),
    ({"decode.template.metadata": {"labels": {"a": 1}}}, "labels[a]"),
    ({"decode.template.spec": 5}, "template.spec"),
    ({"decode.template.spec.hostNetwork": True}, "template.spec.hostNetwork"),
    ({"decode.template.spec.terminationGracePeriodSeconds": 1}, "terminationGracePeriodSeconds"),
    ({"decode.template.spec.serviceAccountName": "root"}, "serviceAccountName"),
    ({"decode.template.spec.affinity": []}, "template.spec.affinity"),
    ({"decode.template.spec.affinity": {"nodeAffinity": 1}}, "affinity.nodeAffinity"),
    ({"decode.template.spec.tolerations": {}}, "template.spec.tolerations"),
    ({"decode.template.spec.volumes": [{"name": "tmp"}]}, "volumes[0].name"),
    ({_MAIN: 5}, "spec.containers"),
    ({_MAIN: ["main"]}, "containers[0]"),
    ({_MAIN: [{"image": "x"}]}, "containers[0].name"),
    ({_MAIN: [{"name": "a"}, {"name": "a"}]}, "containers[1].name"),
    (_main(command=["sh"]), "containers[0].command"),
    (_main(args=["-v"]), "containers[0].args"),
    (_main(image="other"), "containers[0].image"),
    (_main(ports=[]), "containers[0].ports"),
    (_main(livenessProbe={}), "containers[0].livenessProbe"),
    (_main(env=[{"name": "UCX_TLS", "value": "all"}]), "env[0].name"),
    (_main(env=[{"name": "POD_IP", "value": "1"}]), "env[0].name"),
    (_main(resources={"limits": {"nvidia.com/gpu": 8}}), "limits[nvidia.com/gpu]"),
    (_main(securityContext=[]), "containers[0].securityContext"),
    ({"decode.template.spec.initContainers": [{"name": "main"}]}, "initContainers[0].name"),
]


def changed(changes):
    """The good spec with `changes`; missing parents are made."""
    spec = good()
    for path, value in changes.items():
        *parents, last = path.split(".")
        there = spec
        for name in parents:
            there = there.setdefault(name, {})
        if value is DELETE:
            there.pop(last, None)
        else:
            there[last] = copy.deepcopy(value)
    return spec
