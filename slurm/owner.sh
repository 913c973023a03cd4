# shellcheck shell=bash
# Print the owner of what this user creates in a folder: with some network file systems, another than this user.
owner_in() { # FOLDER
    local made=$1/.owner-$RANDOM$RANDOM
    # The open file is asked, not its name, which the owner of the folder could give to another file.
    (set -C && stat --dereference --format=%u /dev/fd/3 3>"$made") 2>/dev/null || echo "$UID"
    rm -f "$made"
}
