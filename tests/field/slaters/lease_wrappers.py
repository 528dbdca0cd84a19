"""Layered access to the communication arena: arena -> workspace -> typed scratch."""
from __future__ import annotations

import functools
import logging
from contextlib import closing, contextmanager
from typing import Any, Callable, Iterator, List, Optional, Tuple

log = logging.getLogger("comm.arena")


class Region:
    __slots__ = ("offset", "nbytes")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset = offset
        self.nbytes = nbytes


class CommArena:
    """First-fit arena over one registered buffer."""

    def __init__(self, nbytes: int) -> None:
        self.buf = bytearray(nbytes)
        self._holes: List[Tuple[int, int]] = [(0, nbytes)]
        self.allocated = 0

    def carve(self, nbytes: int) -> Optional[Region]:
        for i, (off, n) in enumerate(self._holes):
            if n >= nbytes:
                if n == nbytes:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + nbytes, n - nbytes)
                self.allocated += nbytes
                return Region(off, nbytes)
        return None

    def restore(self, r: Region) -> None:
        self.allocated -= r.nbytes
        self._holes.append((r.offset, r.nbytes))
        self._holes.sort()


class RegionLease:
    """Closes once; further closes do nothing."""

    def __init__(self, arena: CommArena, region: Region) -> None:
        self.arena = arena
        self.region: Optional[Region] = region

    @property
    def view(self) -> memoryview:
        r = self.region
        return memoryview(self.arena.buf)[r.offset:r.offset + r.nbytes]

    def close(self) -> None:
        if self.region is None:
            return
        self.arena.restore(self.region)
        self.region = None

    def __enter__(self) -> "RegionLease":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Workspace:
    """Rounds sizes up and hands out leases."""

    def __init__(self, arena: CommArena, align: int = 16) -> None:
        self.arena = arena
        self.align = align

    def lease(self, nbytes: int) -> Optional[RegionLease]:
        size = -(-nbytes // self.align) * self.align
        region = self.arena.carve(size)  # clean: wrapped into the lease that is returned
        if region is None:
            return None
        return RegionLease(self.arena, region)

    def must_lease(self, nbytes: int) -> RegionLease:
        lease = self.lease(nbytes)  # clean: near miss, returned, or there was none
        if lease is None:
            raise MemoryError(f"{nbytes} bytes of workspace")
        return lease

    def lease_contiguous(self, nbytes: int) -> Optional[RegionLease]:
        region = self.arena.carve(nbytes)  # leak: misaligned regions are turned down without restore
        if region is None or region.offset % self.align:
            return None
        return RegionLease(self.arena, region)

    def lease_verified(self, nbytes: int) -> Optional[RegionLease]:
        lease = self.lease(nbytes)  # clean: near miss, closed when turned down, else returned
        if lease is not None and lease.region.offset % (2 * self.align):
            lease.close()
            return None
        return lease


class ScratchTensor:
    def __init__(self, ws: Workspace, shape: Tuple[int, ...], itemsize: int = 1) -> None:
        numel = functools.reduce(lambda a, b: a * b, shape, 1)
        self.shape = shape
        self._lease = ws.must_lease(numel * itemsize)  # clean: owned by the tensor, drop closes it

    @property
    def data(self) -> memoryview:
        return self._lease.view

    def drop(self) -> None:
        self._lease.close()


def new_scratch(ws: Workspace, *shape: int) -> ScratchTensor:
    return ScratchTensor(ws, shape)  # clean: returned to the caller


def with_scratch(nbytes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Passes a scratch lease as the keyword `scratch`."""

    def deco(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def inner(ws: Workspace, *args: Any, **kw: Any) -> Any:
            lease = ws.must_lease(nbytes)  # clean: closed in finally
            try:
                return fn(ws, *args, scratch=lease, **kw)
            finally:
                lease.close()
        return inner
    return deco


@with_scratch(64)
def checksum(ws: Workspace, payload: bytes, scratch: RegionLease) -> int:
    n = min(len(payload), len(scratch.view))
    scratch.view[:n] = payload[:n]
    return sum(scratch.view[:n])


@contextmanager
def scratch_pair(ws: Workspace, n: int) -> Iterator[Tuple[ScratchTensor, ScratchTensor]]:
    a = new_scratch(ws, n)  # clean: near miss, dropped even when the second one cannot be had
    try:
        b = new_scratch(ws, n)  # clean: dropped in the inner finally
        try:
            yield a, b
        finally:
            b.drop()
    finally:
        a.drop()


def quantize(ws: Workspace, values: bytes) -> bytes:
    tmp = new_scratch(ws, len(values))  # leak: copied out and never dropped
    tmp.data[:len(values)] = bytes(v // 2 for v in values)
    return bytes(tmp.data[:len(values)])


def dequantize(ws: Workspace, values: bytes) -> bytes:
    with closing(ws.must_lease(len(values))) as lease:  # clean: near miss, closing() calls close
        lease.view[:len(values)] = bytes((v * 2) & 0xFF for v in values)
        return bytes(lease.view[:len(values)])


def compress_chunks(ws: Workspace, chunks: List[bytes], limit: int) -> List[bytes]:
    out: List[bytes] = []
    for c in chunks:
        lease = ws.lease(len(c))  # leak: the size limit breaks out of the loop before close
        if lease is None:
            out.append(c)
            continue
        lease.view[:len(c)] = c
        if sum(map(len, out)) + len(c) > limit:
            log.debug("limit of %d reached", limit)
            break
        out.append(bytes(lease.view[:len(c)]))
        lease.close()
    return out


def swap_halves(ws: Workspace, data: bytes) -> Optional[bytes]:
    half = len(data) // 2
    lease = ws.lease_verified(len(data))  # clean: near miss, the with block closes it, None leaves before
    if lease is None:
        return None
    with lease:
        lease.view[:half] = data[half:2 * half]
        lease.view[half:2 * half] = data[:half]
        return bytes(lease.view[:2 * half])


def main() -> None:
    arena = CommArena(4096)
    ws = Workspace(arena)
    print(checksum(ws, b"abc"), dequantize(ws, b"\x01\x02"), swap_halves(ws, b"abcd"))
    with scratch_pair(ws, 32) as (a, b):  # clean: with
        a.data[0] = 1
        b.data[0] = a.data[0]
    print(compress_chunks(ws, [b"aa", b"bb"], 100), arena.allocated, len(quantize(ws, b"zz")))


if __name__ == "__main__":
    main()
