"""Traces are read or refused with the line; synthetic lengths follow their quantiles; everything repeats by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.fragmentation.workloads import PROFILES, TraceError, fit_table, make_workload, read_trace

MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 1}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _file(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_an_azure_trace_is_read(tmp_path: Path):
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    workload = read_trace(_file(tmp_path, text))
    assert workload.prompt.tolist() == [374, 396]
    assert workload.output.tolist() == [44, 109]
    assert workload.arrival.tolist() == pytest.approx([0, 4.314579])
    assert workload.longest == 505


def test_a_mooncake_trace_is_read_and_sorted_by_arrival(tmp_path: Path):
    text = '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n\n'
    text += '{"timestamp": 1000, "input_length": 9, "output_length": 0, "hash_ids": []}\n'
    workload = read_trace(_file(tmp_path, text, "trace.jsonl"))
    assert workload.prompt.tolist() == [9, 7]
    assert workload.output.tolist() == [1, 2]  # a request generates at least one token
    assert workload.arrival.tolist() == [0.0, 2.0]


def test_a_limit_reads_the_first_requests(tmp_path: Path):
    text = AZURE + "".join(f"2023-11-16 18:15:{i:02d}.0,{100 + i},5\n" for i in range(20))
    assert read_trace(_file(tmp_path, text), limit=3).prompt.tolist() == [100, 101, 102]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("  \n\n", "the file is empty"),
        ("time,in,out\n1,2,3\n", "line 1: unknown columns time, in, out"),
        (AZURE, "a header but no request"),
        (AZURE + "2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:47,abc,4\n", "line 3: .*'abc'"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", "line 2"),
        (AZURE + "yesterday,374,44\n", "line 2: .*yesterday"),
        (AZURE + "2023-11-16 18:15:46.68,0,44\n", "line 2: lengths must be positive"),
        (MOONCAKE + '{"timestamp": 0}\n', "line 2: no field 'input_length'"),
        (MOONCAKE + "{oops\n", "line 2"),
        ('{"timestamp": 0, "input_length": null, "output_length": 1}\n', "line 1"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(TraceError, match=message):
        read_trace(_file(tmp_path, text))


def test_a_missing_trace_is_refused(tmp_path: Path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.csv")


@pytest.mark.parametrize("name", [*PROFILES, "staggered", "sawtooth"])
def test_a_workload_depends_on_its_seed_alone(name: str):
    first, again, other = (make_workload(name, 200, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.prompt, again.prompt)
    assert np.array_equal(first.output, again.output)
    assert not np.array_equal(first.output, other.output)
    assert first.prompt.min() >= 1
    assert first.output.min() >= 1
    assert (np.diff(first.arrival) >= 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_synthetic_lengths_fit_the_quantiles_they_are_drawn_from(seed: int):
    for row in fit_table(seed):
        assert float(row["KS"]) < 0.0136, row  # the 99.9 % bound for 20,000 draws


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_an_offered_load_fills_that_share_of_the_pool_on_average(load: float):
    workload = make_workload("chat", 4000, seed=0)
    steps = workload.arrival_steps(load, 131_072)
    held = ((workload.prompt + workload.output / 2) * workload.output).sum()
    assert held / (steps[-1] * 131_072) == pytest.approx(load, rel=0.01)
    assert steps[0] == 0
    assert (np.diff(steps) >= 0).all()


def test_a_backlog_is_all_there_at_the_start():
    assert make_workload("code", 10, seed=0).arrival_steps(None, 1000).tolist() == [0] * 10
