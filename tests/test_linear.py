from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aserve_kernels import torch_ops
from aserve_kernels.linear import GatedLinear, PackedLinear, activate_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (8,), (3, 70), (0,)])
def test_packed_product_is_the_plain_one(dtype: torch.dtype, bias: bool, rows: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 160) / 160**0.5, torch.randn(*rows, 160)
    b = torch.randn(96) if bias else None
    linear = PackedLinear(weight.to(dtype), None if b is None else b.to(dtype))
    out = linear(x.to(dtype))
    want = functional.linear(x.to(dtype).float(), weight.to(dtype).float(), None if b is None else b.to(dtype).float())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), want, atol=tolerance, rtol=tolerance)


def test_a_float32_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(256, 640) / 640**0.5)
    x = torch.randn(130, 640)
    together = linear(x)
    for row in (0, 7, 129):
        torch.testing.assert_close(linear(x[row : row + 1])[0], together[row], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_product_is_the_two_products_and_their_gate(dtype: torch.dtype, activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(2 * 48, 64) / 8).to(dtype), torch.randn(9, 64).to(dtype)
    b = torch.randn(2 * 48).to(dtype) if bias else None
    out = GatedLinear(weight, b, activation, torch_ops.gated_mlp)(x)
    product = functional.linear(x.double(), weight.double(), None if b is None else b.double())
    want = torch_ops.gated_mlp(product, activation)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


def test_gating_follows_one_product_where_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(16, 8), torch.randn(3, 8)
    packed = GatedLinear(weight, None, "silu", torch_ops.gated_mlp)(x)
    monkeypatch.setattr("aserve_kernels.linear.packs", lambda weight: False)
    plain = GatedLinear(weight, None, "silu", torch_ops.gated_mlp)(x)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
def test_an_activation_follows_product_and_bias(monkeypatch: pytest.MonkeyPatch, packed: bool, activation: str) -> None:
    if not packed:
        monkeypatch.setattr("aserve_kernels.linear.packs", lambda weight: False)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(48, 64) / 8, torch.randn(48), torch.randn(9, 64)
    want = activate_(functional.linear(x.double(), weight.double(), bias.double()), activation)
    torch.testing.assert_close(PackedLinear(weight, bias, activation)(x).double(), want, atol=1e-5, rtol=1e-5)
