# shellcheck shell=bash
# Library of the recipes in this folder: start a program on all nodes of a job, and restart it until it has finished.
# Sourced from the root of the repository. It reads from top to bottom in the order of a job: folders, Python
# environment, nodes, rendezvous, network, data, stopping, requeueing, chaining.
# Settings are environment variables, as in   SMALL=1 RUN=runs/try sbatch --nodes=3 slurm/train_175b.sh
# The table of docs/slurm.md lists them all. DRY_RUN=1 bash slurm/X.sh shows what they do, without Slurm.
set -euo pipefail

say() { printf '%(%F %T)T slurm: %s\n' -1 "$*" || true; } # a full disk must not end the job

refuse() { printf 'slurm: %s\n' "$@" >&2 && exit 2; }

# ---- Folders. Slurm runs a copy of the recipe, in the directory where sbatch was called.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -z "${SETUP:-}" ] || [ -e "$SETUP" ] || refuse "SETUP=$SETUP: there is no such file"
SETUP=${SETUP:-slurm/setup.sh} # module load, and settings of the cluster
if [ -e "$SETUP" ]; then
    set +eu # the functions of module systems fail under these
    # shellcheck source=/dev/null
    source "$SETUP"
    set -eu
fi
ARGUMENTS=("$@") # of the recipe
SMALL=${SMALL:-} DRY_RUN=${DRY_RUN:-} STAGE=${STAGE:-} CHAIN=${CHAIN:-}
JOB=${SLURM_JOB_ID:-0}
ATTEMPT=$JOB.${SLURM_RESTART_COUNT:-0} # a requeued job keeps its number
# Job id for Slurm commands, which take the number of an array's last task to mean the whole array.
SELF=$JOB
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || SELF=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
RUN=${RUN:-runs/${SLURM_JOB_NAME:-$(basename "$0" .sh)}${SMALL:+_small}} # never the folder of the large run
STATE=$RUN/slurm # state of the job, kept across starts
LOGS=''          # folder for the output of each node and rank
source slurm/owner.sh
# Create folders. A new run folder is closed to others: whoever can write to it decides which nodes are left out.
make_run_folders() {
    [ -d "$RUN" ] || (umask 077 && mkdir -p "$RUN")
    [ -z "$(find -H "$RUN" -maxdepth 0 \( -perm -o+w -o ! -user "$(owner_in "$RUN")" ! -user 0 ! -perm -g+w \))" ] ||
        refuse "other users can write to RUN=$RUN, or it belongs to one" "fix: RUN=ANOTHER_FOLDER"
    mkdir -p "$STATE" "$@"
}
[ -n "$DRY_RUN" ] || [ "$JOB" != 0 ] ||
    refuse "$0 is a job for Slurm" "fix: sbatch $0 | DRY_RUN=1 bash $0, which prints what it would start"

# ---- Python environment: a container, a virtual environment, or the nodes' own.

