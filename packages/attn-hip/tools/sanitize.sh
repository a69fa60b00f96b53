#!/usr/bin/env bash
# Runs the tests of attn-hip on kernels built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   packages/attn-hip/tools/sanitize.sh [pytest arguments]
#
# By default two processes run what executes kernels: of the conformance kit each case once, its appends, replays and
# extreme logits, and the tests of every kernel, the planner and the launches; in four minutes, the build included. The
# instrumented build has its own cache key. Python itself is not instrumented, so the runtime is preloaded; leaks are
# not looked for: CPython and torch keep memory to the end.
set -euo pipefail
cd "$(dirname "$0")/../../.."

cxx=${ATTN_CXX:-g++}
export ATTN_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
python=${PYTHON:-.venv/bin/python}
tests=packages/attn-hip/tests
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# Workers of pytest-xdist have no terminal: reports go to files.
export ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:abort_on_error=0:log_path=$logs/report:${ASAN_OPTIONS:-}"
if [ $# = 0 ]; then
  kernels="matches_the_oracle or survives or depend or replays or appends or fits or attends or sampl"
  set -- "$tests/test_conformance.py" "$tests/test_kernels.py" "$tests/test_fa2.py" "$tests/test_planner.py" \
    "$tests/test_direct.py" -k "$kernels or test_kernels or test_fa2 or test_planner or test_direct" --numprocesses=2 --maxfail=3 --max-worker-restart=2
fi

timeout 300 "$python" -c 'from attn_hip import build, isa; print(build.ensure(isa.chosen()))'
status=0
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so):$("$cxx" -print-file-name=libubsan.so)" \
  timeout 900 "$python" -m pytest -q -p no:cacheprovider "$@" || status=$?
for report in "$logs"/report*; do
  [ -e "$report" ] && head -n 40 "$report"
done
exit "$status"
