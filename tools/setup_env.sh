# Sourced by scripts that need the Python environment:   source tools/setup_env.sh [dev]
#
# Creates .venv at the root of the repository with the pinned packages (dev: and the test tools), installs this package
# in it and puts it first in PATH. Does nothing if .venv is up to date. A .venv of your own is left alone: then it is
# .venv-setup. Exits the calling script on error. Packages are checked against the hashes in the requirements, except
# torch, whose builds come from different indexes.
#
#   PYTHON=...           interpreter for .venv; default: the first of python3, python3.13, .12, .11 that is >= 3.11
#   TORCH_INDEX_URL=...  package index for torch only, such as that of its CPU builds (README); default: pip's
#   SETUP_UV=1           install by uv, from where uv is configured to look; by pip only what that fails at

setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
setup_venv=$setup_root/.venv
if [ -e "$setup_venv" ] && [ ! -e "$setup_venv/.made-by-setup" ]; then
    setup_venv=$setup_root/.venv-setup
fi
unset PYTHONHOME PYTHONPATH # module systems set these to packages of other versions

setup_fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# Install packages; with SETUP_UV=1 by uv, in seconds instead of minutes.
setup_install() {
    if [ -n "${SETUP_UV:-}" ] && { [ -x "$setup_venv/bin/uv" ] || setup_pip uv==0.13.9; } &&
        "$setup_venv/bin/uv" pip install --quiet --python "$setup_venv/bin/python" "$@" </dev/null; then
        return
    fi
    setup_pip "$@" && return
    setup_fail "pip install $* failed; see above." \
        "fix: check the network; behind a mirror set PIP_INDEX_URL (and TORCH_INDEX_URL for torch), then run this again"
}

setup_pip() {
    env -u PIP_TARGET -u PIP_PREFIX PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 \
        "$setup_venv/bin/python" -m pip install --quiet "$@" </dev/null
}

setup_find_python() {
    local newest name names=(python3 python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || names=("$PYTHON")
    local check='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, int(sys.argv[1])))'
    for newest in 13 99; do # the pins support 3.11 to 3.13; a newer Python is the last resort
        for name in "${names[@]}"; do
            if "$name" -c "$check" "$newest" >/dev/null 2>&1; then
                echo "$name"
                return
            fi
        done
    done
    setup_fail "no Python >= 3.11 found (tried: ${names[*]})." \
        "fix: install one, or name it: PYTHON=python3.12 bash $0"
}

# Print what an environment is built from, including its path, which is written into the scripts of a virtual environment.
setup_stamp() {
    echo "$setup_root"
    (cd "$setup_root" && cat pyproject.toml tools/setup_env.sh "$@")
}

setup_is_current() {
    local stamp=$1
    shift
    [ -x "$setup_venv/bin/python" ] && setup_stamp "$@" | cmp -s - "$setup_venv/$stamp"
}

setup_create() {
    local python
    python=$(setup_find_python) || exit 1
    [ "$setup_venv" = "$setup_root/.venv" ] || echo "setup: .venv is not of this script, and left alone"
    echo "setup: creating ${setup_venv##*/} with $("$python" --version) (once)"
    if ! "$python" -m venv --clear "$setup_venv"; then
        rm -rf "$setup_venv"
        setup_fail "$python could not create a virtual environment; see above." \
            "fix: install Python's venv module (Debian, Ubuntu: apt install python3-venv)"
    fi
    touch "$setup_venv/.made-by-setup"
}

setup_install_run() {
    local torch
    torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$setup_root/requirements.txt")
    setup_create
    echo "setup: installing $torch (takes minutes; TORCH_INDEX_URL avoids the CUDA download: README, Set up)"
    setup_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} --no-deps "$torch"
    echo "setup: installing requirements.txt (a minute or two)"
    setup_install --no-deps --require-hashes -r "$setup_root/requirements.txt"
    setup_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch" # a CUDA build needs NVIDIA's libraries
    setup_install --no-deps --no-build-isolation --editable "$setup_root"
    setup_stamp requirements.txt >"$setup_venv/.stamp-run"
}

setup_install_dev() {
    echo "setup: installing requirements-dev.txt (a minute or two)"
    setup_install --no-deps --require-hashes -r "$setup_root/requirements-dev.txt"
    setup_stamp requirements.txt requirements-dev.txt >"$setup_venv/.stamp-dev"
}

setup_is_current .stamp-run requirements.txt || setup_install_run
if [ "${1:-}" = dev ]; then
    setup_is_current .stamp-dev requirements.txt requirements-dev.txt || setup_install_dev
fi
export VIRTUAL_ENV=$setup_venv PATH=$setup_venv/bin:$PATH
