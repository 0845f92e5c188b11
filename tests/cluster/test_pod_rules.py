"""Pods keep Kubernetes' restricted standard and more: rules of our own, and those of checkov where it is installed."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_files import CLUSTER, EIGHT_GPUS, RAY_CLUSTERS, list_pods, read_policies, read_text

HOME = "/home/domext"
PODS = [(name, which) for name in RAY_CLUSTERS for which in list_pods(name)]
USER = int(re.findall(r"^USER (\d+)$", read_text("Dockerfile"), re.M)[-1])
RESTRICTED_POD = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RESTRICTED_CONTAINER = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
PLANTED: dict[str, Any] = {
    "spec.containers.0.securityContext.privileged": True,
    "spec.containers.0.securityContext.runAsUser": 0,
    "spec.containers.0.securityContext.allowPrivilegeEscalation": True,
    "spec.containers.0.securityContext.readOnlyRootFilesystem": False,
    "spec.containers.0.securityContext.capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    "spec.containers.0.resources.limits": {"cpu": "4"},
    "spec.containers.0.volumeMounts": [{"name": "home", "mountPath": HOME}],
    "spec.securityContext.runAsNonRoot": False,
    "spec.securityContext.runAsUser": 0,
    "spec.securityContext.seccompProfile": {"type": "Unconfined"},
    "spec.automountServiceAccountToken": True,
    "spec.hostNetwork": True,
    "spec.hostPID": True,
    "spec.imagePullSecrets": [],
    "spec.initContainers": [{"name": "first", "image": "IMAGE"}],
    "spec.volumes.0": {"name": "home", "hostPath": {"path": "/"}},
}
"""Faults, by the place where each is put into a pod."""
JUSTIFIED = {
    "CKV_K8S_8": "KubeRay gives every node its liveness probe; a submitter ends by itself",
    "CKV_K8S_9": "KubeRay gives every node its readiness probe; a submitter serves nothing",
    "CKV_K8S_14": "IMAGE is filled in, with the tag that was pushed",
    "CKV_K8S_35": "the bucket's client reads its keys from the environment, and Ray its token",
    "CKV_K8S_43": "IMAGE is filled in, with the digest if the registry keeps one",
    "CKV_DOCKER_2": "KubeRay asks a node whether it is well, and the autoscaler asks its raylet",
}
"""Rules of checkov that are not kept, and why."""


def find_faults(pod: dict[str, Any]) -> list[str]:
    """List what in a pod is against the rules."""
    spec = pod["spec"]
    faults = [field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)]
    if spec.get("automountServiceAccountToken") is not False:
        faults.append("a token of Kubernetes")
    if spec.get("securityContext") != RESTRICTED_POD:
        faults.append(f"securityContext of the pod: {spec.get('securityContext')}")
    if not spec.get("imagePullSecrets"):
        faults.append("no imagePullSecrets")
    kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
    if not kinds <= {"emptyDir", "persistentVolumeClaim"}:
        faults.append(f"volumes: {kinds}")
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        if container.get("securityContext") != RESTRICTED_CONTAINER:
            faults.append(f"securityContext of {container['name']}: {container.get('securityContext')}")
        if not {"cpu", "memory"} <= container.get("resources", {}).get("limits", {}).keys():
            faults.append(f"{container['name']} without limits")
        if not {HOME, "/tmp"} <= {mount["mountPath"] for mount in container.get("volumeMounts", [])}:
            faults.append(f"{container['name']} cannot write to its home and /tmp")
    return faults


def plant(pod: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a copy of a pod with another value in a place."""
    found: Any
    found = changed = copy.deepcopy(pod)
    *steps, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for step in steps:
        found = found[step]
    found[last] = value
    return changed


@pytest.mark.parametrize(("name", "which"), PODS)
def test_every_pod_keeps_the_rules(name: str, which: str) -> None:
    assert find_faults(list_pods(name)[which]) == []


@pytest.mark.parametrize("place", PLANTED)
def test_a_pod_that_breaks_a_rule_is_found(place: str) -> None:
    pod = list_pods(RAY_CLUSTERS[0])["head"]
    assert len(find_faults(plant(pod, place, PLANTED[place]))) >= 1


def test_the_image_does_not_run_as_root() -> None:
    text = read_text("Dockerfile")
    assert USER >= 10000 and f"useradd --uid {USER} " in text, "no number of a machine's own user"
    assert text.rstrip().splitlines()[-1] == f"USER {USER}" and f"ENV HOME={HOME} USER=domext" in text


def test_the_policies_hold_for_every_pod() -> None:
    """The network admits these pods, the operator, names and HTTPS; each kind of node has its budget."""
    network, *budgets = policies = read_policies()
    for policy in policies:
        kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
    ours = network["spec"]["podSelector"]["matchLabels"]
    assert network["spec"]["policyTypes"] == ["Ingress", "Egress"]
    own, operator = network["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": ours}}]}
    assert [port["port"] for port in operator["ports"]] == [8265, 8000] and len(operator["from"]) == 1
    assert operator["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}
    inside, *outside = network["spec"]["egress"]
    assert inside == {"to": [{"podSelector": {"matchLabels": ours}}]}
    assert [port["port"] for rule in outside for port in rule["ports"]] == [53, 53, 443]
    for name, which in PODS:
        assert ours.items() <= list_pods(name)[which]["metadata"]["labels"].items()
    kinds = [budget["spec"]["selector"]["matchLabels"] for budget in budgets]
    assert kinds == [{**ours, "ray.io/node-type": group} for group in ("head", "worker")]
    assert all(budget["spec"]["minAvailable"] == 1 for budget in budgets), (
        "maxUnavailable needs a kind that can be scaled"
    )


@pytest.mark.slow
def test_checkov_finds_nothing_that_is_not_justified(tmp_path: Path) -> None:
    """Offline, over pods that are taken out of KubeRay's files, their policies, and the Dockerfile."""
    checkov = os.environ.get("CHECKOV") or shutil.which("checkov")
    if not checkov:
        pytest.skip("checkov is not installed, on PATH or as CHECKOV (it needs an environment of its own)")
    pods = [list_pods(name)[which] for name, which in PODS]
    planted = plant(list_pods(EIGHT_GPUS)["gpu"], "spec.containers.0.securityContext.privileged", True)
    planted["metadata"]["name"] = "planted"
    for pod in (*pods, planted, *read_policies()):
        pod["metadata"]["namespace"] = "domext"  # what `kubectl --namespace` fills in
    text = yaml.safe_dump_all([*pods, planted, *read_policies()])
    (tmp_path / "pods.yaml").write_text(text, encoding="utf-8")
    shutil.copy(CLUSTER / "Dockerfile", tmp_path)
    command = [checkov, "--directory", str(tmp_path), "--framework", "kubernetes", "dockerfile", "--skip-download"]
    done = subprocess.run([*command, "--output", "json"], capture_output=True, text=True, timeout=240)
    results = [report["results"] for report in json.loads(done.stdout)]
    assert sum(len(result["passed_checks"]) for result in results) > 100
    failed = [(check["check_id"], check["resource"]) for result in results for check in result["failed_checks"]]
    assert ("CKV_K8S_16", "Pod.domext.planted") in failed, "privileged"
    assert {check for check, resource in failed if "planted" not in resource} == JUSTIFIED.keys()
