"""The throughput workloads: the same for every engine, and shaped as their table says."""

from __future__ import annotations

import pytest

from bench.throughput import parse
from bench.workloads import workload

STREAM = [(7 * i) % 1009 for i in range(20_000)]


def test_each_workload_has_the_lengths_of_its_table():
    sizes = {name: workload(name, STREAM) for name in "ABCD"}
    assert {name: len(jobs) for name, jobs in sizes.items()} == {"A": 64, "B": 16, "C": 64, "D": 1}
    mixed = sizes["A"]
    assert all(16 <= len(job.prompt) <= 1024 and 8 <= job.num_output <= 256 for job in mixed)
    assert 80 < sorted(len(job.prompt) for job in mixed)[32] < 200
    assert {(len(job.prompt), job.num_output) for job in sizes["B"]} == {(2048, 128)}
    assert len({job.prompt[:512] for job in sizes["C"]}) == 1
    assert len({job.prompt for job in sizes["C"]}) > 1
    assert [(len(job.prompt), job.num_output) for job in sizes["D"]] == [(128, 128)]


def test_a_workload_repeats_itself_and_a_shift_changes_every_token_but_no_length():
    first, again, shifted = workload("A", STREAM), workload("A", STREAM), workload("A", STREAM, shift=5)
    assert first == again
    assert [len(job.prompt) for job in first] == [len(job.prompt) for job in shifted]
    assert all(
        a != b for one, other in zip(first, shifted, strict=True) for a, b in zip(one.prompt, other.prompt, strict=True)
    )


def test_a_limit_takes_the_first_jobs():
    assert workload("A", STREAM, limit=3) == workload("A", STREAM)[:3]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="workload must be one of A, B, C, D, got 'E'"):
        workload("E", STREAM)
    with pytest.raises(SystemExit):
        parse(["--peers", "nobody"])
    with pytest.raises(SystemExit):
        parse(["--limit", "0"])
    assert parse(["--peers", "transformers"]).peers == ["transformers", "paged-kv"]
