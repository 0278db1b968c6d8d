"""``python -m bench.allocator [--quick] [--json FILE]``: every cost of the allocator, beside others, in one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.allocator import floors, pools, steps
from bench.allocator.timing import Row

# Until a process has given back an array of this size (any that loaded weights has), the C library returns smaller ones
# to the system after every call, and each first write to a fresh one is a page fault: large crops then take half as
# long again.
_LARGE = 16 * 2**20

COLUMNS = f"{'operation':<34} {'case':<66} {'structure':<17} {'median':>9} {'mean':>9} {'p99':>9}  {'unit':<8} target"


def rows(quick: bool) -> Iterator[Row]:
    """All measurements, in the order of the table."""
    np.empty(_LARGE, np.int8)  # given back at once
    yield from pools.build(100_000 if quick else 1_048_576, quick)
    sizes = [10_000, 100_000] if quick else [10_000, 100_000, 1_000_000]
    yield from pools.take_and_release(sizes, [1, 16, 8192] if quick else [1, 16, 64, 1024, 8192], quick)
    yield from steps.decode(quick)
    yield from steps.prefill(quick)
    yield from steps.crop(quick)
    yield from steps.evict(quick)
    yield from steps.hashing(quick)
    yield from steps.long_context()
    yield from floors.floors()


def line(row: Row) -> str:
    """One row of the table."""
    target = f"<= {row.target:g}" if row.target is not None else ""
    figures = f"{row.figures.median:>9.3f} {row.figures.mean:>9.3f} {row.figures.p99:>9.3f}"
    return (f"{row.operation:<34} {row.case:<66} {row.subject:<17} {figures}  {row.unit:<8} {target}").rstrip()


def main() -> int:
    """Runs and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller pools: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    machine = f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}"
    print(f"{machine}. Processor time of one thread.")
    print("Targets are those of the project's reference machine: on another one compare the ratios within this run.")
    print(COLUMNS)
    done = []
    for row in rows(options.quick):
        print(line(row), flush=True)
        done.append(row)
    if options.json is not None:
        document = {"machine": machine, "rows": [dataclasses.asdict(row) for row in done]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
