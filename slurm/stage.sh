#!/usr/bin/env bash
# Copy files to a disk of this node, unless copies of their size and time are there.   slurm/stage.sh FOLDER FILE...
# A copy lies in FOLDER under the absolute path of its file. FOLDER is made, and must be closed to other users: a copy that
# another user has made would be taken for the data.
set -euo pipefail
folder=$1 needed=0 files=()
[ -d "$folder" ] || (umask 077 && mkdir -p "$folder")
# shellcheck source=slurm/owner.sh
source "$(dirname "$0")/owner.sh"
if [ -n "$(find -H "$folder" -maxdepth 0 \( ! -user "$(owner_in "$folder")" -o -perm /022 \))" ]; then
    printf 'slurm: %s\n' "${SLURMD_NODENAME:-$(hostname)}: other users can write to $folder, or it belongs to one" \
        "fix: chmod go-w $folder there, STAGE=OTHER_FOLDER, or STAGE= to read the data from the shared disk" >&2
    exit 1
fi
for file in "${@:2}"; do
    state=$(stat --dereference --format='%s %.9Y' "$file")
    rm -f "$folder$file.part" # of a copy that was interrupted
    [ "$(stat --format='%s %.9Y' "$folder$file" 2>/dev/null)" != "$state" ] || continue
    files+=("$file") needed=$((needed + ${state% *}))
done
[ ${#files[@]} != 0 ] || exit 0
free=$(df --output=avail --block-size=1 "$folder" | tail -n 1)
if [ "$free" -lt "$needed" ]; then
    printf 'slurm: %s\n' "${SLURMD_NODENAME:-$(hostname)}: $folder has $((free >> 20)) MiB free, the data need $((needed >> 20))" \
        "fix: free some space there, STAGE=OTHER_FOLDER, or STAGE= to read the data from the shared disk" >&2
    exit 1
fi
for file in "${files[@]}"; do
    mkdir -p "$(dirname "$folder$file")"
    cp --preserve=timestamps "$file" "$folder$file.part"
    mv "$folder$file.part" "$folder$file"
done
