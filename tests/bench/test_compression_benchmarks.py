"""The benchmarks of compression, scaled down to the small random model: what they count is what was done."""

from __future__ import annotations

import pytest

from bench.compression import pressure, throughput
from bench.compression.__main__ import parse
from bench.compression.presses import model


def test_a_compressed_run_makes_the_same_number_of_tokens_with_more_rows_at_once() -> None:
    net, load = model(), throughput.Load(requests=12, prompt_len=64, new_len=32, held=2, every=16)
    jobs = throughput.jobs_of(net, None, load)
    known = throughput.methods(net, load)
    plain, cropped = (throughput.measure(net, jobs, load, *known[name]) for name in ("uncompressed", "SnapKV"))
    assert plain.tokens == cropped.tokens == 12 * 32
    assert plain.rows < 2.5, "the pool is for two whole ones"
    assert cropped.rows > plain.rows + 1
    assert plain.crop_seconds == 0 < cropped.crop_seconds < cropped.seconds
    assert plain.decode_tokens <= plain.tokens
    assert [len(output) for output in cropped.outputs] == [32] * 12


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="no method 'magic'; there are uncompressed"):
        throughput.run(model(), None, throughput.Load(requests=1, prompt_len=64), ["magic"])


def test_the_pressure_report_says_that_nothing_was_preempted(capsys: pytest.CaptureFixture[str]) -> None:
    pressure.run(model(), None, throughput.Load(requests=6, prompt_len=48, new_len=48, held=2, share=0.7))
    lines = capsys.readouterr().out.splitlines()
    preempted = {line.split("|")[1].strip(): int(line.split("|")[4]) for line in lines[3:]}
    assert preempted.pop("uncompressed") > 0
    assert preempted == {"StreamingLLM": 0, "KeyNorm": 0, "SnapKV": 0}


def test_the_load_is_the_one_of_the_command_line() -> None:
    options = parse(["--throughput", "--requests", "3", "--new-len", "9"])
    assert (options.requests, options.prompt_len, options.new_len, options.held) == (3, 1024, 9, 8)
