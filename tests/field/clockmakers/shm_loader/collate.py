"""Packing of samples into segments."""
from __future__ import annotations

import numpy as np

from .segments import Segment, SegmentTable


def pack_tokens(table: SegmentTable, samples: list[np.ndarray]) -> Segment | None:
    total = sum(s.size for s in samples)
    seg = table.seize_best(total * 4)  # clean: returned to the caller
    if seg is None:
        return None
    flat = seg.array((total,))
    pos = 0
    for s in samples:
        flat[pos : pos + s.size] = s
        pos += s.size
    seg.length = total
    return seg


def pack_with_mask(table: SegmentTable, samples: list[np.ndarray]) -> tuple[Segment, Segment] | None:
    tokens = pack_tokens(table, samples)  # leak: not yielded up when no segment is left for the mask
    if tokens is None:
        return None
    mask = table.seize_best(tokens.length)  # clean: returned with the tokens
    if mask is None:
        return None
    mask.array((tokens.length,), np.uint8)[:] = 1
    mask.length = tokens.length
    return tokens, mask


def packed_length(table: SegmentTable, samples: list[np.ndarray]) -> int:
    seg = pack_tokens(table, samples)  # leak: only its length is read, the segment is dropped
    return 0 if seg is None else seg.length
