#!/usr/bin/env bash
# What there is to know of a GPU: whether the tests that need one pass, and what the hardware gives.
#
#   OUT=folder benchmarks/gpu/run.sh [PART ...]
#
# Parts: tests limits steps offload serve profile; by default all. Each has a time limit, and one that fails
# stops no other. Figures and logs go to OUT. Needs Python with this package or what builds it (PYTHON=...),
# and a CUDA build of torch. TOKENIZER=FOLDER, a model's folder, is for `serve`: weights are dummies.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=$(realpath -m "${OUT:-benchmarks/results/gpu}")
export PYTHONUNBUFFERED=1 PYTHONPATH="benchmarks:benchmarks/gpu:${PYTHONPATH:-}"
mkdir -p "$OUT"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

run() {  # part, seconds, command ...
  local part=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $part"
  timeout "$limit" "$@" >"$OUT/$part.log" 2>&1
  local status=$?
  tail -n "${TAIL:-4}" "$OUT/$part.log" | cut -c 1-700
  echo "== $part: exit status $status after $((SECONDS - began)) s"
}

figure() {  # part, name: of the last line of the part's log
  tail -n 1 "$OUT/$1.log" | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$2"
}

tests() {
  local options=(-m gpu -n "${WORKERS:-8}" -p no:cacheprovider --timeout 120)
  TAIL=40 run tests 240 "$PYTHON" -m pytest "${options[@]}" tests/kernels tests/execution tests/engine/test_cuda.py
  TAIL=10 run tests-llm 60 "$PYTHON" -m pytest "${options[@]}" -n 0 tests/llm/test_offload.py
}

limits() { TAIL=14 run limits 60 "$PYTHON" benchmarks/gpu/limits.py; }

steps() {
  "$PYTHON" benchmarks/gpu/shapes.py "$folder/8b"
  [ -e "$OUT/limits.log" ] || limits
  local read matmul
  read=$(figure limits read_gb_s) matmul=$(figure limits matmul_8192_tflop_s)
  TAIL=2 run "${1:-steps}" "${3:-180}" "$PYTHON" benchmarks/gpu/steps.py "$folder/8b" --read-gb-s "$read" \
    --matmul-tflop-s "$matmul" --offload-interval "${2:-none}"
}

offload() {
  for interval in ${INTERVALS:-8 4 2}; do steps "offload-$interval" "$interval" 90; done
}

serve() {
  "$PYTHON" benchmarks/gpu/shapes.py "$folder/served" ${TOKENIZER:+--tokenizer "$TOKENIZER"}
  TAIL=30 run serve 400 "$PYTHON" -m backfill bench coserve --policies "${POLICIES:-online-only,slo,priority,conserve,bros}" \
    --model "$folder/served" --server-option "--load-format dummy --device cuda --host-kv-gib 4 --max-model-len 8192" \
    --duration "${DURATION:-16}" --warmup 4 --rate "${RATE:-8}" --input-len 512:1536 --output-len 128 \
    --ttft-slo 0.5 --tpot-slo 0.05 --offline-input-len 512:1024 --offline-output-len 64:256 \
    --no-progress --log-dir "$OUT" --result "$OUT/coserve.json" --json
}

profile() {
  "$PYTHON" benchmarks/gpu/shapes.py "$folder/8b"
  run profile 150 "$PYTHON" -m backfill profile "$folder/8b" --load-format dummy --device cuda \
    --max-model-len 16384 --out "$OUT/profile.json"
}

if ! "$PYTHON" -c 'import backfill._kernels' 2>/dev/null; then
  export SETUPTOOLS_SCM_PRETEND_VERSION=${SETUPTOOLS_SCM_PRETEND_VERSION:-0.2.0}
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-16}
  run build 200 "$PYTHON" -m pip install --no-deps --no-build-isolation --no-cache-dir --target "$folder/site" .
  export PYTHONPATH="$folder/site:$PYTHONPATH"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee "$OUT/device.txt"
for part in ${*:-tests limits steps offload serve profile}; do "$part"; done
