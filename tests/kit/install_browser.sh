#!/usr/bin/env bash
# Installs the browser of tests/kit/browser.py on Debian and Ubuntu, and a font for its pictures.
#   bash tests/kit/install_browser.sh
# If it cannot, it prints why and fails; the tests then skip.
set -euo pipefail

for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null && exit 0
done
fail() {
    echo "tests/kit/install_browser.sh: $1; not installed: chromium-headless-shell" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "only root installs packages"
command -v apt-get >/dev/null || fail "this is neither Debian nor Ubuntu (no apt-get)"
export DEBIAN_FRONTEND=noninteractive
{ timeout 300 apt-get update -qq &&
    timeout 300 apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core; } \
    >/dev/null 2>&1 </dev/null || fail "apt-get failed"
