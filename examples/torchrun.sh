#!/usr/bin/env bash
# A run on several machines, by torchrun. The same line on each of them, at about the same time:
#
#     HEAD=node-1 NODES=2 RANKS=2 bash torchrun.sh run.toml
#
# HEAD is the name of one of the machines, NODES their number, RANKS the processes of each (one a GPU):
# NODES x RANKS = tensor x pipeline x data. run.toml and train.folder must be on a filesystem that all share.
# ADDRESS: this machine's own, where its name does not resolve. PORT: a free one on HEAD.
set -euo pipefail

exec torchrun --nnodes "$NODES" --nproc-per-node "$RANKS" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-megaprec}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} \
    -m megaprec train "$@"
