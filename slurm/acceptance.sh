#!/usr/bin/env bash
# Tries a cluster before it is trusted with a run: layouts against one process, a killed rank, a checkpoint in another
# layout, bandwidths. The page to read, and to attach to a bug report, is acceptance.md in the job's folder below $RUN.
#   sbatch slurm/acceptance.sh                              2 nodes with 8 GPUs; any number from 2 to 16 GPUs will do
#   SMALL=1 sbatch --nodes=2 slurm/acceptance.sh            on CPUs
# Flags of tools/acceptance.py may follow, such as: --parts machine bandwidth
#SBATCH --job-name=acceptance
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0
#SBATCH --time=01:00:00 --no-requeue
#SBATCH --output=slurm-%x-%j.out

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }

MAX_RESTARTS=0 # a rank that is killed ends the start, as the loss of a node does
PORT='{port}'  # the tool makes many starts, each with a port of its own
prepare
device=cuda # a cluster on which no GPU is found has not passed
[ -z "$SMALL" ] || device=cpu
flags=(--out "$RUN/$JOB" --device "$device" --launch "$(printf '%q ' "${COMMAND[@]}")")
start python tools/acceptance.py "${flags[@]}" "$@"
