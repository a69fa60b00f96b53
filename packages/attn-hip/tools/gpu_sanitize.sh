#!/usr/bin/env bash
# One case of every kernel of this machine's NVIDIA GPU under compute-sanitizer: out-of-bounds accesses, races in shared
# memory. Extra arguments go to the sanitizer.
set -euo pipefail
tool=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
python=${PYTHON:-python3}
"$python" -m attn_core.cli selftest --device cuda # builds what is missing, and the answers must be right
for check in memcheck racecheck; do
  echo "== $check"
  "$tool" --tool "$check" --error-exitcode 9 --kernel-regex kns=attend_ "$@" \
    "$python" -m attn_core.cli selftest --device cuda
done
