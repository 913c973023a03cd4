#!/usr/bin/env bash
# Make the environment of megatron-core: bash tests/megatron_core/setup.sh FOLDER
set -euo pipefail
python3 -m venv "$1"
"$1/bin/pip" install --quiet torch==2.13.0 numpy packaging einops tqdm regex six pyyaml psutil pybind11
"$1/bin/pip" install --quiet --no-deps megatron-core==0.16.1
echo "export MEGATRON_CORE_PYTHON=$1/bin/python"
