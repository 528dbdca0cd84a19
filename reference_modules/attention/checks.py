"""What dilated attention accepts; all else is a ValueError naming value, limit and way out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any, get_args

import torch
from torch import Tensor

from reference_modules.attention.geometry import OffsetRule

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_branches(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
    """As many dilations as segments, all positive, no dilation beyond its segment."""
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        if not isinstance(values, Sequence) or isinstance(values, str):
            way_out = "use .tolist()" if hasattr(values, "tolist") else "one number for each branch"
            raise ValueError(f"{name} is {_shown(values)}; it must be a list or tuple of ints: {way_out}")
    if not segment_lengths or len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            f"segment_lengths has {len(segment_lengths)} and dilation_rates {len(dilation_rates)} entries; "
            "there must be equally many, at least one: give one dilation for each segment length"
        )
    for name, values in (("segment_lengths", segment_lengths), ("dilation_rates", dilation_rates)):
        for value in values:
            if not _is_whole(value) or value < 1:
                raise ValueError(f"{name} holds {value!r}; every entry must be an int of at least 1")
    for w, r in zip(segment_lengths, dilation_rates, strict=True):
        if r > w:
            raise ValueError(
                f"dilation {r} is larger than its segment of {w} tokens, so some heads would see nothing; "
                f"use a dilation of at most {w} or a longer segment"
            )


def check_options(scale: float | None, offset_rule: str, dropout_p: float, kernel: str) -> None:
    """A finite scale or None, a known offset rule and kernel, a probability below 1."""
    if scale is not None and not _is_finite(scale):
        raise ValueError(
            f"scale is {scale!r}; it must be a finite number (None means 1/sqrt(head dimension))"
        )
    check_choice("offset_rule", offset_rule, get_args(OffsetRule))
    check_probability("dropout", dropout_p)
    if kernel not in ("auto", "plain"):
        raise ValueError(
            f"kernel is {kernel!r}; it must be 'auto' (best at hand) or 'plain' (torch operations)"
        )


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of some words."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def check_probability(name: str, value: float) -> None:
    """Of dropping: 1 would leave nothing."""
    if not _is_finite(value) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and below 1 (0 turns it off)")


def check_whole(name: str, value: object, least: int, way_out: str = "") -> None:
    """An int of at least so much."""
    if not _is_whole(value) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} is {value!r}; it must be an int of at least {least}{way_out}")


def check_switch(name: str, value: object) -> None:
    """True or False: whatever else is true would be taken for something."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_shown(value)}; it must be True or False")


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Heads share the features evenly, and query heads the key heads."""
    check_whole("embed_dim", embed_dim, 1)
    if not _is_whole(num_heads) or num_heads < 1 or embed_dim % num_heads:
        raise ValueError(
            f"embed_dim {embed_dim} does not split into {num_heads!r} heads; "
            "choose a num_heads that divides embed_dim"
        )
    if not _is_whole(num_kv_heads) or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads {num_kv_heads!r} does not divide num_heads {num_heads}; "
            "every key head must serve equally many query heads"
        )


def check_pool(pool: object) -> None:
    """Something that lends tensors, or None."""
    if pool is not None and not hasattr(pool, "lease"):
        raise ValueError(
            f"pool is {_shown(pool)}; it must have lease(shape, dtype, device) as TensorPool has, or be None"
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Three tensors (b, n, h, d) of one shape, floating type and device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
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
    if q.device.type == "meta":
        raise ValueError("q is on meta, which holds no numbers; use q.to('cpu') or a real device")


def check_tensor(name: str, x: object) -> None:
    """A dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {_shown(x)}; it must be a tensor: use torch.as_tensor")
    if x.layout != torch.strided:
        raise ValueError(
            f"{name} has the layout {x.layout}; only dense tensors are supported: use to_dense()"
        )


def check_extension(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Queries of the last tokens of k and v."""
    check_tensor("q", q)
    check_qkv(k, k, v)
    expected = (k.shape[0], q.shape[1] if q.dim() == 4 else 0, *k.shape[2:])
    if q.shape != expected or q.shape[1] > k.shape[1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; q must be the last tokens of the same "
            f"sequences: ({k.shape[0]}, at most {k.shape[1]}, {k.shape[2]}, {k.shape[3]})"
        )


def check_key_padding_mask(mask: Tensor | None, q: Tensor, name: str = "key_padding_mask") -> None:
    """Boolean (b, n) beside q."""
    if mask is None:
        return
    check_tensor(name, mask)
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} is {mask.dtype}; only bool is supported, True = ignore that key "
            "(for an additive mask use mask == float('-inf'))"
        )
    if mask.shape != q.shape[:2]:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; it must be (batch, tokens) = {tuple(q.shape[:2])}"
        )
    if mask.device != q.device:
        raise ValueError(f"{name} is on {mask.device} and q on {q.device}: use {name}.to(q.device)")


def check_features(name: str, x: Tensor, embed_dim: int, weight: Tensor) -> None:
    """(batch, tokens, embed_dim) that these weights can multiply."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be (batch, tokens, {embed_dim}): "
            "use x.unsqueeze(0) where there is no batch, x.transpose(0, 1) where tokens come first"
        )
    if x.device != weight.device:
        raise ValueError(f"{name} is on {x.device} and the weights on {weight.device}: move one to the other")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            f"{name} is {x.dtype} and the weights {weight.dtype}; they must be the same outside autocast: "
            f"use {name}.to({weight.dtype}) or module.to({x.dtype})"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError):  # no number at all, or a tensor of many
        return False


def _shown(value: object) -> str:
    """Short words and numbers as they are, the rest by kind."""
    return (
        repr(value) if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
    )
