#!/bin/bash
# A job on hosts that ssh reaches without a password: one torchrun a host.
#
#     HOSTS="node0 node1" launch/ssh.sh
#     HOSTS="10.0.0.1 10.0.0.2" RANKS_PER_HOST=2 launch/ssh.sh launch/ppo.py configs/multinode/dp1_tp4.toml
#     HOSTS="user@fd00::1 user@fd00::2" RDZV_HOST=fd00::1 launch/ssh.sh
#
# Arguments are the job. All hosts must see the repository and RUN_DIR under the same paths, and reach the first one at
# RDZV_HOST. When one host fails, or at Ctrl-C, or when this script is killed, every host's torchrun is ended: each watches
# the input of its ssh connection, which closes with it. Exit code: the first failure's, 130 after Ctrl-C.
#
# With pdsh, which runs the same line everywhere but does not end the other hosts when one fails:
#
#     pdsh -S -R ssh -w node0,node1 'cd REPOSITORY && .venv/bin/torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \
#         --rdzv-id=1 --rdzv-endpoint=node0:29500 launch/ppo.py CONFIG.toml --run.dir SHARED'
set -euo pipefail

read -r -a hosts <<<"${HOSTS:?set it to the names or addresses of the hosts, separated by spaces}"
REPOSITORY=${REPOSITORY:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)}
TORCHRUN=${TORCHRUN:-.venv/bin/torchrun}
RANKS_PER_HOST=${RANKS_PER_HOST:-8}
RDZV_HOST=${RDZV_HOST:-${hosts[0]#*@}}
RDZV_PORT=${RDZV_PORT:-29500}
NAME=ssh-$(date +%Y%m%d-%H%M%S)-$$
RUN_DIR=${RUN_DIR:-$REPOSITORY/runs/$NAME}
SSH=${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=10}
JOB=("$@")
if [ ${#JOB[@]} -eq 0 ]; then
    JOB=(launch/ppo.py configs/gpu/tiny.toml --parallel.dp 2 --parallel.tp 8
        --rollout.prompts_per_step 16 --actor.minibatch_size 16)
fi
case $RDZV_HOST in *:*) RDZV_HOST="[$RDZV_HOST]" ;; esac # an IPv6 address

# Runs on each host, with the repository and torchrun's command line as arguments. torchrun gets its own process group and
# ends its ranks on SIGTERM; whatever is left after a minute is killed.
on_host='
cd -- "$1" || exit 125
shift
set -m
exec 3<&0
"$@" </dev/null 3<&- &
job=$!
{ cat; kill -TERM -- "-$job"; sleep 60; kill -KILL -- "-$job"; } <&3 >/dev/null 2>&1 &
watch=$!
wait "$job"
code=$?
kill -KILL -- "-$watch" 2>/dev/null
exit "$code"
'

quote="'\\''" # a quote inside of quotes, in every POSIX shell
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
mkfifo "$folder/open"
exec 9<>"$folder/open" # the other end of every host's input; nothing is ever written
trap 'exec 9>&-; wait; exit 130' INT TERM

for index in "${!hosts[@]}"; do
    is_host=$((index == 0)) # explicitly: torchrun would compare the endpoint with the host's own name
    command=("$TORCHRUN" --nnodes="${#hosts[@]}" --nproc-per-node="$RANKS_PER_HOST" --rdzv-backend=c10d
        --rdzv-id="$NAME" --rdzv-endpoint="$RDZV_HOST:$RDZV_PORT" --rdzv-conf="is_host=$is_host,read_timeout=600"
        "${JOB[@]}" --run.dir "$RUN_DIR")
    # ssh makes one string of its arguments, which the other side's shell, whatever it is, takes apart again.
    line=
    for word in bash -c "$on_host" on_host "$REPOSITORY" "${command[@]}"; do
        line+="'${word//\'/$quote}' "
    done
    $SSH "${hosts[index]}" "$line" <"$folder/open" 9>&- 2>&1 | sed -u "s|^|[${hosts[index]}] |" 9>&- &
done

failure=0
for _ in "${hosts[@]}"; do
    code=0
    wait -n || code=$?
    if [ "$code" -ne 0 ] && [ "$failure" -eq 0 ]; then
        failure=$code
        echo "ssh.sh: a host ended with code $code; ending the others" >&2
        exec 9>&-
    fi
done
exit "$failure"
