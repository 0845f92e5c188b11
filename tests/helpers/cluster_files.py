"""The files of cluster/, and the pods that KubeRay would make of them."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from conftest import REPOSITORY

CLUSTER = REPOSITORY / "cluster"
BUCKET, SHARED = "s3://BUCKET", "/mnt/domext"
"""Where runs are kept, and where every node sees the shared storage; on Slurm that is the site's affair."""
RAY_UP = ("ray-aws.yaml", "ray-gcp.yaml")
SWEEP_JOB = "kuberay/rayjob-sweep.yaml"
"""The one file whose pods share a disk, which a sweep needs."""
EIGHT_GPUS = "kuberay/rayjob-eight-gpus.yaml"
RAY_JOBS = ("kuberay/rayjob-pretrain-af.yaml", EIGHT_GPUS, SWEEP_JOB)
RAY_SERVICE = "kuberay/rayservice.yaml"
RAY_CLUSTERS = ("kuberay/raycluster.yaml", *RAY_JOBS, RAY_SERVICE)


def read_text(name: str) -> str:
    return (CLUSTER / name).read_text(encoding="utf-8")


def read_yaml(name: str) -> Any:
    """Read a document, in which nothing is one object twice, as anchors make it."""
    return json.loads(json.dumps(yaml.safe_load(read_text(name))))


def read_policies() -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(read_text("kuberay/policies.yaml"))]


def read_cluster_spec(name: str) -> dict[str, Any]:
    spec = read_yaml(name)["spec"]
    return spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec


def list_pods(name: str) -> dict[str, dict[str, Any]]:
    """Return the pods of a file by what they are: head, each group of workers, and the submitter of a job."""
    cluster = read_cluster_spec(name)
    templates = {"head": cluster["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    if name in RAY_JOBS:
        templates["submitter"] = read_yaml(name)["spec"]["submitterPodTemplate"]
    return {
        which: {
            "apiVersion": "v1",
            "kind": "Pod",
            **template,
            "metadata": {"name": f"{re.sub(r'.*/|.yaml', '', name)}-{which}", **template["metadata"]},
        }
        for which, template in templates.items()
    }
