#!/usr/bin/env bash
# Test a cluster before a run: layouts against one process, a killed rank, a checkpoint loaded in another layout,
# bandwidths. The report, also for bug reports, is acceptance.md in the job's folder below $RUN.
#   sbatch slurm/acceptance.sh                              2 nodes with 8 GPUs; any number from 2 to 16 GPUs will do
#   SMALL=1 sbatch --nodes=2 slurm/acceptance.sh            on CPUs
# Flags of tools/acceptance.py may follow, such as: --parts machine bandwidth
#SBATCH --job-name=acceptance
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=01:00:00 --no-requeue
#SBATCH --output=runs/%x-%j.out

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }

MAX_RESTARTS=0 # a killed rank ends the start, like the loss of a node
prepare
device=cuda # a cluster without visible GPUs must fail
[ -z "$SMALL" ] || device=cpu
flags=(--out "$RUN/$JOB" --device "$device" --launch "$(printf '%q ' "${COMMAND[@]}")")
start python tools/acceptance.py "${flags[@]}" "$@"
