#!/usr/bin/env bash
# Make training data for the heads of smollm2-135m: prompts of many kinds, answered by the target.
#   heads/data.sh train_prompts.jsonl.gz runs/data answers.jsonl.gz more_answers.jsonl.gz
# The files after the output are earlier answers, as `peagle data regenerate smollm2-135m` writes
# them: no prompt is answered twice, and texts to translate or to sum up come from them. The same
# command again continues; what heads/answers.jsonl.gz holds, which is packed, is not decoded again.
# Two thirds of the answers are greedy; more.jsonl, which was made on a GPU, is greedy and only
# unpacked. It runs python of .venv, which must be activated.
set -euo pipefail
prompts=$1 out=$2 here=$(dirname "$0")
shift 2
python "$here/prompts.py" smollm2-135m "$prompts" "$@" --output "$out/prompts"

answer() { # part, sampling
  if [ -f "$here/answers.jsonl.gz" ] && [ ! -f "$out/$1.jsonl" ]; then
    python "$here/answers.py" unpack "$here/answers.jsonl.gz" "$out/prompts/$1.jsonl" "$out/$1.jsonl"
  fi
  peagle data regenerate smollm2-135m --prompts "$out/prompts/$1.jsonl" --output "$out/$1.jsonl" \
    --max-tokens 384 "${@:2}"
}

answer greedy
answer sampled --temperature 0.7 --top-p 0.95
answer held_out
if [ -f "$here/answers.jsonl.gz" ] && [ ! -f "$out/synth.jsonl" ]; then
  python "$here/answers.py" unpack "$here/answers.jsonl.gz" "$out/synth.jsonl"
fi
peagle data synth smollm2-135m --output "$out/synth.jsonl" --count 2000 --max-tokens 384
if [ ! -f "$out/more.jsonl" ]; then
  python "$here/more.py" "$prompts" "$out" "$@"
fi
