#!/usr/bin/env bash
# The DeepEP adapter on a machine with one GPU or several: what is there, every case of its suite, and on several GPUs the
# comparison of bench.dispatch_gpu; tables last. Arguments: a folder for results, then folders of wheels to install first
# (DeepEP's, and what the machine lacks). Low latency needs NVSHMEM to start, which it may not do on one GPU or without
# RDMA: reported, and not counted.
set -uo pipefail
out=$1; shift
site=$(mktemp -d)
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
for folder in "$@"; do
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"/*.whl || exit 2
done
nvidia-smi --query-gpu=name,driver_version,compute_mode,memory.used,memory.total --format=csv || exit 2
timeout 300 python3 -m tests.dispatch.gpu_ranks --ranks 2 --seconds 240 --json "$out/deepep.json" > "$out/deepep.log" 2>&1
status=$?
echo "== low latency: $(date +%T)"
timeout 70 python3 -m tests.dispatch.gpu_ranks --ranks 2 --kind deepep_decode --seconds 40 \
  --json "$out/deepep_decode.json" > "$out/deepep_decode.log" 2>&1
tail -n 30 "$out/deepep_decode.log"
if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
  echo "== comparison: $(date +%T)"
  timeout 210 python3 -m bench.dispatch_gpu --ranks 2 > "$out/dispatch_gpu.log" 2>&1 || tail -n 40 "$out/dispatch_gpu.log"
  sed -n '/^kind /,$p' "$out/dispatch_gpu.log"
  cp bench/results/dispatch_gpu.json "$out/"
fi
echo "== the adapter (exit status $status): $(date +%T)"
sed -n '1,/^}/p' "$out/deepep.log" | head -n 40
if [ "$status" != 0 ]; then sed '/^case /,$d' "$out/deepep.log" | grep -vE '(\.\.\.|: passed, .*)$' | tail -n 80; fi
sed -n '/^case /,$p' "$out/deepep.log"
exit $status
