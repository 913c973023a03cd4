#!/usr/bin/env bash
# Encode text into token files on many nodes: every task of the array encodes its shards of a corpus, and a second job
# merges them. From the root of the repository:   sbatch slurm/preprocess_array.sh
# Submitting it again, with an array of any size, encodes only what is missing, and continues in the middle of a shard.
#   CORPUS     a folder of .jsonl, .txt, .parquet or .arrow files     OUT   prefix of the result (data/corpus)
#   TOKENIZER  a folder with a tokenizer.json                            KEY   where the text of an object is (text)
#   SHARDS     parts of equal size (as many as the first array has tasks)
# SMALL=1 sbatch --array=0-1 slurm/preprocess_array.sh tries it on the pages of docs/. More flags of preprocess_data.py may follow.
#SBATCH --job-name=preprocess
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --array=0-15 --nodes=1 --ntasks=1 --cpus-per-task=8
#SBATCH --time=12:00:00 --requeue
#SBATCH --output=runs/%x-%A_%a.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
KEY=${KEY:-text}
if [ -n "$SMALL" ]; then
    CORPUS=${CORPUS:-docs} OUT=${OUT:-$RUN/corpus}
    flags=(--suffix .md --tokenizer-type ByteTokenizer --workers 1)
else
    CORPUS=${CORPUS:-data/text} OUT=${OUT:-data/corpus}
    flags=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-data/tokenizer}")
fi
PARTS=${OUT}_$KEY.parts
[ -d "$CORPUS" ] || refuse "there is no folder $CORPUS" "fix: CORPUS=FOLDER sbatch slurm/preprocess_array.sh"
first=${SLURM_ARRAY_TASK_MIN:-0} step=${SLURM_ARRAY_TASK_STEP:-1} count=${SLURM_ARRAY_TASK_COUNT:-1} # of the array's numbers
begun=
for name in "$PARTS"/shard-*-of-*; do
    [ ! -e "$name" ] || { begun=${name##*-of-} && begun=${begun%%_*}; }
done
SHARDS=${SHARDS:-${begun:-$count}}
[ "${begun:-$SHARDS}" = "$SHARDS" ] || refuse "$PARTS has shards of $begun, not of $SHARDS" "fix: SHARDS=$begun | rm -r ${PARTS@Q}"
name_part() { printf -v part '%s/shard-%05d-of-%d' "$PARTS" "$1" "$SHARDS"; }
is_done() { [ -e "${part}_${KEY}_document.idx" ]; } # the file written last

if [ -n "${MERGE:-}" ]; then # the second job
    for ((i = 0; i < SHARDS; i++)); do
        name_part "$i"
        is_done || refuse "shard $i of $SHARDS is not in $PARTS" "fix: sbatch slurm/preprocess_array.sh"
    done
    alone tools/merge_datasets.py --input "$PARTS" --output-prefix "${OUT}_${KEY}_document" --overwrite
    exit
fi

[ $((${SLURM_ARRAY_TASK_MAX:-$first} - first)) = $(((count - 1) * step)) ] ||
    refuse "the numbers of the array must have no gaps" "fix: submit the whole array again"
if [ "${SLURM_ARRAY_TASK_ID:-$first}" = "$first" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && [ -z "$DRY_RUN" ]; then
    merge=(sbatch --array=0 --job-name=merge --dependency="afterok:${SLURM_ARRAY_JOB_ID:-$JOB}" --kill-on-invalid-dep=yes)
    merge+=(--partition="$SLURM_JOB_PARTITION" ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"})
    MERGE=1 RUN=$RUN SHARDS=$SHARDS "${merge[@]}" slurm/preprocess_array.sh || say "after all tasks:   MERGE=1 sbatch --array=0 slurm/preprocess_array.sh"
fi

missing=0
[ -n "$DRY_RUN" ] || mkdir -p "$PARTS"
for ((i = (${SLURM_ARRAY_TASK_ID:-$first} - first) / step; i < SHARDS; i += count)); do
    name_part "$i"
    is_done || alone tools/preprocess_data.py --input "$CORPUS" --follow-links --json-keys "$KEY" "${flags[@]}" --append-eod \
        --shard "$i/$SHARDS" --output-prefix "$part" --overwrite "$@" || missing=$((missing + 1))
done
[ "$missing" = 0 ] || refuse "$missing shards have failed, see above; submit it again for these"
