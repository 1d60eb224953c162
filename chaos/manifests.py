"""Checks `configs/cluster/rayjob.yaml` against the APIs that read it: Kubernetes and KubeRay.

Pod templates, the config map and the volume claim are checked against the schemas of Kubernetes,
strictly: an unknown field is a fault. No package has the schemas of KubeRay's own resources, so the
fields of these are checked against the names and types of its API reference, `ray.io/v1`
(https://ray-project.github.io/kuberay/reference/api/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

RAYJOB = Path(__file__).parents[1] / "configs" / "cluster" / "rayjob.yaml"
KUBERNETES = ("1.28", "1.37")  # releases: the oldest and the newest that the file is checked for

# The fields of KubeRay 1.3 and newer that a job may have, and those that it must have.
JOB_FIELDS = {
    "entrypoint": str,
    "submissionMode": str,
    "backoffLimit": int,
    "activeDeadlineSeconds": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "runtimeEnvYAML": str,
    "suspend": bool,
    "submitterConfig": dict,
    "submitterPodTemplate": dict,
    "rayClusterSpec": dict,
}
CLUSTER_FIELDS = {
    "rayVersion": str,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": dict,
    "authOptions": dict,  # of newer releases
}
HEAD_FIELDS = {"rayStartParams": dict, "template": dict, "serviceType": str}
WORKER_FIELDS = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "numOfHosts": int,
    "rayStartParams": dict,
    "template": dict,
}
JOB_NEEDS = {"entrypoint", "rayClusterSpec"}
HEAD_NEEDS = {"rayStartParams", "template"}
WORKER_NEEDS = {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"}
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode")


def documents() -> list[dict[str, Any]]:
    """The resources of the file: the job, the config map with its script, the volume claim."""
    return list(yaml.safe_load_all(RAYJOB.read_text(encoding="utf-8")))


def kuberay_faults(job: Mapping[str, Any]) -> list[str]:
    """Faults in the fields of KubeRay's own resource."""
    faults = []
    if (job.get("apiVersion"), job.get("kind")) != ("ray.io/v1", "RayJob"):
        faults.append(f"not a RayJob of ray.io/v1: {job.get('apiVersion')} {job.get('kind')}")
    spec = job["spec"]
    faults += _field_faults("spec", spec, JOB_FIELDS, JOB_NEEDS)
    if spec.get("submissionMode", SUBMISSION_MODES[0]) not in SUBMISSION_MODES:
        faults.append(f"spec.submissionMode: {spec['submissionMode']}")
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        faults.append("spec.ttlSecondsAfterFinished without shutdownAfterJobFinishes")
    cluster = spec["rayClusterSpec"]
    faults += _field_faults("rayClusterSpec", cluster, CLUSTER_FIELDS, {"headGroupSpec"})
    head = cluster["headGroupSpec"]
    faults += _field_faults("headGroupSpec", head, HEAD_FIELDS, HEAD_NEEDS)
    for group in cluster["workerGroupSpecs"]:
        faults += _field_faults("workerGroupSpecs", group, WORKER_FIELDS, WORKER_NEEDS)
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            faults.append(f"workerGroupSpecs: replicas of {group['groupName']}")
    for group in (head, *cluster["workerGroupSpecs"]):
        parameters = group["rayStartParams"].items()
        faults += [
            f"rayStartParams: {k} is not a text" for k, v in parameters if type(v) is not str
        ]
    return faults


def kubernetes_faults() -> list[str]:
    """Faults in the pods and resources of Kubernetes, for each release of `KUBERNETES`."""
    import kubernetes_validate  # of tramontane-rl[nodes]

    faults = []
    for resource in _kubernetes_resources():
        for release in KUBERNETES:
            try:
                kubernetes_validate.validate(resource, release, strict=True)
            except kubernetes_validate.ValidationError as error:
                faults.append(f"{resource['kind']} (Kubernetes {release}): {error.message}")
    return faults


def _kubernetes_resources() -> Iterator[dict[str, Any]]:
    job, *others = documents()
    yield from others
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        yield {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": "pods"},
            "template": template,
        }


def _field_faults(
    where: str, found: Mapping[str, Any], fields: Mapping[str, type], needs: set[str]
) -> list[str]:
    unknown = [f"{where}.{name} is not a field" for name in found if name not in fields]
    missing = [f"{where}.{name} is missing" for name in sorted(needs - found.keys())]
    wrong = [
        f"{where}.{name}: {value!r} is not of type {fields[name].__name__}"
        for name, value in found.items()
        if name in fields and type(value) is not fields[name]
    ]
    return unknown + missing + wrong
