# shellcheck shell=bash
# What the recipes of this folder share: how one program comes to run on many nodes, and to its end.
# Sourced by them, from the root of the repository. It is written to be read from top to bottom, as a job goes through it:
# where we are, what Python, which nodes, how ranks find each other, the network, how a run is stopped, and what then.
#
# Words of the environment, all optional (SMALL=1 RUN=runs/try sbatch slurm/train_175b.sh):
#   RUN             the run's folder; checkpoints and all the rest go below (runs/, and the recipe's name)
#   SMALL           anything: the same script with a tiny model on CPUs; STEPS (20) and SAVE_EVERY (5) say how long
#   DRY_RUN         anything: print what would be started, and start nothing; works without Slurm
#   LAUNCHER        torchrun: one agent on each node, which starts and restarts its ranks; srun: one task for each rank
#   NETWORK         infiniband, or ethernet: TCP over 100 GbE.   IFNAME: the interface of TCP, such as eth0
#   CONTAINER       an image: FILE.sif runs under apptainer, all else under pyxis/enroot. MOUNTS: SRC:DST,... besides
#   VENV            a virtual environment, where it is not .venv; not used in a container
#   RANKS_PER_NODE  (the GPUs of a node; with SMALL 4)
#   SPARES          so many of the job's nodes are kept for those that turn out bad (0)
#   MIN_NODES       go on with as few, where more are bad than spared (all that are needed)
#   MAX_RESTARTS    how often ranks are started again inside the job, before it is queued again (3)
#   MAX_STALLED     starts of a job without a new checkpoint, after which it is not queued again (3)
#   BAD_NODE_HOURS  how long a node whose device failed is left out (24)
#   STOP_SECONDS    how long ranks may take to save once the time limit is near (240 of the 300 of --signal)
set -euo pipefail

say() { printf '%(%F %T)T slurm: %s\n' -1 "$*"; }

refuse() {
    printf 'slurm: %s\n' "$@" >&2
    exit 2
}

# ---- 1 Where we are. Slurm runs a copy of the recipe from its own spool; the folder of sbatch is where we stand.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
JOB=${SLURM_JOB_ID:-0}
ATTEMPT=$JOB.${SLURM_RESTART_COUNT:-0} # a job that is queued again keeps its number, and counts
RECIPE=${SLURM_JOB_NAME:-$(basename "$0" .sh)}
SMALL=${SMALL:-} DRY_RUN=${DRY_RUN:-}
[ -n "$DRY_RUN" ] || [ -n "${SLURM_JOB_ID:-}" ] ||
    refuse "this is a job for Slurm" "fix: sbatch ${0#"$ROOT"/} | DRY_RUN=1 bash ${0#"$ROOT"/}"

# ---- 2 What Python: a virtual environment that all nodes see, or a container.

VENV=${VENV:-$ROOT/.venv}
CONTAINER=${CONTAINER:-}
pyxis=() apptainer=()
case $CONTAINER in
    '') # without either, whatever python the nodes find
        # shellcheck source=/dev/null
        [ ! -f "$VENV/bin/activate" ] || source "$VENV/bin/activate" ;;
    *.sif) apptainer=(apptainer exec --nv --pwd "$ROOT" --bind "$ROOT${MOUNTS:+,$MOUNTS}" "$CONTAINER") ;;
    *) pyxis=(--container-image="$CONTAINER" --container-mounts="$ROOT:$ROOT${MOUNTS:+,$MOUNTS}" --container-workdir="$ROOT") ;;
esac
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks of one node would fight for its cores

# ---- 3 Which nodes. Those whose devices failed lately are left out while others can take their place.

SPARES=${SPARES:-0} MAX_RESTARTS=${MAX_RESTARTS:-3} MAX_STALLED=${MAX_STALLED:-3}
BAD_NODE_HOURS=${BAD_NODE_HOURS:-24} STOP_SECONDS=${STOP_SECONDS:-240}
if [ -n "$SMALL" ]; then RANKS_PER_NODE=${RANKS_PER_NODE:-4}; fi
RUN=${RUN:-runs/$RECIPE}
STATE=$RUN/slurm # what the job itself remembers from start to start

# What an #SBATCH line of the recipe asks for; outside of a job nobody else says it.
asked() { sed -n "s/^#SBATCH.* --$1=\([^ ]*\).*/\1/p" "$0" | head -n 1; }

nodes_of_job() {
    if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
        scontrol show hostnames "$SLURM_JOB_NODELIST"
    else
        seq -f 'node%g' "$(asked nodes)"
    fi
}

is_bad() { # NODE: a line of bad_nodes is: node, until when in seconds since 1970, why
    local node until now
    printf -v now '%(%s)T' -1
    while read -r node until _; do
        [ "$node" != "$1" ] || [ "$until" -le "$now" ] || return 0
    done < <(cat "$STATE/bad_nodes" 2>/dev/null)
    return 1
}

