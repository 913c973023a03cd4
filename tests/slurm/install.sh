#!/usr/bin/env bash
# Installs what tests/slurm needs on Debian and Ubuntu (16 s, 4 MB): Slurm itself, and iproute2.
#   bash tests/slurm/install.sh
# If it cannot, it prints why and fails; the tests then skip. Existing files are left alone.
set -euo pipefail

export PATH=$PATH:/usr/sbin:/sbin
missing=()
need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null || missing+=("$2")
}
need slurmctld slurmctld
need slurmd slurmd
need sbatch slurm-client
need munged munge
need ip iproute2
[ ${#missing[@]} -gt 0 ] || exit 0

fail() {
    echo "tests/slurm/install.sh: $1; not installed: ${missing[*]}" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "only root installs packages"
command -v apt-get >/dev/null || fail "this is neither Debian nor Ubuntu (no apt-get)"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install_packages() { # not slurm-wlm, which brings a database
    timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq --no-install-recommends "${missing[@]}"
}
install_packages >"$log" 2>&1 </dev/null || {
    tail -n 5 "$log" >&2
    fail "apt-get failed (its last words are above)"
}
