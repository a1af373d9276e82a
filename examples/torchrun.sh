#!/usr/bin/env bash
# A run on several machines, by torchrun. The same line on each of them, at about the same time:
#
#     HEAD=node-1 NODES=2 RANKS=2 bash torchrun.sh run.toml
#
# HEAD is the name of one of the machines, NODES their number, RANKS the processes of each (one a GPU):
# NODES x RANKS = tensor x pipeline x data. run.toml and train.folder must be on a filesystem that all share.
# A rank that crashes is started again with all others, up to RESTARTS times. For a run that also survives the loss of
# a machine, and takes it up again when this line is run there again, allow fewer and a smaller layout:
#
#     HEAD=node-1 NODES=1:2 RANKS=2 bash torchrun.sh run.toml parallel.elastic=true
#
# HEAD itself must live: a machine that is cut off from it ends once its ranks have left and HEAD is silent for 30 s.
# With plain `torchrun` in place of the module below, that machine waits a quarter of an hour.
# ADDRESS: this machine's own address, where its name does not resolve; then IS_HOST=1 on HEAD and IS_HOST=0 elsewhere.
# PORT: a free one on HEAD.
set -euo pipefail

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # ranks that start again must not meet the addresses of those before them
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-100}" # seconds for the last step and its checkpoint
exec python -P -m tools.training.torchrun --nnodes "$NODES" --nproc-per-node "$RANKS" \
    --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-megaprec}" \
    ${IS_HOST:+--rdzv-conf "is_host=$IS_HOST"} ${ADDRESS:+--local-addr "$ADDRESS"} \
    -m megaprec train "$@"