inside=() # apptainer command, before that of a task
pyxis=()  # srun flags for pyxis
mounts=$PWD:$PWD
if [ -n "${CONTAINER:-}" ] && [[ $RUN = /* ]]; then
    mounts+=,$RUN:$RUN # else checkpoints would be written inside the container and lost
    [ -n "$DRY_RUN" ] || make_run_folders
fi
mounts+=${CACHE:+,$CACHE:$CACHE}${STAGE:+,$STAGE:$STAGE}${MOUNTS:+,$MOUNTS}
case ${CONTAINER:-} in
    '')
        [ -z "${VENV:-}" ] || [ "$VENV" = none ] || [ -f "$VENV/bin/activate" ] ||
            refuse "VENV=$VENV: there is no $VENV/bin/activate" \
                "fix: python3 -m venv ${VENV@Q} | VENV=none sbatch ..., for the nodes' own Python"
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
DEFAULTS=() # names of variables set here
set_default() { # NAME VALUE
    export "$1=${!1:-$2}"
    DEFAULTS+=("$1")
}

if [ -n "${CACHE:-}" ]; then # instead of the home folder, which is small, slow for many readers, or not mounted
    [ -n "$DRY_RUN" ] || (umask 077 && mkdir -p "$CACHE")
    set_default HF_HOME "$CACHE/huggingface"
    set_default WANDB_CACHE_DIR "$CACHE/wandb"
    set_default WANDB_DATA_DIR "$CACHE/wandb"
fi
[[ :${PYTHONPATH:-}: == *:$PWD:* ]] || export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
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

# ---- Rendezvous: on the head node. It has no password, and torchrun's runs what anyone sends to it (SECURITY.md).

LAUNCHER=${LAUNCHER:-srun} RANK_ORDER=${RANK_ORDER:-} CPU_BIND=${CPU_BIND:-}
# Ranks must not share the agents' store: an agent that joins later would wait in vain for its address.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# True where Slurm cannot bind tasks to cores: srun would say so at every start.
lacks_binding() {
    local plugins
    plugins=$(grep -ihs '^ *TaskPlugin *=' "${SLURM_CONF:-/etc/slurm/slurm.conf}") && [[ $plugins != *affinity* ]]
}

# Set STEP: srun with TASKS tasks on each node.
build_step() { # TASKS NODE...
    local tasks=$1
    shift
    STEP=(
        srun --export=ALL # sbatch --export=NONE would be inherited
        --nodes=$# --ntasks=$(($# * tasks)) --ntasks-per-node="$tasks"
        # If a task or node is lost, the others can only wait for it, so end the step and start a new one. (Agents could
        # continue with fewer nodes, but only after their ranks time out: --distributed-timeout-minutes.)
        --kill-on-bad-exit=1
    )
    # else an agent and all its ranks may be bound to one core
    [ -z "$CPU_BIND" ] && lacks_binding || STEP+=(--cpu-bind=none)
    [ "$JOB" = 0 ] || STEP+=(--nodelist="$(IFS=, && echo "$*")")
    STEP+=("${pyxis[@]}")
}

# Export the rendezvous: a port below Linux's ephemeral ones, and torchrun's id. Both are random, the same in all starts
# of the job, and in a file and the environment, which only this user can read; not in arguments, which ps shows to all.
# Rank 0 listens on one interface if it is known, see open_store in launch.py; torchrun's agent listens on all.
export_rendezvous() {
    local file=$STATE/rendezvous.$JOB address=''
    MASTER_PORT=$((10000 + $(od -An -N2 -tu2 /dev/urandom) % 20000))
    PET_RDZV_ID=$(od -An -N8 -tx8 /dev/urandom | tr -d ' ')
    if [ -z "$DRY_RUN" ]; then
        mkdir -p "$STATE"
        [ -s "$file" ] || (umask 077 && echo "$MASTER_PORT $PET_RDZV_ID" >"$file")
        read -r MASTER_PORT PET_RDZV_ID <"$file"
    fi
    if [ ${#NODES[@]} = 1 ]; then
        address=127.0.0.1
    elif [ -n "${IFNAME:-}" ] && [ -z "$DRY_RUN" ]; then
        build_step 1 "$HEAD"
        address=$("${STEP[@]}" ip -oneline -4 address show dev "$IFNAME" | sed -n '1s/.* inet \([0-9.]*\).*/\1/p') || true
    fi
    export MASTER_ADDR=${address:-$HEAD} MASTER_PORT PET_RDZV_ID
}

# Set COMMAND: the command that starts a program on all ranks.
build_command() {
    local rank
    export HEAD=${NODES[0]} LOGS # for task.sh
    export_rendezvous
    case $LAUNCHER.$RANK_ORDER in
        torchrun.)
            build_step 1 "${NODES[@]}"
            COMMAND=(
                "${STEP[@]}" "${inside[@]}" bash slurm/task.sh torchrun --nnodes=${#NODES[@]} --nproc-per-node="$RANKS"
                --max-restarts="$MAX_RESTARTS" --rdzv-backend=c10d
            )
            [ -z "$CPU_BIND" ] || COMMAND+=(--numa-binding="$CPU_BIND")
            COMMAND+=(--no-python bash slurm/task.sh "$@")
            ;;
        srun. | srun.topology)
            [[ ! $CPU_BIND =~ ^(node|socket|exclusive|core-complex)$ ]] ||
                refuse "CPU_BIND=$CPU_BIND is one of torchrun's" "fix: CPU_BIND=ldoms | LAUNCHER=torchrun"
            build_step "$RANKS" "${NODES[@]}"
            if [ -n "$RANK_ORDER" ]; then # srun would take the nodes in the order of slurm.conf
                STEP+=(--distribution=arbitrary --nodelist="$STATE/hosts")
                [ -n "$DRY_RUN" ] || for ((rank = 0; rank < ${#NODES[@]} * RANKS; rank++)); do
                    echo "${NODES[rank / RANKS]}"
                done >"$STATE/hosts"
            fi
            if [ -n "$CPU_BIND" ]; then # consecutive cores for consecutive ranks, and memory beside them
                STEP=("${STEP[@]/--cpu-bind=none/--cpu-bind=$CPU_BIND}")
                STEP+=(--mem-bind=local)
                [ -n "$RANK_ORDER" ] || STEP+=(--distribution=block:block)
                STEP+=(${SLURM_CPUS_ON_NODE:+--cpus-per-task=$((SLURM_CPUS_ON_NODE / RANKS))})
            fi
            COMMAND=("${STEP[@]}" "${inside[@]}" bash slurm/task.sh "$@")
            ;;
        torchrun.topology)
            refuse "RANK_ORDER=topology: torchrun orders its agents by host name" "fix: LAUNCHER=srun RANK_ORDER=topology" ;;
        srun.* | torchrun.*) refuse "RANK_ORDER=$RANK_ORDER: must be topology" ;;
        *) refuse "LAUNCHER=$LAUNCHER: must be srun or torchrun" ;;
    esac
}

