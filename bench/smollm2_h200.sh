#!/usr/bin/env bash
# A real small model, sparse-upcycled to a Mixture of Experts, learns reasoning_gym tasks by GRPO on one GPU.
# Arguments: a folder for results; the GGUF file of SmolLM2-135M-Instruct; parts, by default both:
#   prepare  to a Hugging Face folder, 8 experts top-2 from each MLP, rows of answers, supervised warm-up
#   learn    GRPO from the warm model, then held-out accuracy of dense, warm and trained model; the table comes last
# RUN_S: seconds that GRPO may take (it then stops, and what it learned is evaluated). STEPS, TASKS, ROWS, EXPERTS:
# sizes. SFT, RL: further --set of the warm-up, and of the run and the table, such as RL="train.learning_rate=5e-6".
set -uo pipefail
out=$1 gguf=$2 at=runs/smollm2; shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3} rl=() sft=()
contraflow=("$python" -c "from contraflow.cli import main; main()")
for one in ${RL:-}; do rl+=(--set "$one"); done
for one in ${SFT:-}; do sft+=(--set "$one"); done
mkdir -p "$out" $at
step() { # name, limit in seconds, command
  local name=$1 limit=$2 from=$SECONDS; shift 2
  timeout --foreground --signal=INT --kill-after=90 "$limit" "$@" > "$out/$name.log" 2>&1; local rc=$?
  echo "$name: rc $rc, $((SECONDS - from)) s"; [ $rc = 0 ] || tail -n 4 "$out/$name.log"; return $rc
}
prepare() {
  rm -rf $at/dense $at/moe $at/warm
  step convert 120 "$python" -m bench.gguf "$gguf" $at/dense &&
  step upcycle 120 "${contraflow[@]}" upcycle $at/dense $at/moe --experts "${EXPERTS:-8}" --top-k 2 &&
  step rows 120 "$python" -m bench.smollm2 rows $at/rows.jsonl --model $at/dense --rows "${ROWS:-6656}" &&
  step warm "${WARM_S:-200}" "${contraflow[@]}" sft bench/smollm2/sft.toml $at/warm "${sft[@]}" &&
  grep -E "^update" "$out/warm.log" | sed -n '1p;$p'
}
learn() {
  rm -rf $at/run $at/trained
  step run "${RUN_S:-330}" "${contraflow[@]}" run bench/smollm2/rl.toml --folder $at/run --plain --set "run.steps=${STEPS:-120}" "${rl[@]}"
  step export 60 "${contraflow[@]}" export $at/run $at/trained || return
  "${contraflow[@]}" report $at/run > "$out/report.log" 2>&1; cp $at/run/{report.html,metrics.jsonl,recipe.toml} "$out/"
  step table 150 "$python" -m bench.smollm2 table "$out/table.json" --dense $at/dense --warm $at/warm --trained $at/trained --tasks "${TASKS:-512}" "${rl[@]}"
  tail -n 20 "$out/table.log"
}
[ $# -gt 0 ] || set -- prepare learn
for part in "$@"; do "$part" || exit 1; done
