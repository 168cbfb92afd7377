#!/usr/bin/env bash
# Train both heads of smollm2-135m on the same data, one core each.
#   heads/train.sh answers.jsonl.gz runs/first            # from the target's layers
#   heads/train.sh captured runs/second runs/first 3e-4   # on from the heads of a run; learning rate
# The same command again continues what was interrupted, from runs/*/*/checkpoints.
set -euo pipefail
data=$1 runs=$2 from=${3:-} lr=${4:-6e-4}

train() { # method, drafter layers, draft tokens trained for
  local out=$runs/$1 start=()
  if [ -d "$out/checkpoints" ]; then start=(--resume)
  elif [ -n "$from" ]; then start=(--init-from "$from/$1/head"); fi
  OMP_NUM_THREADS=1 peagle train smollm2-135m --data "$data" --output "$out" --method "$1" \
    --layers "$2" --depths "$3" --draft-vocab 7680 --lr "$lr" --eval-every 250 \
    "${start[@]}"
}

train p-eagle 4 8 &
train eagle3 1 7 &
wait
