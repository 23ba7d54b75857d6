#!/usr/bin/env bash
# Runs a command until it is done, and again where it was cut off:
#
#   tpu_scripts/run_with_restart.sh [--processes N] -- python -m fgrpo_jax.main --workdir DIR ...
#
# On a pod, start it on every worker; each supervises its own process. With --processes it starts
# N of them here, which find each other through a free port.
#
# The command's exit code decides: 0 it is done; 2 a mistake, and 130 a second interrupt, which end
# this script too; 75 it was asked to stop and has saved, so it starts again, unless this script was
# asked as well; any other, or a signal, is a fault. Once one has ended, the others get 20 s to say
# what they saw and are killed; then all start again, after 5, 10, 20 s. After three restarts
# without a new checkpoint the script gives up, with the last exit code.
set -uo pipefail

fail() { echo "run_with_restart: $*" >&2; exit 2; }

usage="usage: run_with_restart.sh [--processes N] -- COMMAND --workdir DIR ..."
processes=1
while [ $# -gt 0 ]; do
    case "$1" in
        --processes) processes="${2-}"; shift 2 || fail "$usage" ;;
        --) shift; break ;;
        *) fail "$usage" ;;
    esac
done
[ $# -gt 0 ] || fail "$usage"
[[ "$processes" =~ ^[1-9][0-9]*$ ]] || fail "--processes takes a number, not '$processes'"

workdir=""
command=("$@")
for ((i = 0; i < $#; i++)); do
    case "${command[i]}" in
        --workdir) workdir="${command[i + 1]-}" ;;
        --workdir=*) workdir="${command[i]#*=}" ;;
    esac
done
[ -n "$workdir" ] || fail "the command needs --workdir DIR: its checkpoints tell progress"

list() { # the names in a folder, one a line
    case "$1" in
        gs://*) gcloud storage ls "$1/" ;;
        *) ls "$1" ;;
    esac 2>/dev/null | sed 's:/*$::; s:.*/::'
}
newest() { # the last whole checkpoint's step, or -1
    local checkpoints
    checkpoints=$(sed -n 's/^ *"checkpoint.folder": "\(.*\)",*$/\1/p' "$workdir/config.json" 2>/dev/null)
    checkpoints="${checkpoints:-$workdir/checkpoints}"
    { echo -1; list "$checkpoints" | grep -E '^[0-9]+$'; } | sort -n | tail -1
}
free_port() {
    local port
    for _ in $(seq 100); do
        port=$((20000 + RANDOM % 20000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
    done
    return 1
}

asked=0
pids=() # of those that run, by their number
tell() { # sends all a signal
    local pid
    for pid in "${pids[@]+"${pids[@]}"}"; do kill -"$1" "$pid" 2>/dev/null; done
}
ask() { # TERM, since what bash starts in the background ignores INT; the second time KILL
    asked=$((asked + 1))
    if [ "$asked" -eq 1 ]; then tell TERM; else tell KILL; fi
}
trap ask TERM INT
trap 'tell KILL' EXIT

grace=20
run_once() { # starts all and waits for all; leaves the code that decides in $code
    local port="" i status since=""
    [ "$processes" -eq 1 ] || port=$(free_port) || fail "no free port was found"
    code=75
    [ "$asked" -eq 0 ] || return
    code=0
    for ((i = 0; i < processes; i++)); do
        if [ -n "$port" ]; then
            JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$processes" \
                JAX_PROCESS_ID="$i" "$@" &
        else
            "$@" &
        fi
        pids[i]=$!
    done
    [ "$asked" -eq 0 ] || tell TERM # between the look above and here
    while [ ${#pids[@]} -gt 0 ]; do
        for i in "${!pids[@]}"; do
            kill -0 "${pids[i]}" 2>/dev/null && continue
            wait "${pids[i]}"
            status=$?
            unset "pids[i]"
            since="${since:-$SECONDS}" # they end well together too
            [ "$status" -ne 0 ] || continue
            [ "$processes" -eq 1 ] || echo "run_with_restart: process $i ended with code $status" >&2
            # the first decides, but for a mistake, which is the same at every start
            if [ "$code" -eq 0 ] || [ "$status" -eq 2 ]; then code=$status; fi
        done
        if [ -n "$since" ] && [ $((SECONDS - since)) -ge "$grace" ]; then tell KILL; fi
        [ ${#pids[@]} -eq 0 ] || sleep 0.2
    done
}

best=$(newest)
barren=0
while true; do
    run_once "$@"
    case $code in
        0 | 2 | 130) exit "$code" ;;
    esac
    [ "$asked" -eq 0 ] || exit "$code"
    now=$(newest)
    if [ "$now" -gt "$best" ]; then
        best=$now
        barren=0
    fi
    if [ "$barren" -ge 3 ]; then
        echo "run_with_restart: three restarts have brought no checkpoint after step $best;" \
            "giving up with code $code" >&2
        exit "$code"
    fi
    pause=0
    [ "$code" -eq 75 ] || pause=$((5 << barren))
    barren=$((barren + 1))
    echo "run_with_restart: ended with code $code; starting again in $pause s, from step $now" >&2
    for ((second = 0; second < pause && asked == 0; second++)); do sleep 1; done
    [ "$asked" -eq 0 ] || exit "$code"
done