choose_nodes() { # sets NODES, of which the first is the head
    local node all good=() bad=() needed
    mapfile -t all < <(nodes_of_job)
    for node in "${all[@]}"; do
        if is_bad "$node"; then bad+=("$node"); else good+=("$node"); fi
    done
    needed=$((${#all[@]} - SPARES))
    [ "$needed" -ge 1 ] || refuse "SPARES=$SPARES of ${#all[@]} nodes leaves none to run on"
    if [ "${#good[@]}" -lt "${MIN_NODES:-$needed}" ]; then # nothing is left to choose from
        say "too few nodes without a failure: also using ${bad[*]}"
        good+=("${bad[@]}")
        bad=()
    fi
    NODES=("${good[@]:0:needed}")
    [ ${#bad[@]} = 0 ] || say "left out for failures in the last $BAD_NODE_HOURS hours: ${bad[*]}"
}

# A rank that died of its device has written where into failures.jsonl; lines from number $1 on are new.
note_bad_nodes() {
    local line now
    printf -v now '%(%s)T' -1
    while read -r line; do
        [[ $line =~ \"kind\":\ ?\"device\" && $line =~ \"host\":\ ?\"([^\"]+)\" ]] || continue
        say "${BASH_REMATCH[1]} failed, and is left out for $BAD_NODE_HOURS hours ($STATE/bad_nodes)"
        echo "${BASH_REMATCH[1]} $((now + BAD_NODE_HOURS * 3600)) job $ATTEMPT: $line" >>"$STATE/bad_nodes"
    done < <(tail -n "+$(($1 + 1))" "$RUN/failures.jsonl" 2>/dev/null)
}

lines_of() { if [ -f "$1" ]; then wc -l <"$1"; else echo 0; fi; }

# ---- 4 How ranks find each other: all ask the head node, at a port that no other job there is likely to have.

LAUNCHER=${LAUNCHER:-torchrun}
PORT=$((10000 + JOB % 20000)) # below those that Linux gives away by itself
# The agents of torchrun keep a store of their own: ranks that are started again must not find what the dead ones wrote.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# srun on the chosen nodes, with so many tasks on each.
step_of() {
    local list=()
    [ -z "${SLURM_JOB_ID:-}" ] || list=(--nodelist="$(IFS=, && echo "${NODES[*]}")")
    step=(
        srun --export=ALL # also after sbatch --export=NONE, which srun would inherit
        --nodes="${#NODES[@]}" "${list[@]}"
        --ntasks=$((${#NODES[@]} * $1)) --ntasks-per-node="$1"
        --cpu-bind=none       # or Slurm may tie an agent and all its ranks to one core
        --kill-on-bad-exit=1 # where one task is lost, the others only wait for it
        "${pyxis[@]}" "${apptainer[@]}"
    )
}

# Sets COMMAND: what starts every rank with the given program and flags.
build_command() {
    local nodes=${#NODES[@]}
    ranks=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(asked gpus-per-node)}}
    case $LAUNCHER in
        torchrun)
            step_of 1
            COMMAND=(
                "${step[@]}" torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --max-restarts="$MAX_RESTARTS"
                --rdzv-backend=c10d --rdzv-endpoint="${NODES[0]}:$PORT" --rdzv-id="$JOB" "$@"
            ) ;;
        srun)
            step_of "$ranks"
            export MASTER_ADDR=${NODES[0]} MASTER_PORT=$PORT
            COMMAND=("${step[@]}" python "$@") ;;
        *) refuse "LAUNCHER=$LAUNCHER: there are torchrun and srun" ;;
    esac
}

# ---- 5 The network. NCCL finds most by itself; what is set here is what it cannot know. Yours, if set, counts.

NETWORK=${NETWORK:-infiniband}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # a word on every problem, and the version
case $NETWORK in
    infiniband)
        export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5} # adapters by name; others in the node may lead to storage only
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} # 4 us x 2^22 = 17 s without an answer: a switch may restart in it
        export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-4} # more flows, so that more paths of the fabric are used
        ;;
    ethernet)
        export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1} # do not wait for adapters that are not wired
        export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4} # one core copies 20 to 30 Gb/s; 100 need four
        export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4} # one TCP connection does not fill 100 Gb/s either
        ;;
    *) refuse "NETWORK=$NETWORK: there are infiniband and ethernet" ;;
esac
if [ -n "${IFNAME:-}" ]; then
    export NCCL_SOCKET_IFNAME=$IFNAME # where ranks meet before they use the fabric; else the first that is up
    export GLOO_SOCKET_IFNAME=$IFNAME # the same on CPUs
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # kernels start in the order of their launch: a transfer before the product that hides it

# ---- 6 How a run is stopped. Slurm sends USR1 to this script alone (--signal=B:USR1@300), 300 s before the time limit.
# The ranks look for a file after each step; a signal to srun would reach torchrun as well, and kill it.
# Handlers use nothing but builtins: bash crashes where signals come together and a handler waits for a process.