# ---- Network: settings that NCCL cannot detect. Variables you export take precedence; docs/slurm.md has the sources.

NETWORK=${NETWORK:-infiniband}
set_default NCCL_DEBUG WARN # print errors, and the version
case $NETWORK in
    infiniband | roce)
        # Prefix of the adapters' names; others in a node may be connected to storage only.
        set_default NCCL_IB_HCA mlx5
        # 4 us x 2^22 = 17 s until a packet counts as lost, to survive short link failures.
        set_default NCCL_IB_TIMEOUT 22
        # Four flows between two adapters, which switches spread over several paths.
        set_default NCCL_IB_QPS_PER_CONNECTION 4
        # DSCP 26 with ECN, on most RoCE networks the class without packet loss. NCCL finds the GID of RoCE v2 itself.
        [ "$NETWORK" = infiniband ] || set_default NCCL_IB_TC 106
        ;;
    ethernet)
        # Use TCP even if there are InfiniBand adapters, which may not be connected.
        set_default NCCL_IB_DISABLE 1
        # A core copies 20 to 30 Gb/s, so 100 Gb/s need four.
        set_default NCCL_SOCKET_NTHREADS 4
        # A single TCP connection does not saturate the link either.
        set_default NCCL_NSOCKS_PERTHREAD 4
        ;;
    efa)
        # Fail if the aws-ofi-nccl plugin is not found, instead of using TCP.
        set_default NCCL_NET "AWS Libfabric"
        # The same if libfabric has no EFA.
        set_default FI_PROVIDER efa
        # Huge pages make fork() of data loaders fail when they run out.
        set_default FI_EFA_USE_HUGE_PAGE 0
        ;;
    slingshot)
        # As for efa.
        set_default NCCL_NET "AWS Libfabric"
        # Interfaces of the Slingshot adapters, for bootstrap.
        set_default NCCL_SOCKET_IFNAME hsn
        # Let adapters read GPU memory on the same NUMA node.
        set_default NCCL_NET_GDR_LEVEL PHB
        # Rings may change the adapter between nodes: faster on large systems.
        set_default NCCL_CROSS_NIC 1
        # LL128, default since NCCL 2.27, is slower here.
        set_default NCCL_PROTO ^LL128
        # The default monitor of registered memory can deadlock with NCCL.
        set_default FI_MR_CACHE_MONITOR userfaultfd
        # So can allocations of the provider.
        set_default FI_CXI_DISABLE_HOST_REGISTER 1
        # Room for the many small messages of large jobs.
        set_default FI_CXI_DEFAULT_CQ_SIZE 131072
        set_default FI_CXI_DEFAULT_TX_SIZE 2048
        # Match messages in software when the adapter's resources are exhausted.
        set_default FI_CXI_RX_MATCH_MODE hybrid
        # Send nothing before the receiver is ready.
        set_default FI_CXI_RDZV_EAGER_SIZE 0
        ;;
    *) refuse "NETWORK=$NETWORK: must be infiniband, roce, ethernet, efa or slingshot" ;;
esac
if [ -n "${IFNAME:-}" ]; then
    # NCCL's bootstrap, and TCP traffic.
    export NCCL_SOCKET_IFNAME=$IFNAME
    # The same for gloo, on CPUs.
    export GLOO_SOCKET_IFNAME=$IFNAME
    DEFAULTS+=(NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME)
