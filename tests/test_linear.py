from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aserve_kernels.linear import PackedLinear


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