STOP_FILE=$STATE/stop.$ATTEMPT
stopping='' ended=''
on_usr1() {
    stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE"
    say "the time is nearly up: the ranks save and stop"
}
on_term() { # scancel, preemption, a lost node: what comes after is Slurm's affair
    ended=1
    stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE"
    say "Slurm ends this start"
}

# Wait for process $1, of all ranks; its status says little (srun was seen to return 0 after losing a node).
attend() {
    while kill -0 "$1" 2>/dev/null; do
        sleep 1 || true
        if [ -n "$stopping" ] && [ $((SECONDS - stopping)) -ge "$STOP_SECONDS" ]; then
            say "the ranks have not stopped within $STOP_SECONDS s"
            kill -KILL "$1" 2>/dev/null || true
            break
        fi
    done
    status=0
    wait "$1" || status=$?
}

# ---- 7 What then: the end is proven by finished.json, which the run writes once its last checkpoint is on the disk.

newest_checkpoint() {
    local marker newest=none
    for marker in "$RUN"/checkpoints/iter_*[0-9]/COMPLETE; do
        [ ! -e "$marker" ] || newest=$(basename "$(dirname "$marker")")
    done
    echo "$newest"
}

# How many of this job's latest starts began with checkpoint $1; a line of starts is: job, checkpoint, and more to read.
starts_from() {
    local job checkpoint count=0
    while read -r job checkpoint _; do
        if [ "$job $checkpoint" = "$JOB $1" ]; then count=$((count + 1)); else count=0; fi
    done < <(cat "$STATE/starts" 2>/dev/null)
    echo "$count"
}

stop_if_stalled() {
    local newest
    newest=$(newest_checkpoint)
    [ "$(starts_from "$newest")" -ge "$MAX_STALLED" ] || return 0
    say "no new checkpoint in $MAX_STALLED starts (the newest: $newest): this job is not queued again." \
        "See what ended them above, in $RUN/incidents.md and $RUN/failures.jsonl; then sbatch again, which goes on from there."
    exit 1
}

is_superseded() { [ "$(cat "$STATE/attempt")" != "$ATTEMPT" ]; }

requeue() {
    is_superseded && say "a later start has taken over" && exit 1
    stop_if_stalled
    say "queued again; newest checkpoint: $(newest_checkpoint)"
    scontrol requeue "$JOB" && exit 0
    say "Slurm refuses to queue this job again; sbatch it once more, it goes on from its newest checkpoint"
    exit 1
}

# ---- 8 The whole of it.

# Flags of a tiny model on CPUs, in the place of a recipe's own.
# shellcheck disable=SC2034 # the recipes use it
tiny=(
    --device cpu --num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 1024
    --seq-length 64 --max-position-embeddings 64 --log-interval 1
    --train-iters "${STEPS:-20}" --save-interval "${SAVE_EVERY:-5}"
)

# Train with the given flags to the end, through restarts, lost nodes and time limits.
train() {
    local try known before
    flags=("$@" --run-dir "$RUN" --save "$RUN/checkpoints" --stop-file "$STOP_FILE")
    choose_nodes
    build_command pretrain_gpt.py "${flags[@]}"
    if [ -n "$DRY_RUN" ]; then
        printf '%q ' "${COMMAND[@]}"
        echo
        return
    fi
    mkdir -p "$STATE"
    trap on_usr1 USR1
    trap on_term TERM
    echo "$ATTEMPT" >"$STATE/attempt"
    check_flags
    stop_if_stalled
    echo "$JOB $(newest_checkpoint) start $ATTEMPT on ${NODES[*]}" >>"$STATE/starts"
    for ((try = 0; try <= MAX_RESTARTS; try++)); do
        before=${NODES[*]} known=$(lines_of "$RUN/failures.jsonl")
        say "start $ATTEMPT on ${#NODES[@]} nodes x $ranks ranks: $before"
        rm -f "$RUN/finished.json" # of an earlier, shorter run
        "${COMMAND[@]}" &
        attend $!
        if [ -e "$RUN/finished.json" ]; then
            say "finished"
            exit 0
        fi
        say "ended without having finished (status $status)"
        [ -z "$ended" ] || exit 143
        note_bad_nodes "$known"
        [ -z "$stopping" ] || break
        choose_nodes
        build_command pretrain_gpt.py "${flags[@]}"
        [ "$LAUNCHER" = srun ] || [ "${NODES[*]}" != "$before" ] || break # torchrun has tried again on these
        is_superseded && break
    done
    requeue
}

# Flags that no start will take are told once, before any rank starts, and the job ends.
check_flags() {
    local code=0
    srun --export=ALL --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" "${pyxis[@]}" "${apptainer[@]}" \
        python pretrain_gpt.py --check-config --world-size $((${#NODES[@]} * ranks)) "${flags[@]}" \
        >"$STATE/check.txt" 2>&1 || code=$?
    [ "$code" = 2 ] || return 0
    cat "$STATE/check.txt" >&2
    exit 2
}
