#!/usr/bin/env bash
# All checks: set-up, ruff, mypy, pytest. Arguments go to pytest; the default set leaves out what is slow or needs a GPU.
#   bash tests/run.sh                        everything CI runs
#   bash tests/run.sh tests/unit -k config   some of it
#   bash tests/run.sh -m slow                the slow ones
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup_env.sh dev
export OMP_NUM_THREADS=1

status=0
ruff check . || status=1
mypy || status=1
python -m pytest "$@" || status=$?
exit "$status"
