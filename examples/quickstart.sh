#!/usr/bin/env bash
# From a fresh checkout to text by a model of one's own: makes .venv, learns a tokenizer from the Python standard
# library's sources, pretrains a small Llama-style model on them on two processes of the CPU, kills it half-way, goes on
# in another parallel layout, hands the model to Hugging Face's transformers and lets it write there.
# A few minutes after the set-up; nothing but the set-up uses the network. Run it as often as you like.
set -euo pipefail

usage() {
    cat <<END
usage: bash examples/quickstart.sh [--input-dir DIR] [--json-keys KEY] [--follow-links] [--on-bad-line skip]
                                   [--max-line-bytes N] [--steps N] [--out DIR] [-- FLAG...]

  --input-dir DIR  text to train on: sources, .txt, .md and .jsonl files below DIR (the Python standard library)
  --json-keys KEY  where the text is in the objects of .jsonl files (text)
  --follow-links, --on-bad-line, --max-line-bytes
                   as of tools/preprocess_data.py
  --steps N        training steps (600)
  --out DIR        folder for all that it makes (runs/quickstart); DIR-2, DIR-3... while there is something in it
  -- FLAG...       more flags for pretrain_gpt.py, such as: -- --lr 3e-4 --num-layers 6
END
}

fail() {
    echo "quickstart: $*" >&2
    exit 2
}

say() {
    printf '\n== %s\n' "$*"
}

# The folder, or DIR-2, DIR-3...: what an earlier quickstart has left is never touched.
unused() {
    local folder=$1 number=1
    while [ -n "$(ls -A "$folder" 2>/dev/null)" ]; do
        number=$((number + 1)) folder=$1-$number
    done
    echo "$folder"
}

# The step that the run has logged last.
last_step() {
    local line
    line=$(grep '"iteration"' "$out/metrics.jsonl" 2>/dev/null | tail -n 1) || true
    [[ $line =~ \"iteration\":\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}" || echo 0
}

# Whether the run is half-way and has saved.
is_half_way() {
    [ "$(last_step)" -ge $(((steps + 1) / 2)) ] && ls "$out"/checkpoints/iter_*[0-9]/COMPLETE >/dev/null 2>&1
}

# Kill the launcher and its ranks at once; none of them gets to say goodbye.
crash() {
    local ranks
    ranks=$(pgrep -P $launcher) || ranks=$(cat /proc/$launcher/task/$launcher/children) || true
    kill -KILL $launcher $ranks
    wait $launcher 2>/dev/null || true
}

end_launcher() {
    kill -TERM ${launcher:-} 2>/dev/null && wait || true
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
input='' key=text reading=() steps=600 out=$root/runs/quickstart
while [ $# -gt 0 ]; do
    case $1 in
        --input-dir | --json-keys | --on-bad-line | --max-line-bytes | --steps | --out)
            [ -n "${2:-}" ] || fail "$1 needs a value (see --help)" ;;
    esac
    case $1 in
        --input-dir) input=$2 && shift 2 ;;
        --json-keys) key=$2 && shift 2 ;;
        --follow-links) reading+=("$1") && shift ;;
        --on-bad-line | --max-line-bytes) reading+=("$1" "$2") && shift 2 ;;
        --steps) steps=$2 && shift 2 ;;
        --out) out=${2%/} && shift 2 ;;
        --) shift && break ;;
        -h | --help) usage && exit ;;
        *) usage >&2 && fail "unknown argument: $1" ;;
    esac
done
for flag in "$@"; do
    case ${flag%%=*} in
        --check-config | --data-path | --load | --run-dir | --save | --train-iters)
            fail "${flag%%=*} is set by the quickstart itself (see --help: --steps, --out, --input-dir)" ;;
    esac
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || fail "--steps must be a whole number above 0, not '$steps'"
if [ -n "$input" ]; then
    [ -d "$input" ] || fail "--input-dir: there is no folder '$input'"
    input=$(cd "$input" && pwd)
