"""The Triton kernels: numbers under the interpreter here, on the device where there is one.

Triton decides at its import whether to interpret, and torch may have imported it by now: without a device, this file is
run again by a process of its own, with `TRITON_INTERPRET=1` from the start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.gpu import triton_reason, varlen_reason
from paged_kv.attention.gpu.varlen import VarlenBackend
from paged_kv.store import LayerView
from tests.attention.oracle import Shape, attend_exactly, problem

pytest.importorskip("triton")

from paged_kv.attention.gpu.triton_backend import TritonBackend, launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="run by test_all_of_this_holds_under_the_interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(query: Tensor, view: LayerView, device: str = DEVICE) -> tuple[Tensor, LayerView]:
    moved = {f.name: getattr(view, f.name) for f in fields(view)}
    return query.to(device), LayerView(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, Tensor, LayerView, AttentionOptions, int]:
    shape = Shape(
        lanes=draw(st.sampled_from([1, 2])),
        heads_per_lane=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3, 4])),
        key_width=draw(st.sampled_from([16, 24, 64])),
        value_width=draw(st.sampled_from([16, 40])),
        page_size=draw(st.sampled_from([4, 16, 24])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )
    queries = draw(st.lists(st.sampled_from([0, 1, 1, 5, 37]), min_size=1, max_size=3))
    extra = [[draw(st.integers(0, 3 * shape.page_size)) for _ in queries] for _ in range(shape.lanes)]
    lives = [[n + more for n, more in zip(queries, lane, strict=True)] for lane in extra]
    seed = draw(st.integers(0, 2**31))
    query, view = problem(shape, lives, queries, seed=seed, starts=draw(st.booleans()))
    sinks = torch.randn(shape.q_heads) if draw(st.booleans()) else None
    options = AttentionOptions(
        scale=shape.key_width**-0.5,
        softcap=draw(st.sampled_from([None, 5.0])),
        sinks=sinks,
        causal=draw(st.sampled_from([True, True, False])),
    )
    return shape, query, view, options, draw(st.sampled_from([1, 1, 3]))


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests themselves run")
def test_all_of_this_holds_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@runs_kernels
@settings(max_examples=25)
@given(problems())
def test_output_matches_float64(case: tuple[Shape, Tensor, LayerView, AttentionOptions, int]) -> None:
    shape, query, view, options, parts = case
    exact = attend_exactly(query, view, options)
    device_options = replace(options, sinks=None if options.sinks is None else options.sinks.to(DEVICE))
    out = launch(*on_device(query, view), device_options, parts=parts)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[shape.dtype]
    torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=tolerance)


@runs_kernels
def test_the_backend_says_what_it_cannot_do() -> None:
    query, view = on_device(*problem(Shape(), [40]))
    options = AttentionOptions(scale=0.1)
    backend = TritonBackend()
    assert backend.unsupported(query, view, options) is None
    assert "float64" in str(backend.unsupported(query.double(), view, options))
    assert "wider" in str(backend.unsupported(query.new_zeros(1, 6, 512), view, options))
    assert triton_reason(torch.device("cpu")) == "it runs on CUDA and ROCm devices, not on cpu"


def test_varlen_says_what_it_cannot_do() -> None:
    query, view = problem(Shape(dtype=torch.bfloat16), [40])
    reason = VarlenBackend().unsupported(query, view, AttentionOptions(scale=0.1))
    assert reason == varlen_reason(query.device) == "it runs on CUDA devices, not on cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_varlen_matches_float64_on_a_device(causal: bool) -> None:
    shape = Shape(dtype=torch.bfloat16, page_size=256)
    query, view = problem(shape, [300, 40, 1000], [1, 40, 3])
    options = AttentionOptions(scale=0.125, causal=causal)
    moved = on_device(query, replace(view, keys=view.keys.nan_to_num(0), values=view.values.nan_to_num(0)), "cuda")
    assert VarlenBackend().unsupported(*moved, options) is None
    out = VarlenBackend().attend(*moved, options)
    torch.testing.assert_close(out.cpu().double(), attend_exactly(query, view, options), rtol=0, atol=4e-2)


@pytest.mark.gpu
def test_long_rows_are_split_and_joined_on_a_device() -> None:
    query, view = problem(Shape(dtype=torch.float16), [9000, 20], [1, 1])
    options = AttentionOptions(scale=0.125)
    out = TritonBackend().attend(*on_device(query, view, "cuda"), options)
    torch.testing.assert_close(out.cpu().double(), attend_exactly(query, view, options), rtol=0, atol=5e-3)
