"""Packed linear layers: the same numbers, one copy of a weight, and everything put back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paged_kv.attention.cpu import build
from paged_kv.optimize import Method, PackedLinear, best_method, optimize_for_cpu


def methods() -> list[Method]:
    found: list[Method] = []
    if build.why_not() is None:
        found.append("kernel")
    if torch.backends.mkldnn.is_available():
        found.append("onednn")
    return found


class Tied(nn.Module):
    """An embedding, layers of awkward sizes with and without bias, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 96)
        self.up = nn.Linear(96, 257)
        self.down = nn.Linear(257, 96, bias=False)
        self.small = nn.Linear(96, 3)
        self.head = nn.Linear(96, 131, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x) + self.small(x).sum()


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 7), (2, 250), (0,)], ids=str)
@torch.no_grad()
def test_output_equals_the_model_s_to_rounding(method: Method, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(131, shape)
    before = model(ids)
    handle = optimize_for_cpu(model, method=method)
    assert (handle.num_packed, handle.method) == (3, method)
    torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_rounded_once_from_fp32(dtype: torch.dtype) -> None:
    if best_method(dtype) is None:
        pytest.skip("nothing packs this dtype here")
    torch.manual_seed(0)
    layer = nn.Linear(300, 200).to(dtype)
    x = torch.randn(9, 300).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    optimize_for_cpu(layer)
    assert isinstance(layer, PackedLinear)
    error = (layer(x).double() - exact).abs()
    assert (error <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-5).all()


@pytest.mark.parametrize("method", methods())
def test_undo_restores_the_same_parameters_and_the_same_bits(method: Method) -> None:
    model = Tied()
    parameters = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    classes = {name: type(module) for name, module in model.named_modules()}
    handle = optimize_for_cpu(model, method=method)
    assert list(model.state_dict()) == list(state)
    handle.undo()
    handle.undo()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert model.head.weight is model.embed.weight
    model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("method", methods())
def test_a_weight_is_held_once_unless_it_is_tied(method: Method) -> None:
    model = Tied()
    up, embed = model.up.weight, model.embed.weight
    handle = optimize_for_cpu(model, method=method)
    assert up.numel() == 0
    assert embed.numel() == 131 * 96
    handle.undo()
    assert up.numel() == 257 * 96


@pytest.mark.parametrize("method", methods())
def test_the_weight_can_still_be_read_and_saved(method: Method) -> None:
    model = Tied()
    state = copy.deepcopy(model.state_dict())
    optimize_for_cpu(model, method=method)
    assert torch.equal(model.up.weight, state["up.weight"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", methods())
def test_inputs_that_need_gradients_get_them(method: Method) -> None:
    layer = nn.Linear(96, 64)
    x = torch.randn(4, 96, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    optimize_for_cpu(layer, method=method)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("method", methods())
@torch.no_grad()
def test_hooks_on_a_packed_layer_still_run(method: Method) -> None:
    layer = nn.Linear(96, 64)
    seen: list[torch.Size] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    optimize_for_cpu(layer, method=method)
    layer(torch.randn(2, 96))
    assert seen == [torch.Size([2, 64])]


@pytest.mark.parametrize("method", methods())
@torch.no_grad()
def test_gpt2_s_transposed_layers_are_packed_too(method: Method) -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(130, 70)
    state = copy.deepcopy(layer.state_dict())
    x = torch.randn(3, 2, 70)
    expected = layer(x)
    handle = optimize_for_cpu(layer, method=method)
    assert handle.num_packed == 1
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.weight, state["weight"])
    handle.undo()
    assert type(layer) is Conv1D
    assert torch.equal(layer.weight, state["weight"])
    assert layer.weight.is_contiguous()


class RMSNorm(nn.Module):
    """As in Llama, or with Gemma's weight of 1 + w."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = 1e-5
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.offset) * wide.to(x.dtype)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 75, 576])
@torch.no_grad()
def test_a_norm_is_fused_and_gives_the_same(dtype: torch.dtype, width: int) -> None:
    norm = RMSNorm(width).to(dtype)
    x = torch.randn(3, 50, width).to(dtype)
    expected = norm(x)
    handle = optimize_for_cpu(norm)
    assert (handle.num_fused, handle.num_packed) == (1, 0)
    torch.testing.assert_close(norm(x), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(norm(x.transpose(0, 1)), expected.transpose(0, 1), rtol=0.02, atol=0)
    handle.undo()
    assert type(norm) is RMSNorm
    assert torch.equal(norm(x), expected)


def test_a_norm_that_computes_something_else_stays() -> None:
    norm = RMSNorm(64, offset=1.0)
    assert optimize_for_cpu(norm).num_fused == 0
    assert type(norm) is RMSNorm


class GatedBlock(nn.Module):
    """As in Llama; `activation` and `bias` are what models vary."""

    def __init__(self, activation: nn.Module | None = None, *, bias: bool = False, sizes: tuple[int, int] = (96, 203)):
        super().__init__()
        width, inner = sizes
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = activation or nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def step_by_step(block: GatedBlock, x: torch.Tensor) -> torch.Tensor:
    """What `block` gives, each layer in float64 and rounded to the dtype of the block, as its parts round."""
    dtype = x.dtype

    def product(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
        out = rows.double() @ layer.weight.double().T
        return (out if layer.bias is None else out + layer.bias.double()).to(dtype)

    gate = nn.functional.silu(product(block.gate_proj, x).double()).to(dtype)
    between = (gate.double() * product(block.up_proj, x).double()).to(dtype)
    return between.double() @ block.down_proj.weight.double().T + (
        0 if block.down_proj.bias is None else block.down_proj.bias.double()
    )


needs_kernel = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 3, 17, 200])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_gated_block_is_fused_and_rounds_as_its_parts_do(dtype: torch.dtype, rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    block = GatedBlock(bias=bias).to(dtype).eval()
    x = torch.randn(2, rows, 96).to(dtype) * 4
    plain, exact = block(x), step_by_step(block, x)
    handle = optimize_for_cpu(block, method="kernel")
    assert (handle.num_packed, handle.num_fused) == (3, 1)
    fused = block(x)
    assert fused.shape == plain.shape and fused.dtype == dtype
    if rows:
        ours, theirs = ((out.double() - exact).abs() for out in (fused, plain))
        # In fp32 both are the rounding of sums, in another order each.
        assert ours.mean() <= theirs.mean() * (2 if dtype == torch.float32 else 1.1)
        assert ours.max() <= theirs.max() * 2
    handle.undo()
    assert type(block) is GatedBlock
    assert torch.equal(block(x), plain)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_a_fused_block_gives_the_bits_of_its_packed_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = GatedBlock(sizes=(160, 320)).to(dtype).eval()
    x = torch.randn(50, 160).to(dtype) * 5
    optimize_for_cpu(block, method="kernel")
    fused, plain = block(x), GatedBlock.forward(block, x)  # type: ignore[arg-type]
    assert (fused == plain).float().mean() > 0.999  # exp of another library, rounded the other way once in a while
    torch.testing.assert_close(fused, plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@needs_kernel
@torch.no_grad()
def test_the_fused_activation_takes_any_number() -> None:
    block = GatedBlock(sizes=(64, 64)).eval()
    for part in (block.gate_proj, block.up_proj, block.down_proj):
        nn.init.eye_(part.weight)
    block.up_proj.weight.zero_()[:, 63] = 1  # up is the last entry
    optimize_for_cpu(block, method="kernel")
    x = torch.cat([torch.linspace(-120, 120, 61), torch.tensor([torch.nan])])
    expected = nn.functional.silu(x[:61])
    out = torch.stack([block(torch.cat([value.view(1), torch.zeros(62), torch.ones(1)])) for value in x])
    # Reducing the exponent in one step costs accuracy in proportion to it; what it is off by is as small as the result.
    assert ((out[:61, 0] - expected).abs() <= expected.abs() * (1e-6 + 2e-7 * x[:61].abs()) + 1e-30).all()
    assert out[61, 0].isnan()


class Scaled(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.9


class Swapped(GatedBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gelu", "gelu tanh", "relu", "scaled", "swapped"])
def test_a_block_that_computes_something_else_stays(dtype: torch.dtype, kind: str) -> None:
    activations = {"gelu": nn.GELU(), "gelu tanh": nn.GELU("tanh"), "relu": nn.ReLU()}
    block = {"scaled": Scaled, "swapped": Swapped}.get(kind, GatedBlock)(activations.get(kind)).to(dtype).eval()
    assert optimize_for_cpu(block).num_fused == 0
    assert type(block).__name__ in ("GatedBlock", "Scaled", "Swapped")


@needs_kernel
def test_a_fused_block_calls_its_parts_where_somebody_could_tell() -> None:
    block = GatedBlock().eval()
    x = torch.randn(4, 96)
    with torch.no_grad():
        expected = block(x)
    optimize_for_cpu(block, method="kernel")
    needs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(block(needs).sum(), needs)
    assert gradient.abs().sum() > 0
    seen: list[str] = []
    with torch.no_grad():
        for name in ("gate_proj", "up_proj", "down_proj", "act_fn"):
            part = getattr(block, name)
            hook = part.register_forward_hook(lambda module, args, out, name=name: seen.append(name))
            torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-6)
            hook.remove()
            block(x)
        assert seen == ["gate_proj", "up_proj", "down_proj", "act_fn"]
        block.register_forward_hook(lambda module, args, out: seen.append("block"))
        block(x)
        assert seen[-1] == "block"
        block.up_proj = nn.Linear(96, 203)
        assert not torch.allclose(block(x), expected, atol=1e-2)


@needs_kernel
def test_a_fused_block_is_saved_and_undone_as_it_was() -> None:
    block = GatedBlock(bias=True).eval()
    state, parameters = copy.deepcopy(block.state_dict()), dict(block.named_parameters())
    handle = optimize_for_cpu(block, method="kernel")
    assert list(block.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    handle.undo()
    assert all(value is parameters[name] for name, value in block.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    assert set(block.__dict__) == set(GatedBlock().__dict__)


@needs_kernel
@pytest.mark.parametrize(("columns", "depth"), [(32, 64), (75, 33), (131, 257), (200, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_weight_is_unpacked_bit_by_bit(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    assert torch.equal(torch.ops.paged_kv.unpack_linear(torch.ops.paged_kv.pack_linear(weight), columns), weight)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    weight, x = torch.randn(130, 301).to(dtype), torch.randn(200, 301).to(dtype)
    packed = torch.ops.paged_kv.pack_linear(weight)
    together = torch.ops.paged_kv.linear(x, packed, None, 130)
    torch.testing.assert_close(together, x @ weight.T, rtol=0.02 if dtype != torch.float32 else 1e-4, atol=0.05)
    for rows in (1, 2, 3, 5, 7, 11, 12, 13, 199):
        assert torch.equal(torch.ops.paged_kv.linear(x[:rows], packed, None, 130), together[:rows])


def test_nothing_is_packed_on_other_devices_or_in_other_dtypes() -> None:
    assert optimize_for_cpu(nn.Linear(96, 96, device="meta")).num_packed == 0
    assert optimize_for_cpu(nn.Linear(96, 96, dtype=torch.float64)).num_packed == 0


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_the_kernel_names_what_does_not_fit() -> None:
    weight = torch.randn(50, 20)
    packed = torch.ops.paged_kv.pack_linear(weight)
    with pytest.raises(ValueError, match=r"x must be Float \[..., 20\]"):
        torch.ops.paged_kv.linear(torch.randn(2, 21), packed, None, 50)
    with pytest.raises(ValueError, match="packed has shape"):
        torch.ops.paged_kv.linear(torch.randn(2, 20), packed, None, 500)
    other = torch.ops.paged_kv.pack_linear(torch.randn(50, 30))
    down = torch.ops.paged_kv.pack_linear(torch.randn(20, 50))
    with pytest.raises(ValueError, match="gate and up must be equally deep, but are 20 and 30"):
        torch.ops.paged_kv.mlp(torch.randn(2, 20), packed, None, other, None, down, None, 20)
    with pytest.raises(ValueError, match=r"x must be Float \[..., 20\]"):
        torch.ops.paged_kv.mlp(torch.randn(2, 30), packed, None, packed, None, down, None, 20)
    with pytest.raises(ValueError, match="up_bias must have 50 elements"):
        torch.ops.paged_kv.mlp(torch.randn(2, 20), packed, None, packed, torch.zeros(2), down, None, 20)
    with pytest.raises(ValueError, match="bias must have 50 elements"):
        torch.ops.paged_kv.linear(torch.randn(2, 20), packed, torch.zeros(3), 50)
