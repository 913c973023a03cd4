#!/usr/bin/env bash
# Rehearse on a GPU that computes nothing: runs of pretrain_gpt.py with 1 to 4 ranks, and tests/gpu, on any machine.
#   bash tests/nullgpu/run.sh                     all of it; the result goes to tests/golden/nullgpu.txt
#   bash tests/nullgpu/run.sh tests/nullgpu -k pipeline     some of it
set -euo pipefail
if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
    sed -n '2,4p' "${BASH_SOURCE[0]}"
    echo "# The first time, it installs 5 GB in ${NULLGPU:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-pretrain/nullgpu}."
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/nullgpu/setup.sh
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 NULLCUDA_DEVICES=4
unset PYTHONDONTWRITEBYTECODE
[[ $# == 0 ]] && export NULLGPU_LOG=1
[[ " $*" == *" tests"* ]] || set -- tests/nullgpu tests/gpu "$@"
set -- --deselect tests/gpu/test_objects.py "$@" # values that pass through NCCL
exec python -m pytest -p tests.nullgpu.log -m "slow or gpu" "$@"
