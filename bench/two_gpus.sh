#!/usr/bin/env bash
# On a machine of two GPUs: every case of every form between real processes, and the comparison with DeepEP; tables last.
# Arguments: a folder for results, a folder of wheels to install first (DeepEP's; - for none), then parts: conformance,
# dispatch, tune, fp8. Multicast stays off. Each part has a time limit; the exit status is that of the conformance.
set -uo pipefail
out=$1 wheels=$2; shift 2
parts=${*:-conformance dispatch}
site=$(mktemp -d)
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
if [ "$wheels" != - ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 2
fi
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv || exit 2
mkdir -p "$out"
status=0
conformance() {
  local kind=$1 seconds=$2
  echo "== $kind, its cases: $(date +%T)"
  timeout $((seconds + 30)) python3 -m tests.dispatch.gpu_ranks --ranks 2 --kind "$kind" --seconds "$seconds" \
    --json "$out/cases_$kind.json" > "$out/cases_$kind.log" 2>&1 || { status=1; touch "$out/failed_$kind"; }
}
bench() {
  local name=$1 limit=$2; shift 2
  echo "== $name: $(date +%T)"
  timeout "$limit" python3 -m bench.dispatch_gpu --ranks 2 --result "$name" "$@" > "$out/$name.log" 2>&1 \
    || tail -n 30 "$out/$name.log"
  cp "bench/results/$name.json" "$out/" 2> /dev/null
}
for part in $parts; do
  case $part in
    conformance) conformance nvlink 100; conformance all_to_all 60; [ "$wheels" = - ] || conformance deepep 100 ;;
    dispatch)
      if [ "$wheels" = - ]; then
        bench dispatch_two_gpus 130 --seconds 60 --kinds all_to_all,rawnvlink@24,nvlink@24,rawnvlink@48,nvlink@48
      else
        bench dispatch_two_gpus 180 --seconds 60
      fi ;;
    tune)
      tiles=
      for sms in 24 48; do
        for tile in 16384x16 16384x32 32768x16 32768x32 65536x16 65536x32; do tiles+="rawnvlink@$sms:$tile,"; done
      done
      bench dispatch_tiles 90 --starts 1 --seconds 80 --kinds "stepsrawnvlink@24,stepsrawnvlink@48,${tiles%,}" ;;
    fp8) bench dispatch_fp8 90 --starts 1 --seconds 80 --kinds nvlink-fp8@24,deepep-fp8@24,nvlink-fp8@48,deepep-fp8@48 ;;
    *) echo "no part is called $part"; exit 2 ;;
  esac
done
for log in "$out"/cases_*.log; do
  [ -f "$log" ] || continue
  kind=$(basename "$log" .log); kind=${kind#cases_}
  if [ -f "$out/failed_$kind" ]; then sed '/^case /,$d' "$log" | grep -vE '(\.\.\.|: passed, .*)$' | tail -n 60; fi
  echo "== $kind"
  if [ -f "$out/failed_$kind" ]; then sed -n '/^case /,$p' "$log"; else tail -n 1 "$log"; fi
done
for log in "$out"/dispatch_*.log; do
  [ -f "$log" ] && grep '^steps ' "$log"
  [ -f "$log" ] && sed -n '/^kind /,$p' "$log"
done
exit $status
