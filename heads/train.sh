#!/usr/bin/env bash
# Train (or train on) both heads of smollm2-135m: same data, same budget, one core each.
#   heads/train.sh answers.jsonl.gz runs 400000
# Run it again with a larger budget to continue: checkpoints under runs/ resume exactly. With
# CONTINUE=1 and no checkpoint, training starts from the shipped heads.
set -euo pipefail
data=$1 runs=$2 tokens=$3
heads=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

train() { # method, drafter layers, draft tokens trained for
  local out=$runs/$1 extra=()
  if [ -d "$out/checkpoints" ]; then extra=(--resume)
  elif [ -n "${CONTINUE:-}" ]; then extra=(--init-from "$heads/smollm2-135m-$1"); fi
  OMP_NUM_THREADS=1 peagle train smollm2-135m --data "$data" --output "$out" --method "$1" \
    --layers "$2" --depths "$3" --draft-vocab 7680 --max-train-tokens "$tokens" "${extra[@]}"
}

train p-eagle 4 8 &
train eagle3 1 7 &
wait
