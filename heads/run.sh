#!/usr/bin/env bash
# The long run: both heads of smollm2-135m on the same documents, on what the processor has left.
#   heads/run.sh start FOLDER train_prompts.jsonl.gz answers.jsonl.gz more_answers.jsonl.gz
#   heads/run.sh start FOLDER                 # goes on after a stop
#   heads/run.sh status|pause|go|stop FOLDER
#   heads/run.sh branch FOLDER NAME TOKENS    # a copy whose learning rate falls to 0 over TOKENS
# It works in FOLDER alone, from a copy of this tree, so that edits here do not reach it:
#   data/               made by heads/data.sh, compared with heads/run.sha256
#   captured/PART       what the target makes of a file of data/
#   p-eagle/, eagle3/   one `peagle train` each, one thread each, on all that is captured
#   branches/NAME/      the same
# A folder that is lost is made again by the first command. Training then goes on from the heads in
# heads/run/, else from the shipped ones; their config.json counts the answer tokens they have
# seen. The shipped ones were made by heads/gpu.sh. To keep a run: python heads/pack.py FOLDER/p-eagle/head heads/run/p-eagle, eagle3 likewise.
set -euo pipefail

# Files of data/, each with the millions of answer tokens that both heads have seen in all before the
# next one is captured. One that was passed before the folder was made is left out. The first is a
# tenth of each of the others, so that training begins soon.
PARTS=(mixed:60 asked:64 sampled:66 greedy:68 more_answers_smollm2:69 answers_smollm2:70 synth:71 more:74)
GOAL=74000000
SETTINGS=(--draft-vocab 7680 --segments 1 --ratio 0.7 --save-every 500 --eval-every 2000)
declare -A METHOD=(
  [p-eagle]="--layers 4 --depths 8 --correction joint --decay 1.0"
  [eagle3]="--layers 1 --depths 7 --fc-norm --norm-output --decay 0.8"
)

fail() { echo "heads/run.sh: $*" >&2; exit 2; }

usage() { sed -n '2,6s/^# *//p' "$0" >&2; exit 2; }

# ---- processes: all belong to one group

started() { cut -d " " -f 22 "/proc/$1/stat" 2>/dev/null || true; } # process: when, since the boot

group() { # its number, unless another process has it by now, as after a reboot
  local number time now
  [ -f "$folder/group" ] || return 0
  read -r number time <"$folder/group" || true # older files have no time
  now=$(started "$number")
  if [ -z "$now" ] || [ "${time:-$now}" = "$now" ]; then echo "$number"; fi
}

alive() { # its first process, which begins the group, or any other
  [ -n "$(group)" ] && { kill -0 "$(group)" || kill -0 -- "-$(group)"; } 2>/dev/null
}

paused() { grep -qs '^State:.T' "/proc/$(group)/status"; }

tell() { alive || fail "$folder: not running"; kill "-$1" -- "-$(group)"; }

# Linux shares time between sessions first: nice alone weighs processes of one session only.
in_background() {
  setsid bash -c 'echo 19 >/proc/self/autogroup; exec nice -n 19 ionice -c 3 "$@"' - "$@" \
    >>"$folder/log" 2>&1 </dev/null &
  echo "$! $(started $!)" >"$folder/group"
}

# ---- tokens

