# shellcheck shell=bash
# Library of the recipes in this folder: start a program on all nodes of a job, and restart it until it has finished.
# Sourced from the root of the repository. It reads from top to bottom in the order of a job: folders, Python
# environment, nodes, rendezvous, network, stopping, requeueing.
#
# Environment variables, as in   SMALL=1 RUN=runs/try sbatch --nodes=3 slurm/train_175b.sh
#   RUN             the run's folder, with its checkpoints (runs/JOB_NAME; with SMALL, runs/JOB_NAME_small)
#   SMALL=1         the same script with a tiny model on CPUs, STEPS (20) long, saved every SAVE_EVERY (5) steps
#   DRY_RUN=1       print the command without starting it; works without Slurm:   DRY_RUN=1 bash slurm/X.sh
#   LAUNCHER        torchrun: an agent per node that starts and restarts its ranks; srun: one task per rank
#   NETWORK         infiniband, or ethernet: TCP over 100 GbE
#   IFNAME          network interface for the rendezvous, such as eth0 (the first that is up)
#   VENV            virtual environment on a shared disk (.venv, if it exists); none: use the nodes' own Python
#   CONTAINER       image to run in instead: FILE.sif for apptainer, else for pyxis/enroot; MOUNTS: SRC:DST,SRC:DST
#   RANKS_PER_NODE  (number of GPUs; with SMALL 4)
#   SPARES          nodes of the job kept in reserve until a device of another node fails (0)
#   MIN_NODES       continue with this few nodes after failures, with the same global batch (as many as are used)
#                   With sbatch --no-kill, both also apply when Slurm loses a node, and the job need not be requeued.
#                   Loss of the first node, where this script runs, then goes undetected until the time limit.
#   MAX_RESTARTS    restarts of the ranks inside a job, before it is requeued (3)
#   MAX_STALLED     starts of a job without a new checkpoint, after which it is not requeued (3)
#   BAD_NODE_HOURS  time for which a node whose device failed is excluded (24)
#   STOP_SECONDS    time for the ranks to save and stop, out of the seconds given by --signal (240)
set -euo pipefail

say() { printf '%(%F %T)T slurm: %s\n' -1 "$*" || true; } # a full disk must not end the job

refuse() { printf 'slurm: %s\n' "$@" >&2 && exit 2; }

# ---- Folders. Slurm runs a copy of the recipe, in the directory where sbatch was called.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SMALL=${SMALL:-} DRY_RUN=${DRY_RUN:-}
JOB=${SLURM_JOB_ID:-0}
ATTEMPT=$JOB.${SLURM_RESTART_COUNT:-0} # a requeued job keeps its number
# Job id for Slurm commands, which take the number of an array's last task to mean the whole array.
SELF=$JOB
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || SELF=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
RUN=${RUN:-runs/${SLURM_JOB_NAME:-$(basename "$0" .sh)}${SMALL:+_small}} # never the folder of the large run
STATE=$RUN/slurm # state of the job, kept across starts
[ -n "$DRY_RUN" ] || [ "$JOB" != 0 ] ||
    refuse "$0 is a job for Slurm" "fix: sbatch $0 | DRY_RUN=1 bash $0, which prints what it would start"

# ---- Python environment: a container, a virtual environment, or the nodes' own.

