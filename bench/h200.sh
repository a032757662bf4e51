#!/usr/bin/env bash
# One visit to a machine with an H200: do the tests pass on its stack, does the run learn there, how fast are native engine and trainer?
# Arguments: a folder for results, and which parts (tests, run, rollout, attention, train, overhead, experts). Needs the dependencies on PYTHONPATH; torch is the machine's own.
set -uo pipefail
out=$1; shift
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for part in "$@"; do
  echo "== $part: $(date +%T)"
  case $part in
    tests)
      timeout 280 python3 -m pytest -q -n 12 --dist loadfile -m "not slow and not gpu" --maxfail=20 > "$out/tests.log" 2>&1; tail -n 15 "$out/tests.log"
      timeout 300 python3 -m pytest -q -m gpu > "$out/gpu.log" 2>&1; tail -n 5 "$out/gpu.log" ;;
    run)
      timeout 120 python3 -c "from contraflow.cli import main; main()" run recipes/tiny_cpu.toml --folder "$(mktemp -d)/run" --plain > "$out/run.log" 2>&1; tail -n 3 "$out/run.log"
      for compute in float32 bfloat16; do # the same run with both pools on the one GPU
        timeout 180 python3 -c "from contraflow.cli import main; main()" run recipes/tiny_cpu.toml --folder "$(mktemp -d)/run" --plain --set train.device=cuda --set engine.device=cuda --set train.compute=$compute --set engine.compute=$compute > "$out/run_cuda_$compute.log" 2>&1; tail -n 3 "$out/run_cuda_$compute.log"
      done ;;
    rollout)
      timeout 300 python3 -m bench.rollout_gpu olmoe-1b-7b --cases 256,1024 --split > "$out/rollout.log" 2>&1; grep -E "RESULT|Error|wrote" "$out/rollout.log"; tail -n 24 "$out/rollout.log"
      cp bench/results/rollout_gpu_*.json "$out/" ;;
    attention)
      timeout 150 python3 -m bench.attention_gpu --seconds 100 > "$out/attention.log" 2>&1; cat "$out/attention.log"
      cp bench/results/attention_gpu.json "$out/" ;;
    train)
      timeout 580 python3 -m bench.train_gpu > "$out/train.log" 2>&1; tail -c 7000 "$out/train.log"
      cp bench/results/train_gpu.json "$out/" ;;
    overhead)
      timeout 200 python3 -m bench.ep_overhead --starts 3 > "$out/overhead.log" 2>&1; tail -n 12 "$out/overhead.log"
      cp bench/results/ep_overhead_cuda.json "$out/" ;;
    experts)
      timeout 240 python3 -m bench.experts_gpu > "$out/experts.log" 2>&1; cat "$out/experts.log"
      cp bench/results/experts_gpu.json "$out/" ;;
  esac
done