fi
asked=$out out=$(unused "$out")
mkdir -p "$out" || fail "--out: the folder '$out' cannot be made"
[ "$out" = "$asked" ] || echo "there is something in $asked already; this time, all goes to $out"
out=$(cd "$out" && pwd)
out=${out#"$root"/} # shorter to read
cd "$root"

source tools/setup_env.sh run
export OMP_NUM_THREADS=1 # two processes share the machine; threads waiting for one another would only slow it down
export PET_LOCAL_ADDR=127.0.0.1 # of torchrun, which would look up the machine's name; not every machine knows its own

if [ -n "$input" ]; then
    suffixes=(.txt .md .rst .jsonl .py .c .h .cc .cpp .java .js .ts .go .rs .sh .html .tex)
    excluded=(.git .venv node_modules)
    prompt=''
else
    input=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    suffixes=(.py)
    excluded=(test tests site-packages dist-packages)
    prompt='def __init__(self'
fi
text=(--input "$input" --suffix "${suffixes[@]}" --exclude "${excluded[@]}" --json-keys "$key" "${reading[@]}")

say "a tokenizer of at most 4,096 entries, from the text in $input"
python tools/train_tokenizer.py "${text[@]}" --vocab-size 4096 --output "$out/tokenizer"

say "the text as token files"
python tools/preprocess_data.py "${text[@]}" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --output-prefix "$out/data/corpus"

corpus=$out/data/corpus_${key}_document
flags=(
    --preset tiny-llama --device cpu
    --data-path "$corpus" --split 90,10,0
    --train-iters "$steps" --global-batch-size 8
    --save "$out/checkpoints" --save-interval $(((steps + 2) / 3))
    --log-interval $((steps < 100 ? 1 : 10)) --run-dir "$out"
)
count='import sys; from megatron.data.indexed_dataset import IndexedDataset; print(len(IndexedDataset(sys.argv[1]).documents) - 1)'
documents=$(python -c "$count" "$corpus")
if [ "$documents" -ge 10 ]; then
    flags+=(--eval-interval 100 --eval-iters 4)
else
    echo "no validation: that takes 10 documents, and $input has $documents"
fi
first=(--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 8)
second=(--micro-batch-size 4)
# as --standalone, but without the name localhost, which a bare system may not resolve
launch=(torchrun --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --nproc-per-node 2)

# First without torchrun, which would print its traceback after a mistake in the flags.
python pretrain_gpt.py --check-config --world-size 2 "${flags[@]}" "${second[@]}" "$@" >/dev/null
python pretrain_gpt.py --check-config --world-size 2 "${flags[@]}" "${first[@]}" "$@" >/dev/null

say "training on two processes that share every matrix; killed half-way"
trap end_launcher EXIT # Ctrl-C leaves nothing running
trap 'end_launcher; say "stopped by Ctrl-C, which torchrun shows as an error; what is saved is in $out"; exit 130' INT
"${launch[@]}" pretrain_gpt.py "${flags[@]}" "${first[@]}" "$@" &
launcher=$!
until is_half_way || ! kill -0 $launcher 2>/dev/null; do
    sleep 0.1
done
if kill -0 $launcher 2>/dev/null; then
    crash
    say "killed at step $(last_step), as a crash would; going on from the last checkpoint, two copies of the model"
else
    wait $launcher # it ended before that, perhaps by an error
    say "done before it could be killed; nothing is left for another layout"
fi
launcher=''
"${launch[@]}" pretrain_gpt.py "${flags[@]}" "${second[@]}" "$@"

say "the newest checkpoint as a Hugging Face model"
python tools/convert_checkpoint.py --load "$out/checkpoints" --save-hf "$out/huggingface"

say "what it writes in plain transformers"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
python examples/write_with_transformers.py "$out/huggingface" "$prompt"

cat <<END

== next
cd $(printf %q "$root") && . ${VIRTUAL_ENV##*/}/bin/activate && export PET_LOCAL_ADDR=127.0.0.1
# twice as long, with a new schedule
${launch[*]} pretrain_gpt.py --config $(printf %q "$out/config.yaml") \\
    --train-iters $((2 * steps)) --resume-mode new-schedule
# more text, at the terminal
python tools/generate.py --load $(printf %q "$out/checkpoints") --prompt '${prompt:-The}'
# are the checkpoints what was written?
python tools/inspect_checkpoint.py verify $(printf %q "$out/checkpoints")
# with your own text
bash examples/quickstart.sh --input-dir DIR
END
