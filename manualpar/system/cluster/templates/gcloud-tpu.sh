#!/bin/bash
# A Cloud TPU pod (one slice) without Kubernetes: makes it, installs manualpar, and trains.
#
#     ZONE=us-west4-a bash gcloud-tpu.sh     # In a copy of the repository; needs gcloud and git.
#
# Never run. The flags are those of gcloud 528.
#
# Needed: a bucket that the machines may write to, for the workdir
# {{workdir=gs://BUCKET/runs/train}}. JAX asks Google's metadata server for the machines of the
# slice, so the command has --coordinator-address=auto. The script leaves the pod running.
set -u

on_all() {
  gcloud compute tpus tpu-vm ssh {{name=train}} --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm describe {{name}} --zone="$ZONE" >/dev/null 2>&1 ||
  gcloud compute tpus tpu-vm create {{name}} --zone="$ZONE" \
    --accelerator-type={{tpu=v5litepod-16}} --version={{runtime=v2-alpha-tpuv5-lite}} || exit
git archive --prefix=manualpar/ --output=manualpar.tar HEAD || exit
gcloud compute tpus tpu-vm scp manualpar.tar {{name}}: --zone="$ZONE" --worker=all || exit
# The system image may have an older Python than 3.11, so uv installs one.
on_all "tar -xf manualpar.tar && python3 -m pip install --quiet --user uv &&
  python3 -m uv venv --quiet --allow-existing --python=3.11 venv &&
  python3 -m uv pip install --quiet --python=venv './manualpar[train,buckets,tpu]'" || exit

MANUALPAR_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
command={{quoted_command}}
most_restarts={{restarts=20}}
restarts=0
while :; do
  # The exit code of gcloud is that of the first machine whose command has failed.
  on_all "export MANUALPAR_TOKEN=$MANUALPAR_TOKEN; . venv/bin/activate; $command"
  code=$?
  case $code in
  75 | 4)
    if [ "$restarts" -ge "$most_restarts" ]; then
      echo "not started again, because it has been restarted $restarts times"
      exit "$code"
    fi
    restarts=$((restarts + 1))
    ;;
  *) exit "$code" ;;
  esac
done
