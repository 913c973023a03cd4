# shellcheck shell=bash
# Choose the nodes of a job for the ranks, and the nodes to exclude when it is requeued. Sourced by lib.sh.

# Print the value of an option in the recipe's #SBATCH lines.
asked() { sed -n "s/^#SBATCH.* --$1=\([^ ]*\).*/\1/p" "$0" | head -n 1; }

# Print the nodes, one per line. With --no-kill a job may lose some of them, so Slurm is queried each time. Without a job,
# as many as the recipe asks for; its small_nodes with SMALL=1.
nodes_of_job() {
    if [ "$JOB" != 0 ]; then
        scontrol show hostnames "$(squeue --noheader --jobs="$SELF" --format=%N || echo "$SLURM_JOB_NODELIST")"
    else
        seq -f node%g "${SLURM_JOB_NUM_NODES:-${small_nodes:-$(asked nodes)}}"
    fi
}

# Print the nodes currently excluded. A line of bad_nodes is: node, end of the exclusion (seconds since 1970), reason.
bad_nodes() {
    local node until now
    printf -v now '%(%s)T' -1
    [ ! -f "$STATE/bad_nodes" ] || while read -r node until _; do
        [ "$until" -le "$now" ] || echo "$node"
    done <"$STATE/bad_nodes"
}

# Return whether line $1 is one of the lines of $2.
among() { [[ $'\n'$2$'\n' == *$'\n'"$1"$'\n'* ]]; }

# Set TP, PP and CP from flags; the last of repeated flags counts.
read_layout() {
    TP=1 PP=1 CP=1
    while [ $# -gt 1 ]; do
        case $1 in
            --tensor-model-parallel-size) TP=$2 ;;
            --pipeline-model-parallel-size) PP=$2 ;;
            --context-parallel-size) CP=$2 ;;
        esac
        shift
    done
}

# Print the nodes of the job in the order of their ranks: torchrun's rendezvous sorts its agents by host name. With
# RANK_ORDER=topology, those of a leaf switch follow each other.
nodes_in_order() {
    local nodes
    if [ "$JOB" = 0 ] || [ "$LAUNCHER.$RANK_ORDER" = srun. ]; then
        nodes_of_job
    elif [ "$LAUNCHER" = torchrun ]; then
        nodes_of_job | LC_ALL=C sort
    else
        mapfile -t nodes < <(nodes_of_job)
        build_step 1 "${nodes[@]}"
        # shellcheck disable=SC2016 # expanded on each node
        "${STEP[@]}" bash -c 'echo "$SLURM_TOPOLOGY_ADDR $SLURMD_NODENAME"' </dev/null | sort -V | cut -d ' ' -f 2
    fi
}

# shellcheck disable=SC2034 # lib.sh uses NODES
# Set NODES, the first of which is the head node; empty if the job has too few left.
choose_nodes() { # FLAG...
    local node all bad good=() failed=() needed count
    read_layout "$@"
    mapfile -t all < <(nodes_in_order)
    bad=$(bad_nodes)
    for node in "${all[@]}"; do
        if among "$node" "$bad"; then failed+=("$node"); else good+=("$node"); fi
    done
    needed=$((${SLURM_JOB_NUM_NODES:-${#all[@]}} - SPARES)) count=$needed
    [ "$needed" -ge 1 ] || refuse "SPARES=$SPARES leaves no node to run on" "fix: sbatch --nodes=$((SPARES + 1)) ..."
    if [ "${#good[@]}" -lt "$needed" ]; then # fewer copies of the model, but whole ones
        count=${#good[@]}
        while [ $((count * RANKS % (TP * PP * CP))) != 0 ]; do count=$((count - 1)); done
        if [ "$count" -lt "${MIN_NODES:-$needed}" ]; then # those that failed are better than none
            count=$needed good=("${all[@]}") failed=()
        fi
    fi
    [ ${#failed[@]} = 0 ] || say "left out, their devices have failed: ${failed[*]}"
    if [ "${#good[@]}" -ge "$count" ]; then NODES=("${good[@]:0:count}"); else NODES=(); fi
}

# Print the failures in failures.jsonl after its first $1 lines, and record the nodes whose devices failed.
note_failures() {
    local line now
    printf -v now '%(%s)T' -1
    [ ! -f "$RUN/failures.jsonl" ] || while read -r line; do
        say "first error: $line"
        [[ $line =~ \"kind\":\ ?\"device\" && $line =~ \"host\":\ ?\"([^\"]+)\" ]] || continue
        if ! among "${BASH_REMATCH[1]}" "$(printf '%s\n' "${NODES[@]}")"; then
            say "${BASH_REMATCH[1]} is no node of this start: not left out"
            continue
        fi
        say "a device of ${BASH_REMATCH[1]} has failed: the node is left out for $BAD_NODE_HOURS hours ($STATE/bad_nodes)"
        echo "${BASH_REMATCH[1]} $((now + BAD_NODE_HOURS * 3600)) $line" >>"$STATE/bad_nodes"
    done < <(tail -n "+$(($1 + 1))" "$RUN/failures.jsonl")
}

# Print the nodes to exclude from the next start, one per line: those excluded by the user, and those that failed, if
# enough others exist.
nodes_to_exclude() {
    local bad known said own='' left=0 node
    bad=$(bad_nodes) known=$(cut -d ' ' -f 1 "$STATE/bad_nodes") said=$(squeue --noheader --jobs="$SELF" --format=%x)
    [ -z "$said" ] || while read -r node; do
        among "$node" "$known" || own+=$node$'\n'
    done < <(scontrol show hostnames "$said")
    while read -r node; do
        among "$node" "$own$bad" || left=$((left + 1))
    done < <(sinfo --noheader --Node --format=%N --partition="$SLURM_JOB_PARTITION" --states=idle,alloc,mix,comp | sort -u)
    [ "$left" -ge "$SLURM_JOB_NUM_NODES" ] || bad=''
    printf '%s' "$own$bad" | sort -u
}
