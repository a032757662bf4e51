#!/usr/bin/env bash
# The served engine against a real vLLM on a GPU: the contract of engines, then a server that lives through refreshes and
# its own death; a table last. Arguments: a folder for results, and which parts (contract, life). Needs vLLM on PYTHONPATH.
set -uo pipefail
out=$1; shift
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CONTRAFLOW_VLLM_PYTHON=${CONTRAFLOW_VLLM_PYTHON:-$(command -v python3)}
declare -A tests=([contract]=tests/contracts/test_engine.py [life]=tests/rollout/test_vllm.py)
"$CONTRAFLOW_VLLM_PYTHON" -c "
import torch, vllm
print('vLLM', vllm.__version__, 'torch', torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU')"
for part in "$@"; do
  timeout 280 python3 -m pytest -q -m vllm -rA --durations=3 "${tests[$part]}" > "$out/vllm_$part.log" 2>&1
  echo "exit status $?" >> "$out/vllm_$part.log"
done
for part in "$@"; do
  grep -E "^E  |Error" "$out/vllm_$part.log" | sort | uniq -c | sort -rn | head -n 25
done
for part in "$@"; do
  echo "== $part"
  grep -E "^(PASSED|FAILED|ERROR|SKIPPED)|^[0-9.]+s |passed|failed|^exit status" "$out/vllm_$part.log" | cut -c1-170
done
