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
    with pytest.raises(ValueError, match="bias must have 50 elements"):
        torch.ops.paged_kv.linear(torch.randn(2, 20), packed, torch.zeros(3), 50)
