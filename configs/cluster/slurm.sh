#!/bin/bash
# Trains on a Slurm allocation. Submitted again with the same RUN, it resumes that run.
#
#   sbatch --nodes=4 --gpus-per-node=8 configs/cluster/slurm.sh CONFIG RUN [KEY=VALUE ...]
#
# Only the first node needs CONFIG, RUN, the data and the model; see docs/scaling.md.
#SBATCH --job-name=tramontane
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@900     # 15 minutes before its time is over: stop with a checkpoint
#SBATCH --no-kill              # another node that fails does not end the job
#SBATCH --requeue              # if the first node fails, the job starts again, and resumes
#SBATCH --open-mode=append
set -euo pipefail
set -m                         # so that the run does not ignore the interrupt

config=$1 run=$2
shift 2
# A batch script runs on the first node; its address needs no name server.
head=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
nodes=$SLURM_JOB_NUM_NODES
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_task_events_report_interval_ms=0
# Without a token, anyone who can reach Ray's ports can run programs. srun passes the token on.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}

# RAY_OPTIONS: further options of `ray start` on every node, e.g. --num-cpus=64.
ray start --head --node-ip-address="$head" --port=6379 --include-dashboard=false ${RAY_OPTIONS:-}
if ((nodes > 1)); then
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$(hostname)" --no-kill \
    --kill-on-bad-exit=0 --cpu-bind=none \
    ray start --address="$head:6379" --block ${RAY_OPTIONS:-} &
fi
timeout 600 python - "$nodes" <<'WAIT'
import sys, time, ray
ray.init("auto", logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
WAIT

if [[ -f $run/config.yaml ]]; then
  begin=(--resume "$run")
else
  begin=("$config" "run_dir=$run")
fi
tramontane train "${begin[@]}" placement.kind=ray placement.address=auto "$@" &
training=$!
trap 'kill -INT $training' INT
wait $training && code=0 || code=$?
if kill -0 $training 2>/dev/null; then  # the interrupt ended `wait`, and the run is still saving
  wait $training && code=0 || code=$?
fi
ray stop
exit $code
