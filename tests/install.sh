#!/usr/bin/env bash
# Installs what some tests need on Debian and Ubuntu: Slurm and iproute2 (tests/slurm), a browser with a font (pages).
#   bash tests/install.sh
# If it cannot, it prints why and fails; the tests then skip. Existing files are left alone.
set -euo pipefail

export PATH=$PATH:/usr/sbin:/sbin
missing=()
need() { # PACKAGES COMMAND...: one of the commands
    local command packages=$1
    for command in "${@:2}"; do
        command -v "$command" >/dev/null && return
    done
    missing+=("$packages")
}
need slurmctld slurmctld # not slurm-wlm, which brings a database
need slurmd slurmd
need slurm-client sbatch
need munge munged
need iproute2 ip
need "chromium-headless-shell fonts-dejavu-core" chromium-headless-shell chromium chromium-browser google-chrome
[ ${#missing[@]} -gt 0 ] || exit 0

fail() {
    echo "tests/install.sh: $1; not installed: ${missing[*]}" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "only root installs packages"
command -v apt-get >/dev/null || fail "this is neither Debian nor Ubuntu (no apt-get)"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_packages() {
    # shellcheck disable=SC2068 # an entry may be several packages
    timeout 300 apt-get install -y -qq --no-install-recommends $@
}
timeout 300 apt-get update -qq >"$log" 2>&1 </dev/null || true
install_packages "${missing[@]}" >>"$log" 2>&1 </dev/null && exit 0
failed=() # one that a release lacks keeps no other from its tests
for packages in "${missing[@]}"; do
    install_packages "$packages" >>"$log" 2>&1 </dev/null || failed+=("$packages")
done
missing=("${failed[@]}")
[ ${#missing[@]} = 0 ] || {
    tail -n 5 "$log" >&2
    fail "apt-get failed (its last words are above)"
}
