#!/usr/bin/env bash
# A throw-away, real Slurm cluster on one machine: slurmctld and N slurmd, each "machine" in namespaces of its own.
#
#   minislurm.sh check                    prints why it cannot run here, if it cannot
#   minislurm.sh up DIR [NODES] [GPUS]    a login node (which is the controller too) and n1, n2, ... with fake GPUs
#   minislurm.sh login DIR COMMAND...     run sbatch, squeue, scontrol, ... on the login node
#   minislurm.sh on DIR NODE COMMAND...   run a command inside a node
#   minislurm.sh poweroff DIR NODE        all that runs on the node is gone at once, and no packet shows it
#   minislurm.sh poweron DIR NODE         boot it again
#   minislurm.sh unplug|plug DIR NODE     cut the node's network; its processes and its disks go on
#   minislurm.sh down DIR                 end everything; DIR stays, with all logs
#
# DIR must be short (paths of Unix sockets end at 108 bytes) and everybody must be able to enter it (munge refuses
# otherwise): mkdtemp in the machine's folder for temporary files and chmod 755, not pytest's tmp_path.
# Needs root, and of Debian or Ubuntu: slurmctld slurmd slurm-client munge iproute2 (tests/install.sh).
#
# A machine is `unshare --net --uts --mount --pid` around a bash that is its pid 1: it has its own host name, processes,
# network (a cable to a bridge in the login node's namespace) and hosts file. SIGKILL of its pid 1 is a power failure.
# DIR/local is a disk of each node's own; all other folders are one shared file system, also for a node that is unplugged.
# Nothing is touched outside DIR: no interface of this machine, none of its files, no munge of its own.
#
#   MINISLURM_OWNER=PID   bring the cluster down when this process has ended, however it ended
#   MINISLURM_SWITCHES="n1,n3 n2,n4"   leaf switches and their nodes (topology/tree); default: none
#   MINISLURM_NET=a.b.c   first three bytes of the addresses; default: 198.18.0 (RFC 2544: for tests)
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
net=${MINISLURM_NET:-198.18.0}
export PATH=$PATH:/usr/sbin:/sbin # Debian's place for daemons

fail() {
    printf 'minislurm: %s\n' "$@" >&2
    exit 1
}

# --- Can it run here? ------------------------------------------------------------------------------------------------

check() {
    local name missing=()
    [ "$(id -u)" = 0 ] || fail "only root can give a node a network of its own."
    for name in slurmctld slurmd sbatch munged ip unshare nsenter setsid; do
        command -v "$name" >/dev/null || missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] || fail "not installed: ${missing[*]}." "fix: bash tests/install.sh"
    # shellcheck disable=SC2016 # expanded by the inner shell
    unshare --net --uts --mount --pid --fork --kill-child bash -c '
        mount -t proc proc /proc && hostname n1 &&
        ip link add br0 type bridge && ip link add v0 type veth peer name v1' >/dev/null 2>&1 ||
        fail "this machine gives out no namespaces, bridges or cables (a container without --privileged?)."
}

# --- Configuration ---------------------------------------------------------------------------------------------------

# Every figure here was tried; those with a comment are the ones a test would miss.
write_configuration() {
    local nodes=$1 gpus=$2 i gres=""
    mkdir -p "$dir"/{etc,state,log,run,dev,munge,local}
    chmod 755 "$dir" "$dir"/{etc,log,run,munge,local}
    chmod 700 "$dir/state"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/munge.key")
    : >"$dir/etc/plugstack.conf"
    : >"$dir/etc/gres.conf"
    if ((gpus > 0)); then # a character device each: Slurm takes no plain file for a GPU
        gres=" Gres=gpu:$gpus"
        for ((i = 0; i < gpus; i++)); do mknod -m 666 "$dir/dev/nvidia$i" c 1 3; done
        echo "Name=gpu File=$dir/dev/nvidia[0-$((gpus - 1))]" >"$dir/etc/gres.conf"
    fi
    {
        echo "127.0.0.1 localhost"
        echo "$net.1 login"
        for ((i = 1; i <= nodes; i++)); do echo "$(address "n$i") n$i"; done
    } >"$dir/etc/hosts"
    {
        slurm_configuration
        for ((i = 1; i <= nodes; i++)); do
            mkdir -p "$dir/node/n$i"/{spool,local}
            chmod 1777 "$dir/node/n$i/local"
            # More than this machine has (config_overrides), so that what a real recipe asks for is there.
            echo "NodeName=n$i NodeAddr=$(address "n$i") CPUs=128 RealMemory=1000000$gres"
        done
        [ -z "${MINISLURM_SWITCHES:-}" ] || write_switches
        echo "PartitionName=batch Nodes=n[1-$nodes] Default=YES MaxTime=INFINITE State=UP"
    } >"$dir/etc/slurm.conf"
    echo "$nodes" >"$dir/nodes"
}

