#!/usr/bin/env bash
# The long run on one GPU, in as many seconds as there are: new text, then both heads at once.
#   heads/gpu.sh prepare FOLDER train_prompts.jsonl.gz answers.jsonl.gz more_answers.jsonl.gz \
#     humaneval.jsonl mt_bench.jsonl
#   heads/gpu.sh run FOLDER SECONDS
# `prepare` needs no GPU: it makes data/ and ask/ of FOLDER, 15 MB when packed by xz. No prompt of
# ask/ shares 50 characters with the last two files, whose records have `turns` or `question`, as
# MT-Bench's. `run` has the target answer ask/ (generate.py, an eighth of the seconds), and trains
# the shipped heads further on all answers (by_clock.py) until the seconds have passed.
# FOLDER/packed/ gets the heads. Both run python of .venv, which must be activated. On an H200, 640
# seconds gave 4.5 million tokens of answers and 24 million of training for each head.
set -euo pipefail
usage() { sed -n '3,5s/^# *//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)

prepare() { # FOLDER, prompts, answers, more answers, files to measure on
  local data=$1/data file
  "$here/data.sh" "$2" "$data" "$3" "$4"
  python "$here/measured.py" "$data/prompts/held_out.jsonl" "$data/held_out.jsonl" "$data/measured.jsonl"
  python "$here/ask.py" "$2" "$data" "$3" "$4" "$1/ask" --not-in "${@:5}"
  for file in "$3" "$4" "$data"/{greedy,sampled,synth,more,asked}.jsonl; do zcat -f "$file"; done >"$data/all.jsonl"
}

share_gpu() { # without MPS processes take turns
  export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mps}
  export CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$CUDA_MPS_PIPE_DIRECTORY}
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d || true # it may run already
}

answer() { # file of ask/, seconds, settings
  OMP_NUM_THREADS=3 python "$here/generate.py" smollm2-135m "ask/$1.jsonl" "answers/$1.jsonl" --seconds "$2" "${@:3}" \
    >"answers/$1.log" 2>&1 || true # what was answered until then counts
}

run() { # FOLDER, seconds
  local until=$(($(date +%s) + $2)) method part job failed="" jobs=() answering=()
  [ -f "$1/ask/greedy.jsonl" ] || { echo "heads/gpu.sh: $1/ask/greedy.jsonl: no such file" >&2; exit 2; }
  cd "$1"
  share_gpu
  mkdir -p answers
  rm -f ready # of an earlier run
  for method in p-eagle eagle3; do
    OMP_NUM_THREADS=4 python "$here/by_clock.py" $method $method $until data/all.jsonl new.jsonl ready >$method.log 2>&1 &
    jobs+=($!)
  done
  split -n r/3 --additional-suffix=.jsonl -d -a 1 ask/greedy.jsonl ask/greedy.
  for part in 0 1 2; do answer greedy.$part $(($2 / 8)) & answering+=($!); done
  answer sampled $(($2 / 8)) --temperature 0.8 & answering+=($!)
  wait "${answering[@]}"
  if ! grep -hs '}$' answers/*.jsonl >new.jsonl; then
    echo "heads/gpu.sh: no answers were made: see $1/answers/*.log" >&2
    kill "${jobs[@]}" 2>/dev/null || true # they wait for answers
    wait
    exit 1
  fi
  touch ready
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  [ -z "$failed" ] || { echo "heads/gpu.sh: a training failed: see $1/*.log" >&2; exit 1; }
  for method in p-eagle eagle3; do python "$here/pack.py" $method/head packed/$method; done
}

case ${1-} in
  prepare) [ $# -ge 6 ] || usage; prepare "${@:2}" ;;
  run) [ $# = 3 ] || usage; run "${@:2}" ;;
  *) usage ;;
esac
