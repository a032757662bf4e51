#!/usr/bin/env bash
# The DeepEP adapter on a machine with one GPU or several: what is there, then every case of its suite, table last.
# Arguments: a folder for results, then folders of wheels to install first (DeepEP's, and what the machine lacks).
# Low latency needs NVSHMEM to start, which it may not do on one GPU without RDMA: reported, and not counted.
set -uo pipefail
out=$1; shift
site=$(mktemp -d)
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
for folder in "$@"; do
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$folder"/*.whl || exit 2
done
nvidia-smi --query-gpu=name,driver_version,compute_mode,memory.used,memory.total --format=csv || exit 2
timeout 300 python3 -m tests.dispatch.deepep_ranks --ranks 2 --seconds 240 --json "$out/deepep.json" > "$out/deepep.log" 2>&1
status=$?
echo "== low latency"
timeout 80 python3 -m tests.dispatch.deepep_ranks --ranks 2 --kind deepep_decode --seconds 50 \
  --json "$out/deepep_decode.json" > "$out/deepep_decode.log" 2>&1
tail -n 40 "$out/deepep_decode.log"
echo "== the adapter (exit status $status)"
if [ "$status" != 0 ]; then grep -vE '^\[[0-9]+\] .*(\.\.\.|passed)' "$out/deepep.log" | head -n 80; fi
sed -n '/^case /,$p' "$out/deepep.log"
exit $status