write_switches() {
    local leaves=() i
    echo "TopologyPlugin=topology/tree"
    read -ra leaves <<<"$MINISLURM_SWITCHES"
    for i in "${!leaves[@]}"; do echo "SwitchName=leaf$i Nodes=${leaves[i]}"; done >"$dir/etc/topology.conf"
    echo "SwitchName=spine Switches=leaf[0-$((${#leaves[@]} - 1))]" >>"$dir/etc/topology.conf"
}

slurm_configuration() {
    cat <<END
ClusterName=minislurm
SlurmctldHost=login($net.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until its credential has expired: 120 s by default, also for values below 5.
AuthInfo=socket=$dir/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/node/%n/spool
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
PlugStackConfig=$dir/etc/plugstack.conf
# No cgroups: memory limits and device limits are not enforced.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
# One line per attempt of a job (NODE_FAIL, PENDING for a requeue, COMPLETED, ...): the history, without a database.
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.log
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
JobRequeue=1
# 1: a node that came back from the dead is used again, one that an operator has put down is not.
ReturnToService=1
# A dead node is reported down after 11 s.
SlurmctldTimeout=10
SlurmdTimeout=5
MessageTimeout=${MINISLURM_MESSAGE_TIMEOUT:-3}
TCPTimeout=1
KillWait=3
BatchStartTimeout=5
UnkillableStepTimeout=20
# scontrol still knows a job an hour after its end.
MinJobAge=3600
SlurmdParameters=config_overrides
GresTypes=gpu
END
}

address() { # NODE
    echo "$net.$((10 + ${1#n}))"
}

# --- Machines --------------------------------------------------------------------------------------------------------

pid_of() { # MACHINE: its pid 1, as numbered outside
    cat "$dir/run/$1.pid" 2>/dev/null || fail "$1 is not running in $dir"
}

on() { # MACHINE COMMAND...
    local pid
    pid=$(pid_of "$1")
    shift
    nsenter -t "$pid" -n -u -m -p --wd="$PWD" env SLURM_CONF="$dir/etc/slurm.conf" "$@"
}

cable() { # ACTION...: `ip link` where the bridge is
    local pid
    pid=$(pid_of login)
    nsenter -t "$pid" -n ip link "$@"
}

boot() { # MACHINE: start its pid 1 and wait until it has printed its number
    rm -f "$dir/run/$1.pid"
    setsid unshare --net --uts --mount --pid --fork --kill-child "$self" _init "$dir" "$1" \
        >>"$dir/log/$1.out" 2>&1 </dev/null &
    for _ in {1..400}; do
        [ -s "$dir/run/$1.pid" ] && return
        sleep 0.05
    done
    fail "$1 did not boot:" "$(cat "$dir/log/$1.out")"
}

power_on() { # NODE
    local pid
    cable del "v$1" 2>/dev/null || true
    boot "$1"
    pid=$(pid_of "$1")
    cable add "v$1" type veth peer name eth0 netns "$pid"
    cable set "v$1" master br0 up
}

power_off() { # NODE
    local pid
    pid=$(pid_of "$1")
    cable set "v$1" down 2>/dev/null || true # first, or the kernel would close connections to its peers
    kill -9 "$pid"
    rm -f "$dir/run/$1.pid"
    wait_until_gone "$pid"
}

# What pid 1 of a machine does; it ends only by being killed.
init() { # MACHINE
    local machine=$1 pid
    read -r pid _ </proc/self/stat # the mount of /proc is still the one outside, and so is the number
    mount -t proc proc /proc
    mount --bind "$dir/etc/hosts" /etc/hosts
    hostname "$machine"
    ip link set lo up
    export SLURM_CONF=$dir/etc/slurm.conf
    if [ "$machine" = login ]; then
        ip link add br0 type bridge
        ip addr add "$net.1/24" dev br0
        ip link set br0 up
        munged --key-file="$dir/munge/munge.key" --socket="$dir/run/munge.socket" --pid-file="$dir/munge/munged.pid" \
            --log-file="$dir/munge/munged.log" --seed-file="$dir/munge/seed" --num-threads=2
        slurmctld -D >>"$dir/log/slurmctld.out" 2>&1 &
        echo "$pid" >"$dir/run/$machine.pid"
    else
        mount --bind "$dir/node/$machine/local" "$dir/local"
        echo "$pid" >"$dir/run/$machine.pid"
        until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
        ip addr add "$(address "$machine")/24" dev eth0
        # The same after every boot: other nodes have it in their ARP tables, and would not reach this one for a minute.
        ip link set eth0 address "$(printf '02:00:00:00:00:%02x' "${machine#n}")" up
        slurmd -D -N "$machine" >>"$dir/log/slurmd.$machine.out" 2>&1 &
    fi
    while :; do # reap whatever lost its parent, as an init does
        wait -n || true
        sleep 0.2
    done
}

# --- The cluster -----------------------------------------------------------------------------------------------------

up() { # NODES GPUS
    local nodes=$1 gpus=$2 i
    [ ! -e "$dir/run" ] || fail "$dir was a cluster before; take another folder."
    write_configuration "$nodes" "$gpus"
    boot login
    for ((i = 1; i <= nodes; i++)); do power_on "n$i"; done
    if [ -n "${MINISLURM_OWNER:-}" ]; then
        setsid "$self" _watch "$dir" "$MINISLURM_OWNER" >/dev/null 2>&1 </dev/null &
    fi
    for _ in {1..600}; do
        [ "$(on login sinfo -h -N -o '%t' 2>/dev/null | grep -cx idle)" = "$nodes" ] && return
        sleep 0.1
    done
    on login sinfo -N -l >&2 || true
    fail "the nodes did not become idle within a minute; logs: $dir/log"
}

down() {
    local file pid gone=()
    for file in "$dir"/run/n*.pid "$dir/run/login.pid"; do
        [ -e "$file" ] || continue
        pid=$(<"$file")
        if is_machine "$pid"; then
            kill -9 "$pid" 2>/dev/null || true
            gone+=("$pid")
        fi
        rm -f "$file"
    done
    wait_until_gone "${gone[@]}"
}

is_machine() { # PID: numbers are used again; it is one of ours only with our mark
    grep -qzFx -- "$dir" "/proc/$1/cmdline" 2>/dev/null && grep -qzFx _init "/proc/$1/cmdline" 2>/dev/null
}

wait_until_gone() { # PID...
    local pid
    for pid in "$@"; do
        for _ in {1..200}; do
            is_machine "$pid" || break
            sleep 0.05
        done
    done
}

watch() { # PID
    while [ -e "$dir/run/login.pid" ]; do
        kill -0 "$1" 2>/dev/null || down
        sleep 1
    done
}

verb=${1:-help}
if [ "$verb" = check ]; then
    check
    exit
fi
[ $# -ge 2 ] || {
    sed -n '2,12s/^# \{0,1\}//p' "$self" >&2
    exit 2
}
dir=$(realpath -m "$2")
shift 2
case $verb in
up) up "${1:-2}" "${2:-0}" ;;
login) on login "$@" ;;
on) on "$@" ;;
poweroff) power_off "$1" ;;
poweron) power_on "$1" ;;
unplug) cable set "v$1" down ;;
plug) cable set "v$1" up ;;
down) down ;;
_init) init "$1" ;;
_watch) watch "$1" ;;
*) fail "unknown: $verb" ;;
esac