inside=() # apptainer command, before that of a task
pyxis=()  # srun flags for pyxis
mounts=$PWD:$PWD
if [ -n "${CONTAINER:-}" ] && [[ $RUN = /* ]]; then
    mounts+=,$RUN:$RUN # else checkpoints would be written inside the container and lost
    [ -n "$DRY_RUN" ] || mkdir -p "$RUN"
fi
mounts+=${MOUNTS:+,$MOUNTS}
case ${CONTAINER:-} in
    '')
        [ -z "${VENV:-}" ] || [ "$VENV" = none ] || [ -f "$VENV/bin/activate" ] ||
            refuse "VENV=$VENV: there is no $VENV/bin/activate" \
                "fix: python3 -m venv '$VENV' | VENV=none sbatch ..., for the nodes' own Python"
        VENV=${VENV:-$PWD/.venv}
        # shellcheck source=/dev/null
        [ ! -f "$VENV/bin/activate" ] || source "$VENV/bin/activate" ;;
    *.sif)
        [ -n "$DRY_RUN" ] || [ -f "$CONTAINER" ] || refuse "CONTAINER=$CONTAINER: there is no such file"
        inside=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$CONTAINER")
        ;;
    *)
        [ -n "$DRY_RUN" ] || [[ $(srun --help 2>&1) == *--container-image* ]] ||
            refuse "CONTAINER=$CONTAINER: this srun has no --container-image, because pyxis is not installed" \
                "fix: apptainer pull image.sif 'docker://${CONTAINER/\#//}', then CONTAINER=image.sif sbatch ..."
        pyxis=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD")
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the ranks of a node share its cores
# Slurm passes on the limits of this shell. Rank 0 has a connection from every other rank; InfiniBand pins memory.
ulimit -S -n hard -l hard

# ---- Nodes: as many as needed, without those whose devices failed recently, if others can replace them.

SPARES=${SPARES:-0} MAX_RESTARTS=${MAX_RESTARTS:-3} MAX_STALLED=${MAX_STALLED:-3}
BAD_NODE_HOURS=${BAD_NODE_HOURS:-24} STOP_SECONDS=${STOP_SECONDS:-240}
for name in SPARES MIN_NODES RANKS_PER_NODE MAX_RESTARTS MAX_STALLED BAD_NODE_HOURS STOP_SECONDS; do
    case ${!name:-0} in *[!0-9]*) refuse "$name=${!name}: must be a number" ;; esac
done

source slurm/nodes.sh

# ---- Rendezvous: on the head node, at a port unlikely to be used by another job.

LAUNCHER=${LAUNCHER:-torchrun}
PORT=$((10000 + JOB % 20000)) # below Linux's ephemeral ports
# Ranks must not share the agents' store: restarted ranks would find keys of the dead ones in it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Set STEP: srun with TASKS tasks on each node.
build_step() { # TASKS NODE...
    local tasks=$1
    shift
    STEP=(
        srun --export=ALL # sbatch --export=NONE would be inherited
        --nodes=$# --ntasks=$(($# * tasks)) --ntasks-per-node="$tasks"
        --cpu-bind=none # else an agent and all its ranks may be bound to one core
        # If a task or node is lost, the others can only wait for it, so end the step and start a new one. (Agents could
        # continue with fewer nodes, but only after their ranks time out: --distributed-timeout-minutes.)
        --kill-on-bad-exit=1
    )
    [ "$JOB" = 0 ] || STEP+=(--nodelist="$(IFS=, && echo "$*")")
    STEP+=("${pyxis[@]}")
}

# Set COMMAND: the command that starts a program on all ranks.
build_command() {
    case $LAUNCHER in
        torchrun)
            build_step 1 "${NODES[@]}"
            COMMAND=(
                "${STEP[@]}" "${inside[@]}" torchrun --nnodes=${#NODES[@]} --nproc-per-node="$RANKS"
                --max-restarts="$MAX_RESTARTS" --rdzv-backend=c10d --rdzv-endpoint="${NODES[0]}:$PORT" --rdzv-id="$JOB" "$@"
            )
            ;;
        srun)
            build_step "$RANKS" "${NODES[@]}"
            export MASTER_ADDR=${NODES[0]} MASTER_PORT=$PORT
            COMMAND=("${STEP[@]}" "${inside[@]}" python "$@")
            ;;
        *) refuse "LAUNCHER=$LAUNCHER: must be torchrun or srun" ;;
    esac
}

# ---- Network: settings that NCCL cannot detect. Variables you export take precedence.

NETWORK=${NETWORK:-infiniband}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # print errors, and the version
case $NETWORK in
    infiniband)
        # Prefix of the adapters' names; others in a node may be connected to storage only.
        export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
        # 4 us x 2^22 = 17 s until a packet counts as lost, to survive short link failures.
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
        # Four flows between two adapters, which switches spread over several paths.
        export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-4}
        ;;
    ethernet)
        # Use TCP even if there are InfiniBand adapters, which may not be connected.
        export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
        # A core copies 20 to 30 Gb/s, so 100 Gb/s need four.
        export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4}
        # A single TCP connection does not saturate the link either.
        export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4}
        ;;
    *) refuse "NETWORK=$NETWORK: must be infiniband or ethernet" ;;
esac
if [ -n "${IFNAME:-}" ]; then
    # NCCL's bootstrap, and TCP traffic.
    export NCCL_SOCKET_IFNAME=$IFNAME
    # The same for gloo, on CPUs.
    export GLOO_SOCKET_IFNAME=$IFNAME
fi
# Start kernels in launch order: a transfer before the matrix product that hides it.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# ---- Stopping. Before the time limit Slurm sends USR1 to this script alone (--signal=B:USR1@300). The ranks check for a
# stop file after each step; a signal sent through srun would also reach torchrun's agents, and kill them.
# Handlers use builtins only: bash crashes if a second signal arrives while a handler waits for a process.

STOP_FILE=$STATE/stop.$ATTEMPT
stopping='' # $SECONDS when stopping was requested
ended=''    # set if Slurm ends this start, and decides whether the job is requeued
on_usr1() {
    stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE" || true # if it cannot be written, the ranks are killed in time
    say "the time is nearly up: the ranks are to save and stop"
}
on_term() {
    [ -n "$ended" ] || echo "$JOB ended" >>"$STATE/starts" || true
    ended=1 stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE" || true
    say "Slurm ends this start (scancel, preemption, or a node is gone)"
}

# Wait for process $1, the srun of all ranks, and set STATUS, which may be 0 even after the loss of a node.
attend() {
    while kill -0 "$1" 2>/dev/null; do
        sleep 1 || true
        if [ -n "$stopping" ] && [ $((SECONDS - stopping)) -ge "$STOP_SECONDS" ]; then
            say "the ranks have not stopped within $STOP_SECONDS s"
            kill -KILL "$1" 2>/dev/null || true
            break
        fi
    done
    STATUS=0
    wait "$1" || STATUS=$?
}

# ---- Requeueing. Training has finished if finished.json exists, which is written after the last checkpoint.

is_finished() {
    ls "$RUN" >/dev/null # refresh the cache of a network file system
    [ -e "$RUN/finished.json" ]
}

newest_checkpoint() {
    local marker newest=none
    for marker in "$RUN"/checkpoints/iter_*[0-9]/COMPLETE; do
        [ ! -e "$marker" ] || newest=$(basename "$(dirname "$marker")")
    done
    echo "$newest"
}

# Print how many consecutive starts of this job began with checkpoint $1, without those that Slurm ended.
# A line of starts is: job, checkpoint or "ended", free text.
starts_from() {
    local job checkpoint count=0
    [ ! -f "$STATE/starts" ] || while read -r job checkpoint _; do
        case $job.$checkpoint in
            "$JOB.$1") count=$((count + 1)) ;;
            "$JOB.ended") count=$((count > 0 ? count - 1 : 0)) ;;
            "$JOB".*) count=0 ;;
        esac
    done <"$STATE/starts"
    echo "$count"
}

stop_if_stalled() {
    local newest
    newest=$(newest_checkpoint)
    [ "$(starts_from "$newest")" -ge "$MAX_STALLED" ] || return 0
    say "stopped: $MAX_STALLED starts have brought no new checkpoint (newest: $newest). The reasons are above, and in" \
        "$RUN/incidents.md and $RUN/failures.jsonl. Fix the problem and sbatch again to resume the run."
    exit 1
}

# Exit if Slurm has started the job elsewhere, which happens when this node was cut off from the network.
leave_if_superseded() {
    [ "$(cat "$STATE/attempt.$JOB")" != "$ATTEMPT" ] || return 0
    say "a later start of this job has taken over"
    exit 1
}

# Requeue this job and exit, unless it was just cancelled or is over its time, which Slurm would ignore.
requeue() {
    local excluded='' state left=6
    leave_if_superseded
    stop_if_stalled
    [ ! -f "$STATE/bad_nodes" ] || excluded=$(nodes_to_exclude | paste -sd ,)
    trap '' TERM # sent once the job is requeued, but only then its excluded nodes can be set
    while :; do
        state=$(squeue --noheader --jobs="$SELF" --format=%T || true)
        case $state in
            COMPLETING | CANCELLED | TIMEOUT | DEADLINE | PREEMPTED | NODE_FAIL | REQUEUED | PENDING)
                say "not queued again: Slurm is ending it ($state)"
                exit 143 ;;
        esac
        say "queued again; newest checkpoint: $(newest_checkpoint)"
        scontrol requeue "$SELF" && break
        left=$((left - 1))
        if [ "$left" = 0 ]; then
            say "Slurm refuses to queue it again. sbatch it to resume from its newest checkpoint"
            exit 1
        fi
        sleep 10 # the controller may be starting
    done
    [ ! -f "$STATE/bad_nodes" ] || scontrol update JobId="$SELF" ExcNodeList="$excluded" ||
        say "Slurm does not exclude nodes of a job in the queue"
    exit 0
}

# ---- Commands of the recipes.

# Flags of a tiny model on CPUs, overriding earlier flags of a recipe.
# shellcheck disable=SC2034 # recipes use it
tiny=(
    --device cpu --num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 1024
    --seq-length 64 --max-position-embeddings 64 --log-interval 1
    --train-iters "${STEPS:-20}" --save-interval "${SAVE_EVERY:-5}"
)
[ -z "$SMALL" ] || export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # hide warnings about host names without DNS

# Choose nodes, and build COMMAND for a program and its flags.
prepare() {
    RANKS=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(asked gpus-per-node)}} # --exclusive grants more than requested
    RANKS=${RANKS_PER_NODE:-${RANKS##*:}}                                       # h100:8 means 8
    [ -z "$SMALL" ] || RANKS=${RANKS_PER_NODE:-4}
    [ -n "$RANKS" ] || refuse "the number of ranks per node is not specified" "fix: sbatch --gpus-per-node=8 ..."
    choose_nodes "$@"
    [ ${#NODES[@]} = 0 ] || build_command "$@"
}

# Run a command, or print it with DRY_RUN.
start() {
    if [ -z "$DRY_RUN" ]; then "$@"; else printf '%q ' "$@" && echo; fi
}

# Check the flags once, before any rank runs, and end the job if they are invalid.
check_flags() {
    local code=0 world=$((${#NODES[@]} * RANKS))
    mkdir -p "$STATE"
    build_step 1 "${NODES[0]}"
    "${STEP[@]}" "${inside[@]}" python "$@" --check-config --world-size "$world" >"$STATE/check.txt" 2>&1 || code=$?
    [ "$code" = 0 ] || cat "$STATE/check.txt" >&2
    [ "$code" != 2 ] || exit 2 # other statuses do not mean invalid flags
}

# Train with these flags until finished, across crashes, lost nodes and time limits.
train() {
    local flag known before newest left=$MAX_RESTARTS
    for flag in "$@"; do
        case ${flag%%=*} in
            --run-dir | --save | --stop-file) refuse "$flag: the run's folder is set by RUN" "fix: RUN=FOLDER sbatch ..." ;;
        esac
    done
    local program=(pretrain_gpt.py "$@" --run-dir "$RUN" --save "$RUN/checkpoints" --stop-file "$STOP_FILE")
    [ -z "${MIN_NODES:-}" ] || program+=(--pad-global-batch)
    if [ -n "$DRY_RUN" ]; then
        prepare "${program[@]}"
        start "${COMMAND[@]}"
        return
    fi
    mkdir -p "$STATE"
    rm -f "$STATE/stop.$JOB".* # of earlier starts
    trap on_usr1 USR1
    trap on_term TERM
    echo "$ATTEMPT" >"$STATE/attempt.$JOB"
    stop_if_stalled
    prepare "${program[@]}"
    echo "$JOB $(newest_checkpoint) start $ATTEMPT on ${NODES[*]}" >>"$STATE/starts"
    [ ${#NODES[@]} != 0 ] || requeue
    check_flags "${program[@]}"
    while [ -z "$stopping" ]; do
        before=${NODES[*]} newest=$(newest_checkpoint) known=0
        [ ! -f "$RUN/failures.jsonl" ] || known=$(wc -l <"$RUN/failures.jsonl")
        say "start $ATTEMPT, $RANKS ranks on each of ${#NODES[@]} nodes: $before"
        rm -f "$RUN/finished.json" # of an earlier, shorter run
        "${COMMAND[@]}" &
        attend $!
        if is_finished; then
            say "finished"
            exit 0
        fi
        say "ended, and has not finished (srun's status: $STATUS)"
        note_bad_nodes "$known"
        # Restart within this job only on other nodes, or if torchrun's agents have not already done so.
        [ "$(newest_checkpoint)" = "$newest" ] || left=$MAX_RESTARTS
        prepare "${program[@]}"
        if [ ${#NODES[@]} = 0 ] || [ "$left" = 0 ]; then break; fi
        [ "$LAUNCHER" = srun ] || [ "${NODES[*]}" != "$before" ] || break
        leave_if_superseded
        left=$((left - 1))
    done
    [ -z "$ended" ] || exit 143
    requeue
}

# Run a program once, on all ranks.
once() {
    MAX_RESTARTS=0
    prepare "$@"
    [ -n "$DRY_RUN" ] || check_flags "$@"
    start "${COMMAND[@]}"
}

# Run a program once, in one process.
alone() {
    build_step 1 "$(nodes_of_job | head -n 1)"
    start "${STEP[@]}" "${inside[@]}" python "$@"
}