fi

# ---- Data: copies on a disk of each node, in a folder of this user's name.

user=$(id -un 2>/dev/null) || user=$UID # a user without a name
COPIES=$STAGE/$user

# Set FLAGS, in which --data-path names the copies, and FILES, which are to be copied.
plan_staging() { # FLAG...
    local word file prefix='' reading='' given=()
    FLAGS=() FILES=()
    for word in "${@/#--data-path=/--data-path }"; do
        case $word in
            --data-path*) reading=1 FILES=() given=(--data-path) ;; # the last of repeated flags counts
            --*) reading='' ;;
        esac
        if [[ $word = '--data-path '* ]]; then
            FLAGS+=(--data-path)
            word=${word#* }
        fi
        if [ -n "$reading" ] && [[ $word != --* ]]; then
            given+=("$word")
            if [ -n "$STAGE" ] && [[ ! $word =~ ^[0-9.]+([eE][-+]?[0-9]+)?$ ]]; then
                prefix=$(realpath -m "$word")
                FILES+=("$prefix.idx" "$prefix.bin")
                for file in "$prefix.tokens.json" "$prefix".tokenizer/*; do # of the tokenizer
                    [ ! -f "$file" ] || FILES+=("$file")
                done
                word=$COPIES$prefix
            fi
        fi
        FLAGS+=("$word")
    done
    [ -z "$DRY_RUN" ] || return 0
    rm -f "$STATE/data_path"
    [ ${#FILES[@]} = 0 ] || printf '%s\n' "${given[@]}" >"$STATE/data_path" # for evaluate.sh
}

# Copy FILES to all NODES.
stage() {
    [ ${#FILES[@]} != 0 ] || return 0
    build_step 1 "${NODES[@]}"
    run_or_show "${STEP[@]}" bash slurm/stage.sh "$COPIES" "${FILES[@]}"
}

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
    # In a chain these count as stalled too: nobody else notices that none of its jobs has the time to save.
    [ -n "$ended$CHAIN" ] || echo "$SERIES ended" >>"$STATE/starts" || true
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

# Print how many consecutive starts of this job or chain began with checkpoint $1, without those that Slurm ended.
# A line of starts is: job (the first of a chain), checkpoint or "ended", free text.
starts_from() {
    local job checkpoint count=0
    [ ! -f "$STATE/starts" ] || while read -r job checkpoint _; do
        case $job.$checkpoint in
            "$SERIES.$1") count=$((count + 1)) ;;
            "$SERIES.ended") count=$((count > 0 ? count - 1 : 0)) ;;
            "$SERIES".*) count=0 ;;
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
    end_chain
    exit 1
}

# Exit if Slurm has started the job elsewhere, which happens when this node was cut off from the network.
leave_if_superseded() {
    [ "$(cat "$STATE/attempt.$SERIES")" != "$ATTEMPT" ] || return 0
    say "a later start of this job has taken over"
    exit 1
}

# Requeue this job and exit, unless it was just cancelled or is over its time, which Slurm would ignore.
requeue() {
    local excluded='' state left=6
    leave_if_superseded
    stop_if_stalled
    [ ! -f "$STATE/bad_nodes" ] || excluded=$(nodes_to_exclude | paste -sd ,)
    if [ -n "$CHAIN" ]; then
        [ -n "$NEXT" ] || queue_next
        [ -z "$excluded" ] || scontrol update JobId="$NEXT" ExcNodeList="$excluded" || true
        say "the next job is $NEXT; newest checkpoint: $(newest_checkpoint)"
        exit "$((STATUS != 0))"
    fi
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

# ---- Chaining, where jobs must not be requeued: each job queues the next one before it starts. Slurm holds it until no
# other job of this name and user runs, so it starts however this one ends.

NEXT='' STATUS=0
SERIES=$JOB # number of the job, or of the first one of its chain
if [ -n "$CHAIN" ]; then
    export CHAIN_ID=${CHAIN_ID:-$JOB} # also for checkpoint/lease.py: a later job of a chain takes over from earlier ones
    SERIES=$CHAIN_ID
fi

# Queue this recipe again, as it was when it was submitted, and set NEXT.
queue_next() {
    local options=(--parsable --dependency=singleton --no-requeue --open-mode=append)
    [ -n "$CHAIN" ] || return 0
    if [ "$JOB" != 0 ]; then
        scontrol update JobId="$JOB" Requeue=0 || true
        options+=(
            --job-name="$SLURM_JOB_NAME" --nodes="$SLURM_JOB_NUM_NODES" --partition="$SLURM_JOB_PARTITION"
            --time="$(squeue --noheader --jobs="$JOB" --format=%l)"
            --output="$(scontrol show job "$JOB" | sed -n 's/^ *StdOut=//p')" # one log for all
            ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"} ${SLURM_JOB_QOS:+--qos="$SLURM_JOB_QOS"}
            ${SLURM_JOB_RESERVATION:+--reservation="$SLURM_JOB_RESERVATION"}
            ${SLURM_GPUS_PER_NODE:+--gpus-per-node="$SLURM_GPUS_PER_NODE"}
        )
    fi
    NEXT=$(
        for name in "${!SLURM_@}"; do [ "$name" = SLURM_CONF ] || unset "$name"; done # they are about this job
        run_or_show sbatch "${options[@]}" "$0" "${ARGUMENTS[@]}"
    ) || say "Slurm refuses to queue the next job. sbatch it to resume from its newest checkpoint"
    NEXT=${NEXT%%;*} # JOB;CLUSTER in a federation
    [ -z "$NEXT" ] || say "job $NEXT goes on when this one ends"
}

end_chain() { [ -z "$NEXT" ] || scancel "$NEXT" || true; }

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

# Run a command; with DRY_RUN print it to stderr, which leaves stdout to the command of the ranks.
run_or_show() {
    if [ -z "$DRY_RUN" ]; then "$@"; else printf '%q ' "$@" >&2 && echo >&2; fi
}

# Run the command of the ranks, or print it with DRY_RUN, and to stderr what is exported for it.
start() {
    local name
    if [ -z "$DRY_RUN" ]; then
        "$@"
    else
        for name in "${DEFAULTS[@]}"; do printf 'export %s=%q\n' "$name" "${!name}"; done >&2
        printf '%q ' "$@" && echo
    fi
}

# Check the flags once, before any rank runs, and end the job if they are invalid.
check_flags() {
    local code=0 world=$((${#NODES[@]} * RANKS))
    make_run_folders
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
    local folders=(--run-dir "$RUN" --save "$RUN/checkpoints" --stop-file "$STOP_FILE")
    [ -z "${MIN_NODES:-}" ] || folders+=(--pad-global-batch)
    LOGS=$RUN/logs/$ATTEMPT
    [ -n "$DRY_RUN" ] || make_run_folders "$LOGS"
    plan_staging "$@"
    local program=(pretrain_gpt.py "${FLAGS[@]}" "${folders[@]}")
    if [ -n "$DRY_RUN" ]; then
        prepare "${program[@]}"
        queue_next
        stage
        start "${COMMAND[@]}"
        return
    fi
    if [ "$SERIES" != "$JOB" ] && is_finished; then
        say "an earlier job of this chain has finished"
        exit 0
    fi
    rm -f "$STATE/stop.$JOB".* # of earlier starts
    trap on_usr1 USR1
    trap on_term TERM
    echo "$ATTEMPT" >"$STATE/attempt.$SERIES"
    stop_if_stalled
    prepare "${program[@]}"
    echo "$SERIES $(newest_checkpoint) start $ATTEMPT on ${NODES[*]}" >>"$STATE/starts"
    [ ${#NODES[@]} != 0 ] || requeue
    check_flags pretrain_gpt.py "$@" "${folders[@]}"
    queue_next
    while [ -z "$stopping" ]; do
        before=${NODES[*]} newest=$(newest_checkpoint) known=0
        [ ! -f "$RUN/failures.jsonl" ] || known=$(wc -l <"$RUN/failures.jsonl")
        if ! stage; then
            [ -n "$stopping" ] || end_chain # the time was up, else a disk is full
            exit 1
        fi
        say "start $ATTEMPT, $RANKS ranks on each of ${#NODES[@]} nodes: $before; output of each: $LOGS"
        rm -f "$RUN/finished.json" # of an earlier, shorter run
        rm -f "$RUN/stopped.json"
        "${COMMAND[@]}" &
        attend $!
        if [ -e "$RUN/stopped.json" ]; then
            say "stopped by a request in $RUN/control"
            end_chain
            exit 0
        fi
        if is_finished; then
            say "finished"
            end_chain
            exit 0
        fi
        say "ended, and has not finished (srun's status: $STATUS)"
        note_failures "$known"
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
