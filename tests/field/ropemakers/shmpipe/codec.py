"""Writing token ids into segments and reading them again."""
from __future__ import annotations

import struct
from typing import List, Optional

from .segments import SegmentPool, SegmentRef

HEADER = struct.Struct("<I")


def write_ids(pool: SegmentPool, ids: List[int], timeout: float) -> Optional[SegmentRef]:
    """A segment with the ids in it, owned by the caller; None if there is none or the ids do not fit."""
    seg = pool.open_segment(timeout)  # clean: surrendered when the ids do not fit, else returned
    if seg is None:
        return None
    need = HEADER.size + 4 * len(ids)
    if need > pool.size:
        seg.surrender()
        return None
    HEADER.pack_into(seg.buf, 0, len(ids))
    struct.pack_into(f"<{len(ids)}I", seg.buf, HEADER.size, *ids)
    return seg


def write_text(pool: SegmentPool, text: str, timeout: float) -> Optional[SegmentRef]:
    raw = text.encode()
    seg = pool.open_segment(timeout)  # leak: a text over the segment size drops the segment
    if seg is None:
        return None
    if HEADER.size + len(raw) > pool.size:
        return None
    HEADER.pack_into(seg.buf, 0, len(raw))
    seg.buf[HEADER.size: HEADER.size + len(raw)] = raw
    return seg


def read_ids(seg: SegmentRef) -> List[int]:
    """Reads only; the reference stays with the caller."""
    (n,) = HEADER.unpack_from(seg.buf, 0)
    return list(struct.unpack_from(f"<{n}I", seg.buf, HEADER.size))
