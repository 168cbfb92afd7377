#!/usr/bin/env bash
# The long run on one GPU, in as many seconds as there are: new text, then both heads at once.
#   heads/gpu.sh prepare FOLDER train_prompts.jsonl.gz answers.jsonl.gz more_answers.jsonl.gz
#   heads/gpu.sh run FOLDER SECONDS humaneval.jsonl mt_bench.jsonl
# `prepare` needs no GPU: it makes data/ and ask/ of FOLDER, 11 MB when packed by xz. `run` has the
# target write user turns and answer all prompts (ask.py, generate.py; a sixth of the seconds).
# No user turn of its own shares 50 characters with the last two files. It then trains the shipped
# heads further: at a constant rate, and in the last third at one that falls to 0, over as many
# tokens as the speed so far lets expect. FOLDER/packed/ gets the heads. Two processes share a GPU
# well only under MPS: start `nvidia-cuda-mps-control -d` first. (Not yet run on a GPU as a whole;
# on a CPU, with few prompts, it has been. The shipped heads were made by single commands.)
set -euo pipefail
PACK=${PACK:-16384} # tokens of a step
usage() { sed -n '3,4s/^# *//p' "$0" >&2; exit 2; }
[ $# = 5 ] || usage
if [ "$1" = run ]; then
  for needed in "$2/ask/greedy.jsonl" "${@:4}"; do
    [ -f "$needed" ] || { echo "heads/gpu.sh: $needed: no such file" >&2; exit 2; }
  done
fi
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd)
command=$1
shift 2

prepare() {
  local data=$folder/data
  "$here/data.sh" "$1" "$data" "$2" "$3"
  python "$here/measured.py" "$data/prompts/held_out.jsonl" "$data/held_out.jsonl" "$data/measured.jsonl"
  for file in "$2" "$3" "$data"/{greedy,sampled,synth,more}.jsonl; do zcat -f "$file"; done >"$data/all.jsonl"
  python "$here/ask.py" first "$1" "$data" "$2" "$3" "$folder/ask"
}

answer() { # file of ask/, seconds, settings
  python "$here/generate.py" smollm2-135m "ask/$1.jsonl" "ask/$1.answers.jsonl" --seconds "$2" "${@:3}" \
    >"ask/$1.log" 2>&1
  echo "$1: $(tail -n 1 "ask/$1.log")"
}

new_text() { # seconds, files to measure on
  answer starts $(($1 / 5)) --temperature 0.9 --max-tokens 160 &
  local starts=$!
  answer greedy $(($1 / 2)) &
  local greedy=$!
  answer sampled $(($1 / 2)) --temperature 0.8 &
  local sampled=$!
  wait $starts && wait $greedy
  python "$here/ask.py" 'then' ask "${@:2}"
  answer written $(($1 / 4)) &
  local written=$!
  answer further $(($1 / 4)) &
  wait $! && wait $written && wait $sampled
}

train() { # method, settings
  local settings=(--layers 4 --depths 8 --correction joint --lr 1.2e-3) data=(--data data/all.jsonl) name
  if [ "$1" = eagle3 ]; then settings=(--layers 1 --depths 7 --fc-norm --norm-output --lr 1.4e-3); fi
  for name in greedy sampled written further; do data+=(--data "ask/$name.answers.jsonl"); done
  exec peagle train smollm2-135m --method "$1" --output "$1" "${data[@]}" --max-length 2048 \
    --held-out data/measured.jsonl --init-from "$here/smollm2-135m-$1" --draft-vocab 7680 \
    --pack "$PACK" --segments 1 --ratio 0.7 --decay 0.8 --save-every 1000 --keep 1 --eval-every 2500 \
    "${settings[@]}" "${@:2}"
}

both() { # second to stop at, name of the part, settings by method
  local method jobs=()
  for method in p-eagle eagle3; do
    # shellcheck disable=SC2086 (several words)
    train $method ${settings[$method]} >"$method.$2.log" 2>&1 &
    jobs+=($!)
  done
  while [ $SECONDS -lt "$1" ] && kill -0 "${jobs[@]}" 2>/dev/null; do sleep 1; done
  kill -TERM "${jobs[@]}" 2>/dev/null || true
  wait "${jobs[@]}" || true
  tail -qn 1 -- *."$2.log"
}

cooling() { # metrics, seconds left: the settings of a run whose rate falls from now on
  python - "$@" <<'P'
import json, sys

rows = [json.loads(line) for line in open(sys.argv[1])]
last, before = rows[-1], rows[-min(600, len(rows))]
speed = (last["answer_tokens"] - before["answer_tokens"]) / (last["seconds"] - before["seconds"])
tokens = speed * float(sys.argv[2]) * 0.87  # the start and the last measurement take time, too
total = last["answer_tokens"] + tokens
print(f"--resume --max-train-tokens {total:.0f} --warmup 0.001 --cooldown {tokens / total:.5f}")
P
}

run() { # seconds, files to measure on
  local measured_on method
  mapfile -t measured_on < <(realpath -- "${@:2}")
  cd "$folder"
  new_text $(($1 / 6)) "${measured_on[@]}"
  declare -A settings
  for method in p-eagle eagle3; do settings[$method]="--max-train-tokens 200000000 --warmup 0.008 --cooldown 0"; done
  both $(($1 * 68 / 100)) constant
  for method in p-eagle eagle3; do settings[$method]=$(cooling $method/metrics.jsonl $(($1 - SECONDS))); done
  both $(($1 + 20)) cooling
  for method in p-eagle eagle3; do python "$here/pack.py" $method/head packed/$method; done
}

case $command in
  prepare) [ $# = 3 ] || usage; prepare "$@" ;;
  run) run "$@" ;;
  *) usage ;;
esac
