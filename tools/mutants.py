"""Breaks the allocator on purpose, one fault at a time, and expects the tests to notice every one.

    python tools/mutants.py            all mutants
    python tools/mutants.py -k salt    those whose name contains "salt"
    python tools/mutants.py --machine  with the state machine alone

Each mutant is a copy of `allocator/` and `tests/allocator/` in a temporary folder with one piece of text replaced. The
unchanged copy must pass first. Exit status 0 if every mutant was caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` stands exactly once in `allocator/<file>` and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "no copy-on-write on append",
        "appending.py",
        "    copied = np.flatnonzero(_must_copy(core, tables.arena.data[written.places(tables)]))\n",
        "    copied = np.zeros(0, np.int64)\n",
    ),
    Mutant(
        "publish a cropped block",
        "sharing.py",
        "    if index is None or tables.diverged[slot]:\n",
        "    if index is None:\n",
    ),
    Mutant(
        "crop writes a shared page",
        "cropping.py",
        "    writable = ~core.pool.frozen(old_pages)\n",
        "    writable = core.pool.block_of[old_pages] == 0\n",
    ),
    Mutant(
        "crop writes a published page of one owner",
        "cropping.py",
        "    writable = ~core.pool.frozen(old_pages)\n",
        "    writable = core.pool.refs[old_pages] == 1\n",
    ),
    Mutant(
        "partly filled published tail overwritten after a prefix crop",
        "cropping.py",
        "    core.frozen_tail[slot] = True\n",
        "",
    ),
    Mutant(
        "partly filled published tail overwritten after a rollback",
        "dropping.py",
        "    core.frozen_tail[slots] = True\n",
        "",
    ),
    Mutant(
        "cached page also free",
        "pool.py",
        "        self._free.put(dead[~published])\n",
        "        self._free.put(dead)\n",
    ),
    Mutant(
        "leak on crop",
        "cropping.py",
        "freed=core.release(old_pages[~used]))\n",
        "freed=core.release(old_pages[~used][1:]))\n",
    ),
    Mutant(
        "double-free guard off", "pool.py", "        if not owned and int(before.min()) < 1:\n", "        if False:\n"
    ),
    Mutant("double-free guard off for a few pages", "pool.py", "            if left < 0:\n", "            if False:\n"),
    Mutant(
        "double free within one call not seen",
        "pool.py",
        "        if self._has_repeats(at, before):\n",
        "        if False:\n",
    ),
    Mutant(  # blocks go in the order in which they first came to rest, whatever was used since
        "LRU not refreshed",
        "prefix.py",
        "            self.lru.push(block, int(self.level[block]))\n\n    def publish",
        "            born = self.__dict__.setdefault('born', {})\n"
        "            born.setdefault(self.hash_of(block), len(born))\n"
        "            later = [b for b in self.lru if self.level[b] == self.level[block]\n"
        "                     and born.get(self.hash_of(b), 0) > born[self.hash_of(block)]]\n"
        "            self.lru.push(block, int(self.level[block]))\n"
        "            for each in later:\n"
        "                self.lru.remove(each)\n"
        "                self.lru.push(each, int(self.level[each]))\n\n    def publish",
    ),
    Mutant(
        "chains evicted from their start",
        "prefix.py",
        "np.argsort(-self.depth[blocks], kind=",
        "np.argsort(self.depth[blocks], kind=",
    ),
    Mutant("whole-prompt hit", "sharing.py", "    most = max(0, len(tokens) - 1)\n", "    most = len(tokens)\n"),
    Mutant(
        "other tokens than those committed before are not noticed",
        "sharing.py",
        "    if len(tokens) and state.digest() != chain[-DIGEST_BYTES:]:\n",
        "    if False:\n",
    ),
    Mutant(
        "a rollback keeps the hash state", "sharing.py", "        core.hash_states[slot] = None\n", "        pass\n"
    ),
    Mutant(
        "a fork goes on with its parent's hash state",
        "core.py",
        "state.copy() if state is not None else None\n",
        "state\n",
    ),
    Mutant("salt ignored", "hashing.py", "% page_size + scope).digest()", "% page_size).digest()"),
    Mutant(
        "generation ignored", "table.py", "        self.generation[slot] += 1\n", "        self.generation[slot] = 1\n"
    ),
    Mutant("fork shares without counting", "core.py", "        self.pool.retain(tables.pages_of(slot))\n", ""),
    Mutant("pin does not protect the tail", "lifecycle.py", "        core.frozen_tail[slot] = True\n", ""),
    Mutant(
        "slide drops a page that is partly visible",
        "dropping.py",
        "    gone = behind // size\n",
        "    gone = tables.pages_for(behind)\n",
    ),
    Mutant(
        "positions start anew after a crop",
        "table.py",
        "        end = int(self.seen[slot]) if self.grows[row] else live\n",
        "        end = live\n",
    ),
    Mutant(
        "reservations ignored",
        "appending.py",
        "    if core.total_reserved == 0:\n        return core.available\n",
        "    if True:\n        return core.available\n",
    ),
    Mutant(
        "a failed append uses up the reservation",
        "appending.py",
        "    wanted = demand(core, slots, counts)\n    available = _available_to(core, slots, wanted)\n"
        "    if wanted.needed >",
        "    wanted = demand(core, slots, counts)\n    available = _available_to(core, slots, wanted)\n"
        "    core.reserved[slots] = 0\n    core.total_reserved = int(core.reserved.sum())\n    if wanted.needed >",
    ),
    Mutant(
        "the last owner of a shared tail copies it too",
        "appending.py",
        "    frozen[len(pages) - 1 - last[kept]] = False\n",
        "",
    ),
    Mutant(
        "a duplicate block keeps its own pages too",
        "sharing.py",
        "    core.log_rewrite(slot)\n    core.release(own)\n",
        "    core.log_rewrite(slot)\n",
    ),
    Mutant(
        "a rewritten table is not in the deltas", "deltas.py", "        self._rewritten.add(slot)\n", "        pass\n"
    ),
    Mutant(
        "shrink forgets the pages of cached blocks",
        "relocation.py",
        "        core.prefix.pages = remap[core.prefix.pages]\n",
        "        pass\n",
    ),
    Mutant(
        "a snapshot is not verified",
        "snapshot.py",
        "    if sha256(body).digest() != data[len(_MAGIC) : start]:\n",
        "    if False:\n",
    ),
]


def prepare(folder: Path, mutant: Mutant | None) -> None:
    """Copies what the tests need, with the fault in it."""
    skip = shutil.ignore_patterns("__pycache__", ".hypothesis")
    shutil.copytree(ROOT / "allocator", folder / "allocator", ignore=skip)
    shutil.copytree(ROOT / "tests" / "allocator", folder / "tests" / "allocator", ignore=skip)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=skip)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    if mutant is not None:
        path = folder / "allocator" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"mutant {mutant.name!r}: its text stands {text.count(mutant.old)} times in {mutant.file}")
        path.write_text(text.replace(mutant.old, mutant.new))


def first_failure(mutant: Mutant | None, tests: list[str]) -> str | None:
    """The name of the first test that fails, or None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        prepare(folder, mutant)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "ALLOCATOR_PROFILE": "allocator-mutants", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (?:tests/allocator/)?(\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else f"exit status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def main() -> int:
    """Runs the mutants and prints one line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutants whose name contains TEXT")
    parser.add_argument("--machine", action="store_true", help="with the state machine alone")
    options = parser.parse_args()
    machine = "tests/allocator/test_machine.py"
    chosen = [mutant for mutant in MUTANTS if options.k in mutant.name]
    # Quick tests first: most faults show in the first second.
    suites = [machine] if options.machine else ["tests/allocator", "--deselect", machine], [machine]
    tests = [suites[0]] if options.machine else list(suites)
    for suite in tests:
        if (broken := first_failure(None, suite)) is not None:
            print(f"the unchanged allocator fails: {broken}")
            return 2

    def catch(mutant: Mutant) -> str | None:
        return next((found for suite in tests if (found := first_failure(mutant, suite)) is not None), None)

    missed = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutant, found in zip(chosen, pool.map(catch, chosen), strict=True):
            missed += found is None
            print(f"{'MISSED' if found is None else 'caught'}  {mutant.name:<62} {found or ''}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutants caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
