#!/usr/bin/env bash
# Prepare the null GPU: a Python 3.12 environment with the CUDA build of torch (about 5 GB), and the stand-in libraries.
#   source tests/nullgpu/setup.sh     also sets the environment variables of this shell
# The folder is $NULLGPU, by default in the user's cache. It is reused if its versions are those below.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export NULLGPU=${NULLGPU:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-pretrain/nullgpu}
packages=(torch==2.11.0 transformers==5.17.0 numpy pyyaml tokenizers xxhash pytest)

venv=$NULLGPU/venv
if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" - "${packages[@]}" <<'CHECK'; then
import sys
from importlib.metadata import version
wanted = (name.split("==") for name in sys.argv[1:] if "==" in name)
sys.exit(any(version(name).partition("+")[0] != number for name, number in wanted))
CHECK
    python=$(command -v python3.12 || true)
    if ! "${python:-false}" --version &>/dev/null; then
        python=$(pyenv prefix "$(pyenv versions --bare | grep '^3\.12\.' | tail -n 1)")/bin/python # a shim of pyenv
    fi
    mkdir -p "$NULLGPU"
    "$python" -m venv --clear "$venv"
    "$venv/bin/pip" install -q "${packages[@]}"
fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
build() { # target source options...
    local target=$NULLGPU/$1 source=$here/$2
    [[ $target -nt $source ]] && return
    mkdir -p "$NULLGPU/include/nv"
    # a header that the wheels do not contain
    printf '%s\n' '#define NV_IF_TARGET(...)' '#define NV_IF_ELSE_TARGET(...)' '#define NV_DISPATCH_TARGET(...)' \
        >"$NULLGPU/include/nv/target"
    local folders=("$NULLGPU/include" "$site/nvidia/cu13/include" "$site/nvidia/nccl/include"
        "$site/triton/backends/nvidia/include")
    # a new file, because running processes may have mapped the old one
    gcc -O2 -shared -fPIC -w "${folders[@]/#/-I}" -o "$target.$$" "$source" "${@:3}" && mv "$target.$$" "$target"
}
build libnullcuda.so nullcuda.c -ldl -lpthread
build libcuda.so.1 nulldriver.c -Wl,-soname,libcuda.so.1 -ldl
ln -sf libcuda.so.1 "$NULLGPU/libnvidia-ml.so.1"

export LD_LIBRARY_PATH=$NULLGPU LD_PRELOAD=$NULLGPU/libnullcuda.so TRITON_LIBCUDA_PATH=$NULLGPU
export PATH=$venv/bin:$PATH
# the pool of compiler processes sometimes does not end, and two cores have no use for it
export TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$NULLGPU/inductor TRITON_CACHE_DIR=$NULLGPU/triton
# cuDNN's attention cannot run: it asks the driver for more than the stand-in has
export TORCH_CUDNN_SDPA_DEPRIORITIZED=1
