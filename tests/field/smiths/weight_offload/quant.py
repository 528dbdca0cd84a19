from __future__ import annotations

from typing import List, Optional, Sequence

from .staging import PinnedBuffer, PinnedStaging


def pack_int4(values: Sequence[int], staging: PinnedStaging) -> PinnedBuffer:
    """Packs into a staging buffer that the caller gives back."""
    buf = staging.borrow()  # clean: returned to the caller
    for i in range(0, len(values) - 1, 2):
        buf.mem[i // 2] = (values[i] & 0xF) | ((values[i + 1] & 0xF) << 4)
    buf.used = len(values) // 2
    return buf


def pack_to_bytes(values: Sequence[int], staging: PinnedStaging) -> bytes:
    buf = pack_int4(values, staging)  # leak: its bytes are copied and the staging buffer is dropped
    return bytes(buf.mem[: buf.used])


def pack_to_bytes_scoped(values: Sequence[int], staging: PinnedStaging) -> bytes:
    buf = pack_int4(values, staging)  # clean: finally
    try:
        return bytes(buf.mem[: buf.used])
    finally:
        staging.give_back(buf)


def checksum(values: Sequence[int], staging: PinnedStaging, fast: bool = False) -> int:
    if fast:
        return sum(values) & 0xFFFF
    buf = pack_int4(values, staging)  # clean: near miss, the fast return comes before it
    total = sum(buf.mem[: buf.used]) & 0xFFFF
    staging.give_back(buf)
    return total


def pack_groups(groups: List[Sequence[int]], staging: PinnedStaging, limit: int) -> Optional[List[PinnedBuffer]]:
    """Returns one buffer for each group, or None when together they are larger than the limit."""
    bufs: List[PinnedBuffer] = []
    total = 0
    for values in groups:
        buf = pack_int4(values, staging)  # leak: over the limit only the last buffer goes back, not the earlier ones
        total += buf.used
        if total > limit:
            staging.give_back(buf)
            return None
        bufs.append(buf)
    return bufs
