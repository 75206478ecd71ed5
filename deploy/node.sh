#!/usr/bin/env bash
# One node of a training run: test the node, then start its ranks.
#
#     HEAD=node-0:29400 NODES=3:4 RANKS=8 bash node.sh run.yaml -o /shared/run
#
# A node that fails the test exits with 1 before it joins the others; with NODES=MIN:MAX they train without it. The same run may
# continue on fewer nodes: a checkpoint loads in any layout, and --batch is that of all ranks.
set -euo pipefail
HEAD=${HEAD:?host:port of the rendezvous, on a node of the job}
NODES=${NODES:-1}              # a number, or MIN:MAX
RANKS=${RANKS:-1}              # per node
JOB=${JOB:-dovetail}           # the same on all nodes of a job
RESTARTS=${RESTARTS:-100}      # of all ranks, after one of them was lost
DIRECTORY=${DIRECTORY:-.}      # the disk that is tested
GFLOPS=${GFLOPS:-0}            # the least of a good device …
MEMORY=${MEMORY:-0}            # … and the least GB of a good node

python -m dovetail doctor --node "$DIRECTORY" --gflops "$GFLOPS" --memory "$MEMORY"

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # nodes count restarts differently: a store of their own per attempt
exec python -m torch.distributed.run --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$JOB" ${ADDRESS:+--local-addr "$ADDRESS"} \
  -m dovetail train "$@"
