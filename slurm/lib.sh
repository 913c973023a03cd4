# shellcheck shell=bash
# What the recipes of this folder share: how one program gets onto many nodes, and to its end.
# Sourced by them from the root of the repository. Written to be read from top to bottom, in the order in which a job
# meets things: where we are, which Python, which nodes, how ranks find each other, the network, stopping, what then.
#
# What the environment may say, as in   SMALL=1 RUN=runs/try sbatch --nodes=3 slurm/train_175b.sh
#   RUN             the run's folder, with its checkpoints (runs/, and the job's name; with SMALL and _small)
#   SMALL=1         the same script with a tiny model on CPUs, STEPS (20) long, saved every SAVE_EVERY (5) steps
#   DRY_RUN=1       print what would be started and start nothing; works without Slurm:   DRY_RUN=1 bash slurm/X.sh
#   LAUNCHER        torchrun: an agent on each node starts its ranks, and starts them again; srun: a task for each rank
#   NETWORK         infiniband, or ethernet: TCP over 100 GbE
#   IFNAME          the network interface on which ranks meet, such as eth0 (the first that is up)
#   VENV            a virtual environment that all nodes see (.venv, where there is one); none: what the nodes have
#   CONTAINER       an image instead: FILE.sif for apptainer, anything else for pyxis/enroot; MOUNTS: SRC:DST,SRC:DST
#   RANKS_PER_NODE  (its GPUs; with SMALL 4)
#   SPARES          nodes of the job that wait until the device of another fails (0)
#   MIN_NODES       go on with as few when too many have failed, in the same global batch (as many as are used)
#                   After sbatch --no-kill, both also serve when Slurm loses a node, and the job need not be queued again;
#                   but losing the first one, where this script runs, then goes unseen until the time limit.
#   MAX_RESTARTS    how often ranks are started again inside a job, before it is queued again (3)
#   MAX_STALLED     starts of a job without a new checkpoint, after which it is not queued again (3)
#   BAD_NODE_HOURS  how long a node whose device failed is left out (24)
#   STOP_SECONDS    what ranks have to save in, of the seconds that --signal leaves before the time limit (240)
set -euo pipefail

say() { printf '%(%F %T)T slurm: %s\n' -1 "$*" || true; } # the job goes on where the disk of its log is full

refuse() { printf 'slurm: %s\n' "$@" >&2 && exit 2; }

# ---- Where we are: Slurm runs a copy of the recipe out of its own folders, but starts it where sbatch was called.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SMALL=${SMALL:-} DRY_RUN=${DRY_RUN:-}
JOB=${SLURM_JOB_ID:-0}
ATTEMPT=$JOB.${SLURM_RESTART_COUNT:-0} # a job that is queued again keeps its number, and counts
# What commands of Slurm call this job: to them, the number of the last task of an array means the whole array.
SELF=$JOB
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || SELF=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
RUN=${RUN:-runs/${SLURM_JOB_NAME:-$(basename "$0" .sh)}${SMALL:+_small}} # the large run must not find a tiny model there
STATE=$RUN/slurm # what the job itself remembers, from start to start
[ -n "$DRY_RUN" ] || [ "$JOB" != 0 ] ||
    refuse "$0 is a job for Slurm" "fix: sbatch $0 | DRY_RUN=1 bash $0, which prints what it would start"

# ---- Which Python: a container, a virtual environment, or what the nodes have.

