#!/usr/bin/env bash
# From a fresh checkout to a loss curve: makes .venv, turns the Python standard library's sources into token files and
# pretrains a small Llama-style model on them with tensor and sequence parallelism, on two processes of the CPU.
# One or two minutes after the set-up; nothing but the set-up uses the network. Run it as often as you like.
set -euo pipefail

usage() {
    cat <<END
usage: bash examples/quickstart.sh [--input-dir DIR] [--json-keys KEY] [--steps N] [--out DIR] [-- FLAG...]

  --input-dir DIR  text to train on: sources, .txt, .md and .jsonl files below DIR (the Python standard library)
  --json-keys KEY  where the text is in the objects of .jsonl files (text)
  --steps N        training steps (300)
  --out DIR        folder for the token files, metrics and the loss curve (runs/quickstart)
  -- FLAG...       more flags for pretrain_gpt.py, such as: -- --lr 3e-4 --num-layers 6
END
}

fail() {
    echo "quickstart: $*" >&2
    exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
input='' key=text steps=300 out=$root/runs/quickstart
while [ $# -gt 0 ]; do
    case $1 in
        --input-dir | --json-keys | --steps | --out) [ -n "${2:-}" ] || fail "$1 needs a value (see --help)" ;;
    esac
    case $1 in
        --input-dir) input=$2 && shift 2 ;;
        --json-keys) key=$2 && shift 2 ;;
        --steps) steps=$2 && shift 2 ;;
        --out) out=$2 && shift 2 ;;
        --) shift && break ;;
        -h | --help) usage && exit ;;
        *) usage >&2 && fail "unknown argument: $1" ;;
    esac
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || fail "--steps must be a whole number above 0, not '$steps'"
if [ -n "$input" ]; then
    [ -d "$input" ] || fail "--input-dir: there is no folder '$input'"
    input=$(cd "$input" && pwd)
fi
mkdir -p "$out" || fail "--out: the folder '$out' cannot be made"
out=$(cd "$out" && pwd)
cd "$root"

source tools/setup_env.sh run
export OMP_NUM_THREADS=1 # two processes share the machine; threads waiting for one another would only slow it down

if [ -n "$input" ]; then
    suffixes=(.txt .md .rst .jsonl .py .c .h .cc .cpp .java .js .ts .go .rs .sh .html .tex)
    excluded=(.git .venv node_modules)
else
    input=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    suffixes=(.py)
    excluded=(test tests site-packages dist-packages)
fi
echo "corpus: $input"
python tools/preprocess_data.py --input "$input" --suffix "${suffixes[@]}" \
    --exclude "${excluded[@]}" --json-keys "$key" \
    --tokenizer-type ByteTokenizer --append-eod --output-prefix "$out/data/corpus"

corpus=$out/data/corpus_${key}_document
flags=(
    --preset tiny-llama --device cpu
    --tensor-model-parallel-size 2 --sequence-parallel
    --data-path "$corpus" --split 90,10,0
    --train-iters "$steps" --micro-batch-size 8 --global-batch-size 8
    --log-interval 10 --run-dir "$out"
)
count='import sys; from megatron.data.indexed import IndexedDataset; print(len(IndexedDataset(sys.argv[1]).documents) - 1)'
documents=$(python -c "$count" "$corpus")
if [ "$documents" -ge 10 ]; then
    flags+=(--eval-interval 100 --eval-iters 4)
else
    echo "no validation: that takes 10 documents, and $input has $documents"
fi

# First without torchrun: a mistake in the flags is then told once, and without its traceback.
python pretrain_gpt.py --check-config --world-size 2 "${flags[@]}" "$@" >/dev/null
torchrun --standalone --nproc-per-node 2 pretrain_gpt.py "${flags[@]}" "$@"

cat <<END

next: with your own text,
  cd $(printf %q "$root") && . .venv/bin/activate
  python tools/preprocess_data.py --input TEXT.jsonl --tokenizer-type ByteTokenizer --append-eod --output-prefix data/mine
  torchrun --standalone --nproc-per-node 2 pretrain_gpt.py --preset tiny-llama --tensor-model-parallel-size 2 \\
      --data-path data/mine_text_document --train-iters 1000 --micro-batch-size 8 --log-interval 10 --run-dir runs/mine
  python tools/plot_run.py runs/mine # draws it while it runs
END
