#!/usr/bin/env bash
# All checks: set-up, ruff, mypy, pytest. Arguments go to pytest; the default set leaves out what is slow or needs a GPU.
#   bash tests/run.sh                        everything CI runs
#   bash tests/run.sh tests/unit -k config   some of it
#   bash tests/run.sh -m slow                the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import this package: compile it once

status=0
ruff check . || status=1
if [[ " $*" == *" tests"* ]]; then
    mypy || status=1
    python -m pytest "$@" || status=$?
    exit "$status"
fi

# Everything runs in three parts at once, of about the same length. The output of most distributed tests is shown as
# it comes, that of the others at the end.
ranks=(tests/distributed/test_{grad_compression,layout_matrix,perturbation}.py)
whole_runs=(tests/unit/training tests/unit/checkpoint tests/unit/convert tests/unit/data)
output=$(mktemp -d) pids=() codes=
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$output"' EXIT
{ mypy && exec python -m pytest "${whole_runs[@]}" "${ranks[@]}" "$@"; } &>"$output/0" &
pids+=($!)
python -c "import torch._dynamo, transformers" # compiles them once, where each part would
others=(tests/unit "${whole_runs[@]/#/--ignore=}" tests/slurm tests/soaking tests/cards tests/parity tests/golden tests/fuzz)
python -m pytest "${others[@]}" "$@" &>"$output/1" &
pids+=($!)
code=0
python -m pytest tests/distributed tests/known_bugs "${ranks[@]/#/--ignore=}" tests/gpu "$@" || code=$?
codes="$codes$code"
for part in 0 1; do
    code=0
    wait "${pids[part]}" || code=$?
    cat "$output/$part"
    codes="$codes$code"
done
python -m tests.cards --stale | tail -n 1 # of docs/cards.md
# pytest's 5: -k or -m has selected nothing, as may be in some parts.
[[ $codes =~ ^[05]*0[05]*$ ]] || status=1
exit "$status"
