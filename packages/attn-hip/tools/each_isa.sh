#!/usr/bin/env bash
# Runs what depends on the instruction set once for each that this CPU has, but for the one it prefers, which the
# ordinary tests use: results, what is read and written, appends, and equal bits. Two minutes each on two cores, the
# build included.
#
#   packages/attn-hip/tools/each_isa.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../../.."

python=${PYTHON:-.venv/bin/python}
tests=packages/attn-hip/tests
if [ $# = 0 ]; then
  kernels="oracle or outputs or foreign or survives or depend or exact_bytes or sampl"
  set -- "$tests/test_conformance.py" "$tests/test_kernels.py" "$tests/test_fa2.py" \
    -k "$kernels or test_kernels or bits" --numprocesses=2 --maxfail=3
fi

names=$("$python" -c 'from attn_hip import isa; print(*(n for n in isa.supported() if n != isa.preferred()))')
for name in $names; do
  printf -- '-- %s (%ss)\n' "$name" "$SECONDS"
  export ATTN_CPU_ISA=$name
  timeout 300 "$python" -c 'from attn_hip.host import obtain, load
import os
assert load(obtain(os.environ["ATTN_CPU_ISA"])).isa() == os.environ["ATTN_CPU_ISA"]'
  timeout 600 "$python" -m pytest -q -p no:cacheprovider "$@"
done
