#!/usr/bin/env bash
# The tests of the C++ kernel against a build with AddressSanitizer and UndefinedBehaviorSanitizer: any read or write out
# of bounds, or undefined behaviour, stops with a report. Needs g++ and the development environment.
#   tools/sanitize_kernel.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

PY="${PY:-.venv/bin/python}"
CXX="${CXX:-g++}"
# The sanitizer must come first in the process; leaks are the interpreter's own business.
export LD_PRELOAD="$("$CXX" -print-file-name=libasan.so):$("$CXX" -print-file-name=libubsan.so)"
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=0:exitcode=97"
export UBSAN_OPTIONS="print_stacktrace=1"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 CXX

exec "$PY" - "$@" <<'PYTHON'
import sys
import os

import pytest

from paged_kv.attention.cpu import build

build.FLAGS = (
    *build.FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"
)
preload = os.environ.pop("LD_PRELOAD")  # not for the compiler
library = build.load()
print(f"sanitized kernel: {library}")
os.environ["LD_PRELOAD"] = preload
tests = ["tests/attention/test_cpu_kernel.py", "tests/test_optimize.py", "tests/engine/test_fused.py"]
tests += ["-k", "not sdpa and not pool"]
raise SystemExit(pytest.main([*tests, "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
PYTHON
