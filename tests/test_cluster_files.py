"""The job files for clusters: their fields, and the GPUs that they ask for."""

import copy
import re

import pytest
from typer.testing import CliRunner

from chaos.manifests import documents, kuberay_faults
from tests.docs.pages import commands
from tests.paths import ROOT
from tramontane.cli import app
from tramontane.config import Config, load_section


def test_the_rayjob_has_the_fields_of_kuberay():
    assert kuberay_faults(documents()[0]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"backoff": 3}, "spec.backoff is not a field"),
        ({"backoffLimit": "3"}, "spec.backoffLimit: '3' is not of type int"),
        ({"submissionMode": "Job"}, "spec.submissionMode: Job"),
        ({"shutdownAfterJobFinishes": False}, "ttlSecondsAfterFinished without"),
    ],
)
def test_a_wrong_field_is_found(change, fault):
    job = copy.deepcopy(documents()[0])
    job["spec"] |= change
    (found,) = kuberay_faults(job)
    assert fault in found


def test_wrong_fields_of_a_group_of_workers_are_found():
    job = copy.deepcopy(documents()[0])
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    group |= {"maxReplicas": group["replicas"] - 1, "rayStartParams": {"num-gpus": 8}}
    group["name"] = "gpus"
    assert kuberay_faults(job) == [
        "workerGroupSpecs.name is not a field",
        "workerGroupSpecs: replicas of gpus",
        "rayStartParams: num-gpus is not a text",
    ]


def kubernetes_job() -> tuple[int, list[str]]:
    """GPUs of the pods of `rayjob.yaml`, and the keys that it gives the run."""
    cluster = documents()[0]["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    (keys,) = (variable["value"] for variable in head["env"] if variable["name"] == "KEYS")
    return group["replicas"] * int(limits["nvidia.com/gpu"]), keys.split()


def slurm_job() -> tuple[int, list[str]]:
    """GPUs of the nodes that docs/scaling.md asks Slurm for, and the keys that it gives the run."""
    (command,) = commands("sbatch")
    nodes, gpus = (
        int(re.search(rf"--{option}=(\d+)", " ".join(command.words))[1])
        for option in ("nodes", "gpus-per-node")
    )
    config, _run, *keys = command.words[command.words.index("configs/cluster/slurm.sh") + 1 :]
    assert config == "configs/medium.yaml"
    return nodes * gpus, keys


@pytest.mark.parametrize("job", [kubernetes_job, slurm_job])
def test_a_job_has_the_gpus_that_its_run_asks_for_and_the_model_fits(job, monkeypatch):
    gpus, keys = job()
    config = load_section(Config, ROOT / "configs/medium.yaml", keys)
    workers = [
        (config.trainer.ranks, config.placement.trainer.gpus),
        (config.generator.workers, config.placement.generator.gpus),
    ]
    assert gpus == sum(count * (1 if each is None else each) for count, each in workers)
    monkeypatch.chdir(ROOT)
    shape = ["--dry-run", "--model-shape", "mistral-small-24b", "--gpu", "h100"]
    keys = [key for key in keys if not key.startswith(("model=", "data.train="))]
    result = CliRunner().invoke(app, ["train", "configs/medium.yaml", *shape, *keys])
    assert result.exit_code == 0, result.exception
    assert result.stdout.count("; fits in") == 2
