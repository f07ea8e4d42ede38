#!/bin/bash
# A workload for xpk: TPUs of Google Kubernetes Engine, in one slice or several.
#
#     CLUSTER=my-cluster bash xpk.sh
#
# Never run. The flags are those of xpk 1.16.
#
# Needed: a cluster made by `xpk cluster create`; the image, from the repository's Dockerfile with
# `--build-arg EXTRA=tpu,buckets`; a bucket that the pods may write to, for the workdir
# {{workdir=gs://BUCKET/runs/train}}. JAX finds the processes and slices by the variables
# TPU_WORKER_HOSTNAMES and MEGASCALE_... that GKE sets.
set -eu

# xpk sends SIGTERM to the shell of the command, so `exec` puts the command in the shell's place.
# After the codes 4 and 75 all pods restart, as after the codes 42 and 127 to 255.
xpk workload create \
  --cluster="$CLUSTER" \
  --workload={{name=train}} \
  --docker-image={{image=REGISTRY/manualpar}} \
  --tpu-type={{tpu=v5litepod-16}} \
  --num-slices={{slices=1}} \
  --max-restarts={{restarts=20}} \
  --restart-on-exit-codes=4,75 \
  --termination-grace-period-seconds=120 \
  --env="MANUALPAR_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" \
  --command={{exec_command}}
