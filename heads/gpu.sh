#!/usr/bin/env bash
# The long run on one GPU: both heads of smollm2-135m at once, with the settings of the shipped ones.
# (Those had more.jsonl only after 4.5 million tokens, and were made by single commands: this script
# as a whole has not been run on a GPU.)
#   heads/gpu.sh FOLDER train_prompts.jsonl.gz answers.jsonl.gz more_answers.jsonl.gz
# Writes FOLDER/data, FOLDER/p-eagle and FOLDER/eagle3; the same command again goes on. On an H200 a
# step of 8,192 tokens took 0.12 s of each head, 38,000 and 35,000 answer tokens a second. Two
# processes share a GPU well only under MPS: start `nvidia-cuda-mps-control -d` first.
# To keep the heads: python heads/pack.py FOLDER/p-eagle/head heads/smollm2-135m-p-eagle, and eagle3.
set -euo pipefail
[ $# = 4 ] || { sed -n '2,10s/^# *//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
data=$folder/data
shift

if [ ! -f "$data/all.jsonl" ]; then
  "$here/data.sh" "$1" "$data" "$2" "$3"
  python "$here/measured.py" "$data/prompts/held_out.jsonl" "$data/held_out.jsonl" "$data/measured.jsonl"
  for file in "$2" "$3" "$data"/{greedy,sampled,synth,more}.jsonl; do zcat -f "$file"; done >"$data/all.part"
  mv "$data/all.part" "$data/all.jsonl"
fi

train() { # method, settings
  local resume=()
  if [ -d "$folder/$1/checkpoints" ]; then resume=(--resume); fi
  peagle train smollm2-135m --method "$1" --output "$folder/$1" --data "$data/all.jsonl" \
    --held-out "$data/measured.jsonl" --draft-vocab 7680 --pack 8192 --segments 1 --ratio 0.7 \
    --decay 0.8 --warmup 0.003 --cooldown 0.25 --save-every 1500 --eval-every 2500 "${@:2}" "${resume[@]}"
}

train p-eagle --layers 4 --depths 8 --correction joint --lr 1e-3 --max-train-tokens 34000000 &
train eagle3 --layers 1 --depths 7 --fc-norm --norm-output --lr 1.2e-3 --max-train-tokens 30000000 &
wait -n && wait -n
