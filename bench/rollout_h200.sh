#!/usr/bin/env bash
# The native engine beside vLLM on the same work: one shape, one machine, one call. Rows last: ours, vLLM's, ratio.
# Arguments: a folder for results, a shape of bench/rollout_work.py, then "turns" (default: one after the other on one
# GPU) or "both" (at once, on the first two GPUs), then further options for bench.rollout_gpu.
# VLLM_ENV names a file to source that makes `import vllm` work; without it only ours runs.
set -uo pipefail
out=$1 shape=$2 how=${3:-turns}; shift $(($# < 3 ? $# : 3))
cases=${CASES:-256,1024,lognormal}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1; mkdir -p "$out"
theirs() {
  [ -n "${VLLM_ENV:-}" ] || return 0
  ( . "$VLLM_ENV"; export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    timeout 420 python3 -m bench.vllm_peer "$shape" --cases "$cases" --json "$out/vllm_$shape.json" ) > "$out/vllm_$shape.log" 2>&1
  echo "vllm rc $? $(grep -c RESULT "$out/vllm_$shape.log") rows"
}
ours() {
  PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" timeout 400 python3 -m bench.rollout_gpu "$shape" --cases "$cases" --split "$@" > "$out/ours_$shape.log" 2>&1
  local rc=$?; echo "ours rc $rc"
  [ $rc = 0 ] && cp "bench/results/rollout_gpu_$shape.json" "$out/" || tail -n 5 "$out/ours_$shape.log"
}
if [ "$how" = both ]; then
  CUDA_VISIBLE_DEVICES=1 theirs & peer=$!
  CUDA_VISIBLE_DEVICES=0 ours "$@"; wait $peer
else
  theirs
  ours "$@"
fi
grep -hE "Error|warm-up" "$out"/*_"$shape".log | tail -n 6
grep -B 16 -E "^SPLIT" "$out/ours_$shape.log"
[ -f "$out/rollout_gpu_$shape.json" ] && PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" python3 -m bench.rollout_table "$shape" "$out"
