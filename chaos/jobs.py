"""The job files of `configs/cluster`, run on machines that share no disk: a part of `make nodes`.

A stand-in takes the place of `srun`, and starts its command on the other machine; Slurm's signals
are sent from here. The RayJob is submitted by `ray job submit`, as KubeRay submits it. After a
failure it is submitted to a new cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import Promise
from chaos import manifests
from chaos.cluster import BUILD, CONFIG, RAY_OPTIONS, RUN, UPDATES, Site
from chaos.machines import COMMAND_SECONDS, PATH, Network
from chaos.proof import prove
from chaos.runs import lines

FILES = Path(__file__).parents[1] / "configs" / "cluster"
SCRIPT, BIN = "/tmp/slurm.sh", "/tmp/bin"
REQUEST, OPTIONS, PASSED = "/tmp/srun.request", "/tmp/srun.options", "/tmp/srun.environment"
SRUN = f"""#!/bin/bash
while [[ $1 == -* ]]; do echo "$1"; shift; done > {OPTIONS}
env | grep ^RAY_ > {PASSED}
printf '%s\\n' "$@" > {REQUEST}.partial
mv {REQUEST}.partial {REQUEST}
exec sleep infinity
"""


def slurm() -> list[Promise]:
    """`slurm.sh` is interrupted before its time limit, and submitted again."""
    with Network() as network:
        site = Site(network, "slurm")
        program = site.on_head(BIN) / "srun"
        program.parent.mkdir()
        program.write_text(SRUN, encoding="utf-8")
        program.chmod(0o755)
        shutil.copy(FILES / "slurm.sh", site.on_head(SCRIPT))
        options = submit(site)
        site.wait(lambda: site.updates >= 3, "update 3 of a Slurm job")
        batch = Path(f"/proc/{site.controller.pid}/task/{site.controller.pid}/children")
        os.kill(int(batch.read_text()), signal.SIGINT)  # as `--signal=B:INT`: to the script alone
        code = site.controller.wait()
        done = site.updates
        saved = (site.folder / f"checkpoints/update_{done}").is_dir()
        submit(site)
        site.wait((site.folder / "summary.json").exists, "the end of the Slurm job, resubmitted")
        last = site.controller.wait()
        shutil.copytree(site.folder, BUILD / "slurm")
    return [
        Promise(
            "slurm.sh: an interrupt ends the job with a checkpoint, submitted again it resumes",
            f"exit code {code} after update {done} of {UPDATES}, checkpoint {saved}; then {last}; "
            f"srun {options}",
            code == 0 and saved and done < UPDATES and last == 0,
        ),
        *prove(BUILD / "slurm"),
    ]


def submit(site: Site) -> str:
    """Run the batch script with the variables of an allocation of two nodes, the second of them
    new; returns the options of its `srun`."""
    request = site.on_head(REQUEST)
    request.unlink(missing_ok=True)
    variables = {
        "PATH": f"{BIN}:{PATH}",
        "SLURM_JOB_NUM_NODES": "2",
        "RAY_OPTIONS": " ".join(RAY_OPTIONS),
    }
    site.start("bash", SCRIPT, CONFIG, RUN, environment=variables)
    site.wait(request.exists, "srun of a Slurm job")
    other = site.network.machine()
    passed = site.on_head(PASSED).read_text().splitlines()
    variables = dict(line.split("=", 1) for line in passed)
    other.start(request.read_text().splitlines(), site.log.fileno(), variables)
    return " ".join(site.on_head(OPTIONS).read_text().split())


def rayjob() -> list[Promise]:
    """The job of `rayjob.yaml` is submitted, its controller is killed, and the job is submitted
    again to a new cluster with the old volume, as KubeRay does within `backoffLimit`."""
    job, script, _ = manifests.documents()
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    names = {variable["name"] for variable in head["containers"][0]["env"]}
    values = {"RUN": RUN, "CONFIG": CONFIG, "KEYS": "pipeline.updates=5"}
    folder = BUILD / "rayjob" / "run"
    folder.parent.mkdir()
    with Network() as network:
        site = submitted(network, job, script, values, folder)
        site.wait(lambda: site.updates >= 3, "update 3 of a RayJob")
        failed = site.kill_controller()
    with Network() as network:
        site = submitted(network, job, script, values, folder)
        site.wait((folder / "summary.json").exists, "the end of the RayJob, on a new cluster")
        code = site.controller.wait(COMMAND_SECONDS)
    sessions = sum(row["worker"] == "controller" for row in lines(folder / "workers.jsonl"))
    faults = manifests.kuberay_faults(job) + manifests.kubernetes_faults()
    return [
        Promise(
            f"rayjob.yaml: fields are those of KubeRay, pods those of Kubernetes "
            f"{' and '.join(manifests.KUBERNETES)}",
            f"{len(faults)} faults {faults}",
            not faults,
        ),
        Promise(
            "rayjob.yaml: a controller that is killed fails the job, and the job submitted to a "
            "new cluster with the same volume resumes the run",
            f"{sessions} sessions, exit codes of `ray job submit` {failed} and {code}; variables "
            f"of the script that the head lacks: {sorted(values.keys() - names)}",
            sessions == 2 and failed != 0 and code == 0 and values.keys() <= names,
        ),
        *prove(folder),
    ]


def submitted(
    network: Network,
    job: Mapping[str, Any],
    script: Mapping[str, Any],
    values: Mapping[str, str],
    folder: Path,
) -> Site:
    """A new cluster to which the job is submitted, with the head's variables and its volume."""
    site = Site(network, "rayjob", folder)
    site.start_ray("--dashboard-host=0.0.0.0", environment=values)
    site.join()
    entrypoint = str(job["spec"]["entrypoint"]).replace("/etc/tramontane", "/tmp")
    site.on_head("/tmp/train.sh").write_text(script["data"]["train.sh"], encoding="utf-8")
    address = f"http://{site.head.address}:8265"
    site.start("ray", "job", "submit", "--address", address, "--", *entrypoint.split())
    return site
