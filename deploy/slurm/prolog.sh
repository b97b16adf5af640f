#!/bin/sh
# Prolog= of slurm.conf, or a part of it: an agent for the job's user on each node, outside of the job's cgroup, so that it
# outlives the job's steps. It ends by itself after half an hour without ranks and uploads.
# Training scripts find it with: export CKPTD_SOCKET=/run/ckptd-$(id -u)/agent.sock
set -eu
uid=$SLURM_JOB_UID
user=$(id -un "$uid")
run=/run/ckptd-$uid
data=/var/lib/ckptd-$uid
install -d -m 0700 -o "$uid" "$run" "$data"
# A second one ends at once with exit code 2: one agent runs in a run_dir.
setsid runuser -u "$user" -- /opt/ckptd/bin/ckptd agent --config /etc/ckptd/agent.toml \
    --run-dir "$run" --data-dir "$data" --shm-dir "/dev/shm/ckptd-$uid" --idle-exit-s 1800 \
    >>"$data/agent.log" 2>&1 </dev/null &
