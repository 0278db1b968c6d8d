#!/usr/bin/env bash
# The tests of the C++ kernel against builds for other processors: vectors of 16 and of 64 bytes, and dot products of bf16
# pairs. The compiler makes them of this processor's own instructions, so that what AVX-512 runs is tested without it.
#   tools/kernel_widths.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

PY="${PY:-.venv/bin/python}"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"

for flags in "-DPAGED_KV_VECTOR_BYTES=16" "-DPAGED_KV_VECTOR_BYTES=64" \
             "-DPAGED_KV_VECTOR_BYTES=64 -DPAGED_KV_BF16_DOT=1" "-DPAGED_KV_BF16_DOT=1"; do
  echo "== $flags"
  PAGED_KV_CXXFLAGS="$flags" "$PY" -m pytest tests/attention/test_cpu_kernel.py tests/test_optimize.py \
    tests/engine/test_fused.py -q -p no:cacheprovider "$@"
done