inside=() # before a command of a task: into apptainer
pyxis=()  # the same as flags of srun
mounts=$PWD:$PWD
if [ -n "${CONTAINER:-}" ] && [[ $RUN = /* ]]; then
    mounts+=,$RUN:$RUN # else what ranks save would go with the container
    [ -n "$DRY_RUN" ] || mkdir -p "$RUN"
fi
mounts+=${MOUNTS:+,$MOUNTS}
case ${CONTAINER:-} in
    '')
        [ -z "${VENV:-}" ] || [ "$VENV" = none ] || [ -f "$VENV/bin/activate" ] ||
            refuse "VENV=$VENV: there is no $VENV/bin/activate" \
                "fix: python3 -m venv '$VENV' | VENV=none sbatch ..., for what the nodes have"
        VENV=${VENV:-$PWD/.venv}
        # shellcheck source=/dev/null
        [ ! -f "$VENV/bin/activate" ] || source "$VENV/bin/activate" ;;
    *.sif)
        [ -n "$DRY_RUN" ] || [ -f "$CONTAINER" ] || refuse "CONTAINER=$CONTAINER: there is no such file"
        inside=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$CONTAINER")
        ;;
    *)
        [ -n "$DRY_RUN" ] || [[ $(srun --help 2>&1) == *--container-image* ]] ||
            refuse "CONTAINER=$CONTAINER: this srun has no --container-image, for which pyxis has to be installed" \
                "fix: apptainer pull image.sif 'docker://${CONTAINER/\#//}', then CONTAINER=image.sif sbatch ..."
        pyxis=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD")
        ;;
esac
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the ranks of a node share its cores
# Slurm hands on the limits of this shell: rank 0 has a connection from every other, and InfiniBand pins memory.
ulimit -S -n hard -l hard

# ---- Which nodes: as many as are needed, and none of those whose devices failed lately while others can take over.

SPARES=${SPARES:-0} MAX_RESTARTS=${MAX_RESTARTS:-3} MAX_STALLED=${MAX_STALLED:-3}
BAD_NODE_HOURS=${BAD_NODE_HOURS:-24} STOP_SECONDS=${STOP_SECONDS:-240}
for name in SPARES MIN_NODES RANKS_PER_NODE MAX_RESTARTS MAX_STALLED BAD_NODE_HOURS STOP_SECONDS; do
    case ${!name:-0} in *[!0-9]*) refuse "$name=${!name}: this is a number" ;; esac
done

source slurm/nodes.sh

# ---- How ranks find each other: all ask the head node, at a port that no other job there is likely to have.

LAUNCHER=${LAUNCHER:-torchrun}
PORT=$((10000 + JOB % 20000)) # below the ports that Linux gives away by itself
# Agents keep their store to themselves: ranks that start again must not find what the dead ones have left in it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Set STEP: srun with so many tasks on each of so many nodes, and what must come before their command.
build_step() { # TASKS NODE...
    local tasks=$1
    shift
    STEP=(
        srun --export=ALL # even after sbatch --export=NONE, which srun would inherit
        --nodes=$# --ntasks=$(($# * tasks)) --ntasks-per-node="$tasks"
        --cpu-bind=none # else an agent and all its ranks may have to share one core
        # Where one task is lost, or a node, the others can only wait for it: the step ends, and a new one may begin. (Agents
        # could make do with fewer, but first their ranks would have to notice: after --distributed-timeout-minutes.)
        --kill-on-bad-exit=1
    )
    [ "$JOB" = 0 ] || STEP+=(--nodelist="$(IFS=, && echo "$*")")
    STEP+=("${pyxis[@]}")
}

# Set COMMAND: what starts a program with its flags on all ranks.
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
        *) refuse "LAUNCHER=$LAUNCHER: there are torchrun and srun" ;;
    esac
}

# ---- The network: NCCL finds out most by itself. Here is what it cannot know; what you export yourself comes first.

NETWORK=${NETWORK:-infiniband}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # a line on what goes wrong, and the version
case $NETWORK in
    infiniband)
        # The adapters whose names begin so; others in a node may lead to storage only.
        export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5}
        # 4 us x 2^22 = 17 s until a packet counts as lost, so that a link may come up again without ending the run.
        export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}
        # Four flows between two adapters: the switches spread them over several paths.
        export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-4}
        ;;
    ethernet)
        # TCP, also where there are adapters that nobody has wired.
        export NCCL_IB_DISABLE=${NCCL_IB_DISABLE:-1}
        # A core copies 20 to 30 Gb/s: four of them for 100.
        export NCCL_SOCKET_NTHREADS=${NCCL_SOCKET_NTHREADS:-4}
        # Nor does a single TCP connection fill the line.
        export NCCL_NSOCKS_PERTHREAD=${NCCL_NSOCKS_PERTHREAD:-4}
        ;;
    *) refuse "NETWORK=$NETWORK: there are infiniband and ethernet" ;;
esac
if [ -n "${IFNAME:-}" ]; then
    # Where ranks of NCCL meet before they use the fabric, and where TCP goes.
    export NCCL_SOCKET_IFNAME=$IFNAME
    # The same for gloo, on CPUs.
    export GLOO_SOCKET_IFNAME=$IFNAME
fi
# Kernels begin in the order of their launch: a transfer before the product that hides it.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# ---- How a run is stopped: before the time limit Slurm sends USR1 to this script alone (--signal=B:USR1@300). The ranks
# look for a file after each step; a signal by way of srun would reach torchrun's agents too, and kill them.
# In the handlers are builtins only: bash crashes where a handler waits for a process and a second signal comes.

STOP_FILE=$STATE/stop.$ATTEMPT
stopping='' # since when, in seconds of this script
ended=''    # Slurm ends this start, and decides what comes after
on_usr1() {
    stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE" || true # where it cannot be written, the ranks are killed in time
    say "the time is nearly up: the ranks are to save and stop"
}
on_term() {
    [ -n "$ended" ] || echo "$JOB ended" >>"$STATE/starts" || true
    ended=1 stopping=${stopping:-$SECONDS}
    : >"$STOP_FILE" || true
    say "Slurm ends this start (scancel, preemption, or a node is gone)"
}

# Wait for process $1, the srun of all ranks, and set STATUS. It says little: after the loss of a node it may be 0.
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

# ---- What then: training has ended when there is finished.json, which comes after the last checkpoint.

is_finished() {
    ls "$RUN" >/dev/null # a network file system looks again
    [ -e "$RUN/finished.json" ]
}

newest_checkpoint() {
    local marker newest=none
    for marker in "$RUN"/checkpoints/iter_*[0-9]/COMPLETE; do
        [ ! -e "$marker" ] || newest=$(basename "$(dirname "$marker")")
    done
    echo "$newest"
}

# How many starts of this job in a row began with checkpoint $1; those that Slurm has ended do not count.
# A line of starts is: job, checkpoint or "ended", more for people.
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
    say "stopped: $MAX_STALLED starts have brought no new checkpoint (newest: $newest). Why they ended is above, and in" \
        "$RUN/incidents.md and $RUN/failures.jsonl. Mend it and sbatch again: the run goes on from there."
    exit 1
}

# A script whose node was cut off lives on, and finds that Slurm has started the job elsewhere.
leave_if_superseded() {
    [ "$(cat "$STATE/attempt.$JOB")" != "$ATTEMPT" ] || return 0
    say "a later start of this job has taken over"
    exit 1
}

# Queue this job again, and end. Slurm would also do so with a job that has just been cancelled, or is over its time.
requeue() {
    local excluded='' state left=6
    leave_if_superseded
    stop_if_stalled
    [ ! -f "$STATE/bad_nodes" ] || excluded=$(nodes_to_exclude | paste -sd ,)
    trap '' TERM # Slurm ends this script as soon as the job is queued; only then it can be told what to exclude
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
            say "Slurm refuses to queue it again. sbatch it once more: it goes on from its newest checkpoint"
            exit 1
        fi
        sleep 10 # its controller may be starting
    done
    [ ! -f "$STATE/bad_nodes" ] || scontrol update JobId="$SELF" ExcNodeList="$excluded" ||
        say "Slurm does not exclude nodes of a job in the queue"
    exit 0
}

# ---- All of it.

# Flags of a tiny model on CPUs, after which a recipe's own count no more.
# shellcheck disable=SC2034 # recipes use it
tiny=(
    --device cpu --num-layers 4 --hidden-size 64 --ffn-hidden-size 256 --num-attention-heads 4 --vocab-size 1024
    --seq-length 64 --max-position-embeddings 64 --log-interval 1
    --train-iters "${STEPS:-20}" --save-interval "${SAVE_EVERY:-5}"
)
[ -z "$SMALL" ] || export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} # twelve ranks complain of names without DNS

# Choose nodes, and build COMMAND for a program and its flags.
prepare() {
    RANKS=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$(asked gpus-per-node)}} # --exclusive grants more than it is asked for
    RANKS=${RANKS_PER_NODE:-${RANKS##*:}}                                       # and h100:8 are 8
    [ -z "$SMALL" ] || RANKS=${RANKS_PER_NODE:-4}
    [ -n "$RANKS" ] || refuse "nothing says how many ranks a node has" "fix: sbatch --gpus-per-node=8 ..."
    choose_nodes "$@"
    [ ${#NODES[@]} = 0 ] || build_command "$@"
}

# Run a command, or with DRY_RUN print it.
start() {
    if [ -z "$DRY_RUN" ]; then "$@"; else printf '%q ' "$@" && echo; fi
}

# Flags that no start would take are told once, before any rank runs, and end the job.
check_flags() {
    local code=0 world=$((${#NODES[@]} * RANKS))
    mkdir -p "$STATE"
    build_step 1 "${NODES[0]}"
    "${STEP[@]}" "${inside[@]}" python "$@" --check-config --world-size "$world" >"$STATE/check.txt" 2>&1 || code=$?
    [ "$code" = 0 ] || cat "$STATE/check.txt" >&2
    [ "$code" != 2 ] || exit 2 # another status is no verdict on the flags
}

# Train with these flags to the end, through crashes, lost nodes and time limits.
train() {
    local flag known before newest left=$MAX_RESTARTS
    for flag in "$@"; do
        case ${flag%%=*} in
            --run-dir | --save | --stop-file) refuse "$flag: RUN says where a run is" "fix: RUN=FOLDER sbatch ..." ;;
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
        # Once more in this job: with other nodes, or where no agent has already tried.
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
