#!/usr/bin/env bash
# Train two replicas of a tiny GPT-2 that synchronise every 20 steps, on the CPU of one machine: docs/slow_networks.md.
# On two sites, run each of the three commands where it belongs, with the server's address. More flags may follow.
set -euo pipefail
cd "$(dirname "$0")/.."
port=${DILOCO_PORT:-29400} out=${OUT:-runs/diloco}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the replicas share the cores
exec {server_output}< <(exec python tools/diloco_server.py --port "$port")
server=$!
read -r line <&"$server_output" || exit 1 # its address; if it has ended, it has printed why
echo "$line"
trap 'kill $server' EXIT
replica() {
    python pretrain_gpt.py --preset tiny-gpt2 --mock-data --vocab-size 256 --seq-length 64 --device cpu \
        --global-batch-size 8 --train-iters 100 --log-interval 20 --save "$out/$1" --run-dir "$out/$1/logs" \
        --diloco-sync-interval 20 --diloco-fragments 2 --diloco-server "127.0.0.1:$port" "${@:2}"
}
replica site-a "$@" &
first=$!
replica site-b "$@" > /dev/null
wait $first
