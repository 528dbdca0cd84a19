from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from .slots import Slot, SlotRing

Sample = bytes
Decode = Callable[[Sample], Optional[bytes]]


class DecodeError(ValueError):
    pass


def pack(slot: Slot, samples: Sequence[bytes]) -> int:
    for s in samples:
        slot.mem[slot.length : slot.length + len(s)] = s
        slot.length += len(s)
    return slot.length


def collate(ring: SlotRing, samples: Sequence[Sample], decode: Decode) -> Optional[Slot]:
    slot = ring.claim()  # leak: batch with every sample filtered returns None and drops the slot
    if slot is None:
        return None
    kept = [d for d in map(decode, samples) if d is not None]
    if not kept:
        return None
    pack(slot, kept)
    return slot


def collate_strict(ring: SlotRing, samples: Sequence[Sample], decode: Decode) -> Optional[Slot]:
    slot = ring.claim()  # clean: near miss, recycled before the error is raised on, else returned
    if slot is None:
        return None
    try:
        pack(slot, [decode(s) or b"" for s in samples])
    except DecodeError:
        ring.recycle(slot)
        raise
    return slot


def collate_fixed(ring: SlotRing, samples: Sequence[Sample], width: int) -> List[Slot]:
    """One slot per row of ``width`` samples."""
    rows: List[Slot] = []
    for start in range(0, len(samples), width):
        row = samples[start : start + width]
        if len(row) < width:
            break
        slot = ring.claim()  # clean: near miss, the short row breaks before the claim
        if slot is None:
            break
        pack(slot, row)
        rows.append(slot)
    return rows
