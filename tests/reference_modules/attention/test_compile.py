"""torch.compile: one graph, no break, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import library

from reference_modules.attention import dilated_attention
from tests.reference_modules.attention.drawn import numbers

BRANCHES = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}


@pytest.mark.parametrize(
    "extra", [{}, {"is_causal": True}, {"detach_mixing": True}, {"dropout_p": 0.2}, "mask"]
)
def test_one_graph_and_the_same_numbers(extra: Any) -> None:
    if extra == "mask":
        extra = {"key_padding_mask": torch.arange(37).expand(2, 37) >= 30}
    q, k, v, dout = numbers((2, 37, 3, 8), 0, dtype=torch.float32)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dilated_attention(q, k, v, **BRANCHES, **extra) * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for form in (run, compiled):
        torch.manual_seed(0)
        out = form(q, k, v)
        found.append([out, *torch.autograd.grad(out, (q, k, v), dout)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("tokens", [11, 16])  # at 16 the first branch is one call, whose results are kept
@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_the_operators_keep_their_promises(tokens: int, kernel: str) -> None:
    """Strides too: inductor believes them."""
    from reference_modules.attention.compiled import _backward, _forward

    q, k, v, dout = numbers((2, tokens, 2, 4), 0)
    arguments = (q, k, v, None, None, [4, 8], [1, 2], "paper", True, 0.5, 0.0, False, kernel)
    library.opcheck(_forward, arguments)
    out, lse = _forward(*arguments)
    assert out.is_contiguous() and lse.is_contiguous()
    grads = _backward(dout, q.detach(), k.detach(), v.detach(), out.detach(), lse, *arguments[3:])
    assert all(grad.is_contiguous() for grad in grads)
