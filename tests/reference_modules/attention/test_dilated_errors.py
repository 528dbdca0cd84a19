"""Wrong input ends in a ValueError that names the value, the limit and the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from reference_modules.attention import dilated_attention

Q = torch.zeros(2, 8, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": Q[0]},
            r"q has shape \(8, 4, 16\); it must be \(batch, tokens, heads, head dimension\).*unflatten",
        ),
        ({"k": Q[:, :7]}, r"k has shape \(2, 7, 4, 16\) and q \(2, 8, 4, 16\); they must be equal"),
        ({"v": Q[..., :8]}, r"v has shape \(2, 8, 4, 8\) and q"),
        ({"k": Q.double()}, r"k is torch.float64 and q torch.float32.*use k.to\(q.dtype\)"),
        ({"v": Q.to("meta")}, r"v is on meta and q on cpu: use v.to\(q.device\)"),
        ({"q": Q.int(), "k": Q.int(), "v": Q.int()}, r"q is torch.int32; only float16, .* use q.float\(\)"),
        ({"segment_lengths": []}, "segment_lengths has 0 and dilation_rates 2 entries.*equally many"),
        ({"dilation_rates": [1]}, "segment_lengths has 2 and dilation_rates 1 entries"),
        ({"segment_lengths": [4, 0]}, "segment_lengths holds 0; every entry must be an int of at least 1"),
        ({"dilation_rates": [1, 2.0]}, "dilation_rates holds 2.0"),
        ({"dilation_rates": [1, True]}, "dilation_rates holds True"),
        ({"dilation_rates": [5, 2]}, "dilation 5 is larger than its segment of 4 tokens.*at most 4"),
        ({"offset_rule": "other"}, "offset_rule is 'other'; it must be one of paper, torchscale"),
        ({"dropout_p": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout_p": -0.1}, "dropout is -0.1"),
        ({"scale": float("inf")}, "scale is inf; it must be a finite number"),
        ({"kernel": "fast"}, "kernel is 'fast'; it must be 'auto'"),
        (
            {"key_padding_mask": torch.zeros(2, 8)},
            "key_padding_mask is torch.float32; only bool is supported",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 7, dtype=torch.bool)},
            r"key_padding_mask has shape \(2, 7\); it must be \(batch, tokens\) = \(2, 8\)",
        ),
        (
            {"key_padding_mask": torch.zeros(2, 8, dtype=torch.bool, device="meta")},
            r"key_padding_mask is on meta and q on cpu: use key_padding_mask.to\(q.device\)",
        ),
    ],
)
def test_message(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": Q, "v": Q, "segment_lengths": [4, 8], "dilation_rates": [1, 2]}
    arguments.update(change)
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        dilated_attention(**arguments)
