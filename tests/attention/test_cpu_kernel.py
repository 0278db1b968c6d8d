"""The fused CPU kernel against float64, against SDPA's error, and against bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paged_kv.attention.base import AttentionOptions
from paged_kv.attention.cpu import build
from paged_kv.attention.cpu.backend import CpuBackend, write_pages
from paged_kv.attention.sdpa import SdpaBackend
from paged_kv.store import LayerView
from tests.attention.oracle import Shape, attend_exactly, problem

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

CPU = CpuBackend()
#: Bound on the error for inputs of unit variance: rounding of the output and of the logits.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def options_for(shape: Shape, **changes: object) -> AttentionOptions:
    return replace(AttentionOptions(scale=shape.key_width**-0.5), **changes)  # type: ignore[arg-type]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    key_width = draw(st.sampled_from([32, 64, 64, 128, 256, 33, 40, 80, 96]))
    return Shape(
        lanes=draw(st.sampled_from([1, 1, 2, 3])),
        heads_per_lane=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9])),
        key_width=key_width,
        value_width=draw(st.sampled_from([key_width, key_width, 16, 48, 20, 128])),
        page_size=draw(st.sampled_from([16, 16, 32, 64, 8, 7])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shape, Tensor, LayerView, AttentionOptions]:
    """Rows of no, one, few or many queries; lengths around page borders, one to three pages past the queries."""
    shape = draw(shapes())
    rows = draw(st.integers(1, 4))
    queries = [draw(st.sampled_from([0, 1, 1, 1, 2, 5, 40])) for _ in range(rows)]
    borders = st.sampled_from([-1, 0, 1, shape.page_size - 1])
    pages = st.integers(0, 3)

    def live(n: int) -> int:
        return max(n, n + draw(pages) * shape.page_size + draw(borders))

    lives = [[live(n) for n in queries] for _ in range(shape.lanes)]
    seed = draw(st.integers(0, 2**31))
    spread = draw(st.sampled_from([1.0, 1.0, 0.0, 30.0]))
    query, view = problem(shape, lives, queries, seed=seed, starts=draw(st.booleans()), spread=spread)
    sinks = torch.randn(shape.q_heads, generator=torch.Generator().manual_seed(seed)) if draw(st.booleans()) else None
    softcap = draw(st.sampled_from([None, None, 5.0, 50.0]))
    options = options_for(shape, softcap=softcap, sinks=sinks, causal=draw(st.sampled_from([True, True, False])))
    return shape, query, view, options


@settings(max_examples=80)
@given(problems())
def test_output_matches_float64_for_any_mix_of_rows_lanes_and_options(
    case: tuple[Shape, Tensor, LayerView, AttentionOptions],
) -> None:
    shape, query, view, options = case
    exact = attend_exactly(query, view, options)
    # Logits of large queries are rounded to a fraction of themselves, and the softmax passes that on.
    largest = max(1.0, query.float().abs().max().item() if query.numel() else 1.0)
    torch.testing.assert_close(
        CPU.attend(query, view, options).double(), exact, rtol=0, atol=TOLERANCE[shape.dtype] * largest
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 20.0], ids=["ordinary", "extreme logits"])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [70, 1, 33, 100]], ids=["decode", "mixed"])
def test_error_is_at_most_that_of_sdpa_in_the_same_dtype(dtype: torch.dtype, spread: float, queries: list[int]) -> None:
    ours, theirs = 0.0, 0.0
    for seed, group in enumerate([1, 3, 4, 8]):
        shape = Shape(group=group, dtype=dtype, key_width=[64, 128][seed % 2], value_width=64)
        query, view = problem(shape, [300, 117, 64, 600], queries, seed=seed, spread=spread)
        exact = attend_exactly(query, view, options_for(shape))
        ours += (CPU.attend(query, view, options_for(shape)).double() - exact).square().mean().item()
        theirs += (SdpaBackend().attend(query, view, options_for(shape)).double() - exact).square().mean().item()
    assert ours <= theirs * 1.01  # in bf16 both are the rounding of the output


def test_a_row_gives_the_same_bits_alone_and_in_company_and_for_any_number_of_threads() -> None:
    shape = Shape(group=3)
    query, view = problem(shape, [5000, 40, 700, 300], [1, 1, 1, 120])
    together = CPU.attend(query, view, options_for(shape))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(CPU.attend(query, view, options_for(shape)), together)
    finally:
        torch.set_num_threads(threads)
    for row in range(4):
        first, past = view.query_start[row : row + 2].tolist()
        alone = replace(
            view,
            block_table=view.block_table[:, row : row + 1].contiguous(),
            live_lens=view.live_lens[:, row : row + 1].contiguous(),
            query_start=torch.tensor([0, past - first], dtype=torch.int32),
        )
        assert torch.equal(CPU.attend(query[first:past], alone, options_for(shape)), together[first:past])


def test_no_rows_and_no_queries_give_an_empty_output() -> None:
    shape = Shape()
    query, view = problem(shape, [20, 5], [0, 0])
    assert CPU.attend(query, view, options_for(shape)).shape == (0, shape.q_heads, 64)
    none = replace(
        view,
        block_table=view.block_table[:, :0].contiguous(),
        live_lens=view.live_lens[:, :0].contiguous(),
        query_start=torch.zeros(1, dtype=torch.int32),
    )
    assert CPU.attend(query, none, options_for(shape)).shape == (0, shape.q_heads, 64)


def test_queries_may_have_any_token_and_head_strides() -> None:
    shape = Shape()
    query, view = problem(shape, [50, 60], [3, 1])
    expected = CPU.attend(query, view, options_for(shape))
    transposed = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(CPU.attend(transposed, view, options_for(shape)), expected)
    last = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(CPU.attend(last, view, options_for(shape)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_puts_each_lane_of_each_token_into_its_slot_and_touches_nothing_else(dtype: torch.dtype) -> None:
    lanes, heads, tokens = 3, 2, 300
    keys, values = torch.zeros(60, heads, 16, 64, dtype=dtype), torch.zeros(60, heads, 16, 32, dtype=dtype)
    packed = torch.randn(tokens, lanes * heads, 96).to(dtype)  # K and V as slices of one projection
    slots = (torch.randperm(59 * 16)[: lanes * tokens] + 16).view(lanes, tokens)
    write_pages(keys, values, packed[..., :64], packed[..., 64:], slots)
    flat = keys.transpose(1, 2).reshape(-1, heads, 64), values.transpose(1, 2).reshape(-1, heads, 32)
    for lane in range(lanes):
        mine = packed[:, lane * heads : (lane + 1) * heads]
        assert torch.equal(flat[0][slots[lane]], mine[..., :64])
        assert torch.equal(flat[1][slots[lane]], mine[..., 64:])
    assert int((keys != 0).any(-1).sum()) == lanes * tokens * heads


def change(view: LayerView, field: str, index: tuple[int, ...], value: int) -> LayerView:
    tensor = getattr(view, field).clone()
    tensor[index] = value
    return replace(view, **{field: tensor})


BAD = {
    "a page past the pool": (
        lambda q, v: (q, change(v, "block_table", (0, 1, 2), 99)),
        r"block_table\[0, 1, 2\] is 99",
    ),
    "a negative page": (lambda q, v: (q, change(v, "block_table", (0, 0, 0), -1)), r"block_table\[0, 0, 0\] is -1"),
    "a length past the table": (lambda q, v: (q, change(v, "live_lens", (0, 1), 65)), r"live_lens\[0, 1\] is 65"),
    "a negative length": (lambda q, v: (q, change(v, "live_lens", (0, 0), -2)), r"live_lens\[0, 0\] is -2"),
    "falling query starts": (lambda q, v: (q, change(v, "query_start", (1,), 9)), "must not fall, but has 9 then 3"),
    "too few queries": (lambda q, v: (q[:2], v), "ends with 3, but query has 2 tokens"),
    "another dtype": (lambda q, v: (q.double(), v), "query must be Float, but is Double"),
    "long tables": (lambda q, v: (q, replace(v, block_table=v.block_table.long())), "block_table must be Int"),
    "another width": (lambda q, v: (q[..., :32], v), "query heads are 32 wide, but keys are 64"),
    "heads that do not divide": (lambda q, v: (q[:, :5], v), "5 heads, which 2 KV heads"),
    "pages with gaps": (lambda q, v: (q, replace(v, keys=v.keys[:, :, ::2])), "keys must be contiguous"),
    "different pages": (lambda q, v: (q, replace(v, values=v.values[1:])), "the same pages, heads and page size"),
    "another device": (
        lambda q, v: (q, replace(v, block_table=v.block_table.to("meta"))),
        "on one device, but are on cpu, meta",
    ),
    "a kv_start too short": (
        lambda q, v: (q, replace(v, kv_start=torch.zeros(1, 2, dtype=torch.int32))),
        r"kv_start has shape \[1, 2\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_and_names_the_value(name: str) -> None:
    spoil, message = BAD[name]
    query, view = problem(Shape(), [20, 40], [1, 2])
    query, view = spoil(query, view)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=message):
        CPU.attend(query, view, AttentionOptions(scale=0.1))


def test_bad_slots_raise_before_anything_is_written() -> None:
    keys, values = torch.zeros(4, 1, 16, 64), torch.zeros(4, 1, 16, 64)
    new = torch.ones(2, 1, 64)
    with pytest.raises(ValueError, match=r"slots\[0, 1\] is 64, but the pages have 64 slots"):
        write_pages(keys, values, new, new, torch.tensor([[20, 64]]))
    with pytest.raises(ValueError, match=r"key must have shape \[2, 1, 64\]"):
        write_pages(keys, values, new[..., :32], new, torch.tensor([[20, 21]]))
    assert not keys.any()
    assert not values.any()


def test_bad_scale_and_softcap_raise() -> None:
    query, view = problem(Shape(), [20])
    with pytest.raises(ValueError, match="scale must be positive"):
        CPU.attend(query, view, AttentionOptions(scale=0.0))
    with pytest.raises(ValueError, match="softcap must not be negative"):
        CPU.attend(query, view, AttentionOptions(scale=1.0, softcap=-1.0))
    with pytest.raises(ValueError, match="sinks must be 6 numbers"):
        CPU.attend(query, view, AttentionOptions(scale=1.0, sinks=torch.zeros(3)))


def test_what_it_does_not_support_is_said() -> None:
    query, view = problem(Shape(), [20])
    options = AttentionOptions(scale=1.0)
    assert CPU.unsupported(query, view, options) is None
    assert "float64" in str(CPU.unsupported(query.double(), view, options))
    assert "gradients" in str(CPU.unsupported(query.requires_grad_(), view, options))
    assert "not on the CPU" in str(CPU.unsupported(query.to("meta"), view, options))


def test_fake_kernels_give_the_shapes_so_that_compile_sees_one_operation() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    query, view = problem(Shape(value_width=32), [20, 30])
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (query, view.keys, view.values)]
        tables = [mode.from_tensor(t) for t in (view.block_table, view.live_lens, view.query_start)]
        out = torch.ops.paged_kv.attend(*fake, *tables, None, None, 0.1, 0.0, True)
    assert (out.shape, out.dtype) == ((2, 6, 32), torch.float32)


def test_torch_has_one_pool_of_threads_after_loading() -> None:
    CPU.attend(*problem(Shape(), [20]), AttentionOptions(scale=1.0))
    with open("/proc/self/maps") as maps:
        pools = {line.split()[-1] for line in maps if "gomp" in line or "libomp" in line}
    assert len(pools) <= 1
