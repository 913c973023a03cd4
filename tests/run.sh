#!/usr/bin/env bash
# All checks: set-up, ruff, mypy, pytest. Arguments go to pytest; the default set leaves out what is slow or needs a GPU.
#   bash tests/run.sh                        everything CI runs
#   bash tests/run.sh tests/unit -k config   some of it
#   bash tests/run.sh -m slow                the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev
export OMP_NUM_THREADS=1

# Unless a folder is named, the tests run in two halves at once: those of several processes, which mostly wait for each
# other, and the rest. What the rest says is shown last. A half in which nothing is selected (5) is none that failed.
several=(tests/distributed tests/parity tests/slurm tests/soaking)
status=0
ruff check . || status=1
if [[ " $*" == *" tests"* ]]; then
    mypy || status=1
    python -m pytest "$@" || status=$?
else
    said=$(mktemp)
    trap 'rm -f "$said"' EXIT
    { mypy && python -m pytest "${several[@]/#/--ignore=}" "$@"; } >"$said" 2>&1 &
    python -m pytest "${several[@]}" "$@" || [ $? = 5 ] || status=1
    wait $! || [ $? = 5 ] || status=1
    cat "$said"
fi
exit "$status"
