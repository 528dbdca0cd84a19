"""What dilated attention accepts; all else is a ValueError naming value, limit and way out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from reference_modules.attention.geometry import OffsetRule

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_branches(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
    """As many dilations as segments, all positive, no dilation beyond its segment."""
    if not segment_lengths or len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            f"segment_lengths has {len(segment_lengths)} and dilation_rates {len(dilation_rates)} entries; "
            "there must be equally many, at least one: give one dilation for each segment length"
        )
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} holds {value!r}; every entry must be an int of at least 1")
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        if r > w:
            raise ValueError(
                f"dilation {r} is larger than its segment of {w} tokens, so some heads would see nothing; "
                f"use a dilation of at most {w} or a longer segment"
            )


def check_options(scale: float | None, offset_rule: str, dropout_p: float, kernel: str) -> None:
    """A finite scale or None, a known offset rule and kernel, a probability below 1."""
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite (None means 1/sqrt(head dimension))")
    if offset_rule not in get_args(OffsetRule):
        raise ValueError(
            f"offset_rule is {offset_rule!r}; it must be one of {', '.join(get_args(OffsetRule))}"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout is {dropout_p}; it must be at least 0 and below 1 (0 turns it off)")
    if kernel not in ("auto", "plain"):
        raise ValueError(
            f"kernel is {kernel!r}; it must be 'auto' (best at hand) or 'plain' (torch operations)"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Three tensors (b, n, h, d) of one shape, floating type and device."""
    if q.dim() != 4 or q.shape[2] < 1 or q.shape[3] < 1:
        raise ValueError(
            f"q has shape {tuple(q.shape)}; it must be (batch, tokens, heads, head dimension), "
            "with at least one head and dimension: use q.unflatten(-1, (heads, -1))"
        )
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and q {tuple(q.shape)}; they must be equal "
                "(repeat grouped keys to all heads, and pad neither: any number of tokens is fine)"
            )
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name} is {x.dtype} and q {q.dtype}; they must be the same: use {name}.to(q.dtype)"
            )
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: use {name}.to(q.device)")
    if q.dtype not in _DTYPES:
        raise ValueError(
            f"q is {q.dtype}; only float16, bfloat16, float32 and float64 are supported: use q.float()"
        )


def check_extension(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Queries of the last tokens of k and v."""
    check_qkv(k, k, v)
    expected = (k.shape[0], q.shape[1] if q.dim() == 4 else 0, *k.shape[2:])
    if q.shape != expected or q.shape[1] > k.shape[1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; q must be the last tokens of the same "
            f"sequences: ({k.shape[0]}, at most {k.shape[1]}, {k.shape[2]}, {k.shape[3]})"
        )


def check_key_padding_mask(mask: Tensor | None, q: Tensor) -> None:
    """Boolean (b, n) beside q."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask is {mask.dtype}; only bool is supported, True = ignore that key "
            "(for an additive mask use mask == float('-inf'))"
        )
    if mask.shape != q.shape[:2]:
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}; "
            f"it must be (batch, tokens) = {tuple(q.shape[:2])}"
        )
    if mask.device != q.device:
        raise ValueError(
            f"key_padding_mask is on {mask.device} and q on {q.device}: use key_padding_mask.to(q.device)"
        )
