#!/usr/bin/env bash
# All checks: set-up, ruff, mypy, pytest. Arguments go to pytest; the default set leaves out what is slow or needs a GPU.
#   bash tests/run.sh                        everything CI runs
#   bash tests/run.sh tests/unit -k config   some of it
#   bash tests/run.sh -m slow                the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev
export OMP_NUM_THREADS=1

# Unless some of it is named, the tests run in two halves at once: tests/distributed, whose ranks mostly wait for each
# other, and the rest, whose output is shown last.
status=0
ruff check . || status=1
if [[ " $*" == *" tests"* ]]; then
    mypy || status=1
    python -m pytest "$@" || status=$?
else
    output=$(mktemp) one=0 rest=0
    trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$output"' EXIT
    { mypy && exec python -m pytest --ignore=tests/distributed "$@"; } >"$output" 2>&1 &
    python -m pytest tests/distributed "$@" || one=$?
    wait $! || rest=$?
    cat "$output"
    [[ $one$rest =~ ^(00|05|50)$ ]] || status=1 # pytest's 5: -k or -m has selected nothing, as may be in one of them
fi
exit "$status"
