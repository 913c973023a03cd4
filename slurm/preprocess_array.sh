#!/usr/bin/env bash
# Text to token files on many nodes at once: every task of the array takes its share of the files of a corpus, and when
# all are done another job puts the parts together. From the root of the repository:   sbatch slurm/preprocess_array.sh
# A file has a part of its own, so submitting it again does what is missing, with an array of any size.
#   CORPUS     a folder of .jsonl and .txt files, also compressed        OUT   prefix of the result (data/corpus)
#   TOKENIZER  a folder with a tokenizer.json                            KEY   where the text of an object is (text)
# SMALL=1 sbatch --array=0-1 slurm/preprocess_array.sh tries it on the pages of docs/. More flags of preprocess_data.py may follow.
#SBATCH --job-name=preprocess
##SBATCH --account=ACCOUNT
##SBATCH --partition=PARTITION
#SBATCH --array=0-15 --nodes=1 --ntasks=1 --cpus-per-task=8
#SBATCH --time=12:00:00 --requeue
#SBATCH --output=slurm-%x-%A_%a.out --open-mode=append

source slurm/lib.sh || { echo "submit it from the root of the repository" >&2 && exit 2; }
KEY=${KEY:-text}
if [ -n "$SMALL" ]; then
    CORPUS=${CORPUS:-docs} OUT=${OUT:-$RUN/corpus} kinds='md' tokenizer=(--tokenizer-type ByteTokenizer --workers 1)
else
    CORPUS=${CORPUS:-data/text} OUT=${OUT:-data/corpus} kinds='jsonl|json|ndjson|txt'
    tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-data/tokenizer}")
fi
PARTS=$OUT.parts
[ -d "$CORPUS" ] || refuse "there is no folder $CORPUS" "fix: CORPUS=FOLDER sbatch slurm/preprocess_array.sh"

if [ -n "${MERGE:-}" ]; then # the job after the array
    alone tools/merge_datasets.py --input "$PARTS" --output-prefix "${OUT}_${KEY}_document" --overwrite
    exit
fi

first=${SLURM_ARRAY_TASK_MIN:-0} step=${SLURM_ARRAY_TASK_STEP:-1} # of the array's numbers
if [ "${SLURM_ARRAY_TASK_ID:-$first}" = "$first" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && [ -z "$DRY_RUN" ]; then
    merge=(sbatch --array=0 --job-name=merge --dependency="afterok:${SLURM_ARRAY_JOB_ID:-$JOB}" --kill-on-invalid-dep=yes)
    MERGE=1 "${merge[@]}" slurm/preprocess_array.sh || say "after all tasks:   MERGE=1 sbatch --array=0 slurm/preprocess_array.sh"
fi

missing=0
[ -n "$DRY_RUN" ] || mkdir -p "$PARTS"
kinds=".*\.($kinds)(\.(gz|zst|bz2|xz))?"
mapfile -t files < <(find -L "$CORPUS" -type f -regextype posix-extended -regex "$kinds" | LC_ALL=C sort)
for ((i = (${SLURM_ARRAY_TASK_ID:-$first} - first) / step; i < ${#files[@]}; i += ${SLURM_ARRAY_TASK_COUNT:-1})); do
    name=${files[i]#"$CORPUS"/}
    part=$PARTS/${name//\//__}
    [ -e "${part}_${KEY}_document.idx" ] || # which comes last
        alone tools/preprocess_data.py --input "${files[i]}" --json-keys "$KEY" "${tokenizer[@]}" --append-eod \
            --output-prefix "$part" --overwrite "$@" || missing=$((missing + 1))
done
[ "$missing" = 0 ] || refuse "$missing files have failed, see above; submit it again for these"
