#!/usr/bin/env bash
# Runs the tests of attn-hip on kernels built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   packages/attn-hip/tools/sanitize.sh [pytest arguments; by default the conformance kit and the pool's tests]
#
# The instrumented build has its own cache key. Python itself is not instrumented, so the runtime is preloaded; leaks
# are not looked for: CPython and torch keep memory to the end.
set -euo pipefail
cd "$(dirname "$0")/../../.."

cxx=${ATTN_CXX:-g++}
export ATTN_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:abort_on_error=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
python=${PYTHON:-.venv/bin/python}
tests=packages/attn-hip/tests
[ $# -gt 0 ] || set -- "$tests/test_conformance.py" "$tests/test_fa2.py" "$tests/test_planner.py"

"$python" -c 'from attn_hip import build, isa; print(build.ensure(isa.chosen()))'
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so):$("$cxx" -print-file-name=libubsan.so)" \
  exec "$python" -m pytest -q -p no:cacheprovider "$@"