last() { # file of JSON, key: the last value, 0 without one
  local found; found=$(tail -n 3000 "$1" 2>/dev/null | grep -o "\"$2\": [0-9.]*" | tail -n 1) || true
  found=${found##* }
  echo "${found:-0}"
}

start_of() { # method: the head that the run began with
  local kept=$folder/tree/heads/run/$1
  if [ -d "$kept" ]; then echo "$kept"; else echo "$folder/tree/heads/smollm2-135m-$1"; fi
}

begun() { last "$(start_of "$1")/config.json" answer_tokens; }

seen() { echo $(($(begun "$1") + $(last "$folder/$1/metrics.jsonl" answer_tokens))); }

# ---- the work

work() {
  export PYTHONPATH=$folder/tree OMP_NUM_THREADS=2
  cd "$folder"
  make_data
  local part captured=""
  for part in "${PARTS[@]}"; do
    local name=${part%:*} until=${part#*:}000000
    if [ ! -d "captured/$name" ]; then
      if [ "$(seen p-eagle)" -ge "$until" ]; then continue; fi
      peagle data capture smollm2-135m --data "$(ls "data/$name".jsonl*)" \
        --output "captured/.$name" --max-length 2048
      mv "captured/.$name" "captured/$name" # it is whole
    fi
    captured+=${captured:+,}captured/$name
    local method job jobs=() failed=""
    for method in p-eagle eagle3; do train $method "$captured" "$until" & jobs+=($!); done
    for job in "${jobs[@]}"; do wait "$job" || failed=1; done
    [ -z "$failed" ] || fail "stopped before $until tokens"
  done
}

make_data() {
  if data_is_right >/dev/null 2>&1; then return; fi
  tree/heads/data.sh data/train_prompts.jsonl.gz data \
    data/answers_smollm2.jsonl.gz data/more_answers_smollm2.jsonl.gz
  local name
  python tree/heads/ask.py data/train_prompts.jsonl.gz data \
    data/answers_smollm2.jsonl.gz data/more_answers_smollm2.jsonl.gz data/ask
  for name in answers_smollm2 more_answers_smollm2 greedy sampled synth; do
    first_tenth "data/$name".jsonl*
  done >data/mixed.jsonl
  python tree/heads/measured.py data/prompts/held_out.jsonl data/held_out.jsonl data/measured.jsonl
  data_is_right ||
    fail "$folder/data: not the files of heads/run.sha256: delete what differs to make it again"
}

data_is_right() { (cd data && sha256sum --check --quiet ../tree/heads/run.sha256); }

first_tenth() { # file: its lines
  local lines; lines=$(zcat -f "$1" | wc -l)
  zcat -f "$1" | sed -n "1,$((lines / 10))p"
}

captured_parts() { # in the order of PARTS, as `work` has them
  local part found=""
  for part in "${PARTS[@]%:*}"; do
    if [ -d "$folder/captured/$part" ]; then found+=${found:+,}captured/$part; fi
  done
  echo "$found"
}

train() { # method, captured folders, tokens to have seen; fails where it stops before
  local most=(--max-train-tokens $((GOAL - $(begun "$1"))))
  # The last part's steps are counted, by the mean tokens of a step: the run ends a little before or
  # after GOAL, when its learning rate has fallen.
  if [ "$3" = $GOAL ]; then peagle_train "$folder/$1" "$1" "$2" "${most[@]}"; fi
  [ "$(seen "$1")" -lt "$3" ] || return 0
  peagle_train "$folder/$1" "$1" "$2" "${most[@]}" &
  local trainer=$!
  while kill -0 $trainer 2>/dev/null && [ "$(seen "$1")" -lt "$3" ]; do sleep 2; done
  kill -TERM $trainer 2>/dev/null || true
  wait $trainer || true
  [ "$(seen "$1")" -ge "$3" ]
}

peagle_train() { # output, method, captured folders, further settings; takes the place of the shell
  local start=(--resume auto --init-from "$(start_of "$2")" --warmup 0.0025)
  local each data=()
  for each in ${3//,/ }; do data+=(--data "$each"); done
  # shellcheck disable=SC2086 (several words)
  OMP_NUM_THREADS=1 exec peagle train smollm2-135m --method "$2" --output "$1" "${data[@]}" \
    --held-out data/measured.jsonl "${SETTINGS[@]}" ${METHOD[$2]} "${start[@]}" "${@:4}"
}

# ---- commands

find_peagle() {
  command -v peagle >/dev/null || PATH=$here/../.venv/bin:$PATH
  command -v peagle >/dev/null || fail "no peagle in PATH: run make demo first"
}

start() {
  if alive; then fail "$folder: runs already (process group $(group))"; fi
  find_peagle
  if [ $# != 0 ] || [ ! -d "$folder/tree" ]; then link_data "$@"; fi
  if [ ! -d "$folder/tree" ]; then
    rm -rf "$folder/tree.new" # of a start that was stopped
    mkdir "$folder/tree.new"
    tar -C "$here/.." -c peagle heads | tar -C "$folder/tree.new" -x
    mv "$folder/tree.new" "$folder/tree"
  fi
  in_background "$folder/tree/heads/run.sh" work "$folder"
  echo "started: heads/run.sh status $folder"
}

link_data() { # prompts, answers, more answers: by the names that `make_data` reads
  [ $# = 3 ] || usage
  local file name link
  for file in "$@"; do [ -f "$file" ] || fail "$file: no such file"; done
  mkdir -p "$folder/data"
  for name in train_prompts answers_smollm2 more_answers_smollm2; do
    link=$folder/data/$name.jsonl.gz
    [ "$1" -ef "$link" ] || ln -sf "$(realpath "$1")" "$link"
    shift
  done
}

status() {
  local state=stopped method
  if alive; then state=running; fi
  if paused; then state=paused; fi
  echo "$folder: $state; captured: $(ls "$folder/captured" 2>/dev/null | xargs)"
  for method in p-eagle eagle3; do
    echo "$method: $(seen $method) answer tokens, $((GOAL - $(seen $method))) left;" \
      "acceptance length $(last "$folder/$method/metrics.jsonl" acceptance_length)"
  done
}

branch() { # name, tokens
  [ $# = 2 ] || usage
  if alive && ! paused; then fail "$folder: runs: pause or stop it first"; fi
  local out=$folder/branches/$1 method captured job
  [ ! -d "$out" ] || fail "$out: is there already: name another branch"
  captured=$(captured_parts)
  find_peagle
  export PYTHONPATH=$folder/tree
  cd "$folder"
  for method in p-eagle eagle3; do
    mkdir -p "$out/$method"
    cp -r "$method/checkpoints" "$method/metrics.jsonl" "$out/$method/"
    local total=$(($(last "$method/metrics.jsonl" answer_tokens) + $2))
    local share; share=$(awk "BEGIN { print $2 / $total }")
    peagle_train "$out/$method" "$method" "$captured" \
      --max-train-tokens "$total" --cooldown "$share" &
  done
  for job in $(jobs -p); do wait "$job" || fail "$out: a training failed"; done
}

[ $# -ge 2 ] || usage
here=$(cd "$(dirname "$0")" && pwd)
command=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
shift 2
case $command in
  start) start "$@" ;;
  work) work ;;
  status) status ;;
  pause) tell STOP ;;
  go) tell CONT ;;
  stop) tell CONT; tell TERM ;;
  branch) branch "$@" ;;
  *) usage ;;
esac
