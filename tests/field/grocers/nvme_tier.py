"""NVMe tier of the offload runtime: aligned bounce buffers, file extents, io tickets."""
from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

import torch

log = logging.getLogger(__name__)


class BouncePool:
    """Page-aligned bounce buffers. rent() waits for one."""

    def __init__(self, count: int, nbytes: int):
        self._free = [torch.empty(nbytes, dtype=torch.uint8).pin_memory() for _ in range(count)]
        self._cv = threading.Condition()

    def rent(self) -> torch.Tensor:
        with self._cv:
            while not self._free:
                self._cv.wait()
            return self._free.pop()

    def restore(self, buf: torch.Tensor) -> None:
        with self._cv:
            self._free.append(buf)
            self._cv.notify()


class Extents:
    """Fixed extents of a swap file. reserve() gives an offset or None."""

    def __init__(self, path: str, count: int, size: int):
        self.path = path
        self.size = size
        self._free: Set[int] = {i * size for i in range(count)}
        self._lock = threading.Lock()

    def reserve(self) -> Optional[int]:
        with self._lock:
            return self._free.pop() if self._free else None

    def unreserve(self, off: int) -> None:
        with self._lock:
            self._free.add(off)


class Placed(NamedTuple):
    off: int
    nbytes: int


class SwapFile:
    """Tensors by name in extents of one file."""

    def __init__(self, ext: Extents, bounce: BouncePool):
        self.ext = ext
        self.bounce = bounce
        self.fd = os.open(ext.path, os.O_RDWR | os.O_CREAT)  # clean: owner ends it in close
        self.placed: Dict[str, Placed] = {}

    def write(self, name: str, t: torch.Tensor) -> bool:
        raw = t.reshape(-1).view(torch.uint8)
        at = self.placed.get(name)
        off = at.off if at is not None else self.ext.reserve()  # clean: near miss, a name present keeps its extent, remove and close unreserve
        if off is None:
            return False
        self.placed[name] = Placed(off, raw.numel())
        buf = self.bounce.rent()  # clean: finally
        try:
            buf[: raw.numel()].copy_(raw)
            os.pwrite(self.fd, buf[: raw.numel()].numpy(), off)
        finally:
            self.bounce.restore(buf)
        return True

    def read(self, name: str, out: torch.Tensor) -> bool:
        buf = self.bounce.rent()  # leak: an unknown name returns before restore
        at = self.placed.get(name)
        if at is None:
            return False
        os.preadv(self.fd, [buf[: at.nbytes].numpy()], at.off)
        out.view(-1).view(torch.uint8).copy_(buf[: at.nbytes])
        self.bounce.restore(buf)
        return True

    def remove(self, name: str) -> None:
        at = self.placed.pop(name, None)
        if at is not None:
            self.ext.unreserve(at.off)

    def close(self) -> None:
        for name in list(self.placed):
            self.remove(name)
        os.close(self.fd)


class VersionedSwap:
    """Writes new versions beside the old one, then switches over."""

    def __init__(self, ext: Extents, io):
        self.ext = ext
        self.io = io
        self.live: Dict[str, int] = {}
        self.fresh: Dict[str, int] = {}

    def write(self, name: str, data: bytes) -> bool:
        if name in self.fresh:
            self.io.pwrite(data, self.fresh[name])
            return True
        off = self.ext.reserve()  # leak: switch_over updates live over the old offsets without unreserve
        if off is None:
            return False
        self.io.pwrite(data, off)
        self.fresh[name] = off
        return True

    def switch_over(self) -> None:
        self.live.update(self.fresh)
        self.fresh = {}

    def discard(self) -> None:
        while self.fresh:
            self.ext.unreserve(self.fresh.popitem()[1])

    def close(self) -> None:
        self.discard()
        for off in self.live.values():
            self.ext.unreserve(off)
        self.live.clear()


class ReadAhead:
    """Reads run on a pool; the future's result is the filled buffer."""

    def __init__(self, bounce: BouncePool, swap: SwapFile, workers: int):
        self.bounce = bounce
        self.swap = swap
        self.exec = ThreadPoolExecutor(workers)
        self.futures: Dict[str, Future] = {}

    def start(self, name: str) -> None:
        if name in self.futures or name not in self.swap.placed:
            return
        self.futures[name] = self.exec.submit(self._load, name, self.swap.placed[name])

    def _load(self, name: str, at: Placed) -> torch.Tensor:
        buf = self.bounce.rent()  # leak: stop throws the futures away, finished ones carry a buffer
        os.preadv(self.swap.fd, [buf[: at.nbytes].numpy()], at.off)
        return buf

    def collect(self, name: str, out: torch.Tensor) -> bool:
        fut = self.futures.pop(name, None)
        if fut is None:
            return False
        buf = fut.result()
        raw = out.view(-1).view(torch.uint8)
        raw.copy_(buf[: raw.numel()])
        self.bounce.restore(buf)
        return True

    def stop(self) -> None:
        for fut in self.futures.values():
            fut.cancel()
        self.futures.clear()


class WriteBack:
    """Dirty buffers by name, written by flush."""

    def __init__(self, bounce: BouncePool, swap: SwapFile):
        self.bounce = bounce
        self.swap = swap
        self.dirty: Dict[str, torch.Tensor] = {}
        self.failed: Dict[str, torch.Tensor] = {}

    def put(self, name: str, t: torch.Tensor) -> None:
        buf = self.dirty.get(name)
        if buf is None:
            buf = self.dirty[name] = self.bounce.rent()  # leak: a name failing twice has its buffer in failed overwritten
        raw = t.reshape(-1).view(torch.uint8)
        buf[: raw.numel()].copy_(raw)

    def flush(self) -> None:
        while self.dirty:
            name, buf = self.dirty.popitem()
            try:
                ok = self.swap.write(name, buf)
            except OSError:
                ok = False
            if ok:
                self.bounce.restore(buf)
            else:
                self.failed[name] = buf

    def drop_failed(self) -> int:
        n = len(self.failed)
        while self.failed:
            self.bounce.restore(self.failed.popitem()[1])
        return n


class StripeWriter:
    """A tensor over several extents, all or none."""

    def __init__(self, ext: Extents, io):
        self.ext = ext
        self.io = io
        self.stripes: Dict[str, Tuple[int, ...]] = {}

    def _reserve(self, n: int) -> Optional[Tuple[int, ...]]:
        offs: List[int] = []
        for _ in range(n):
            off = self.ext.reserve()  # clean: near miss, a short stripe is given back whole
            if off is None:
                for o in offs:
                    self.ext.unreserve(o)
                return None
            offs.append(off)
        return tuple(offs)

    def write(self, name: str, data: bytes) -> bool:
        n = -(-len(data) // self.ext.size)
        old = self.stripes.get(name, ())
        if len(old) != n:
            offs = self._reserve(n)  # clean: near miss, the former stripe is given back after the switch
            if offs is None:
                return False
            self.stripes[name] = offs
            for o in old:
                self.ext.unreserve(o)
        for i, off in enumerate(self.stripes[name]):
            self.io.pwrite(data[i * self.ext.size : (i + 1) * self.ext.size], off)
        return True

    def append(self, name: str, data: bytes) -> bool:
        more = self._reserve(-(-len(data) // self.ext.size))  # leak: an unknown name returns with the extents reserved
        if more is None:
            return False
        if name not in self.stripes:
            log.error("no stripe %s", name)
            return False
        self.stripes[name] += more
        for i, off in enumerate(more):
            self.io.pwrite(data[i * self.ext.size : (i + 1) * self.ext.size], off)
        return True

    def truncate(self, name: str, n: int) -> None:
        offs = self.stripes[name]
        for o in offs[n:]:
            self.ext.unreserve(o)
        self.stripes[name] = offs[:n]

    def remove(self, name: str) -> None:
        for o in self.stripes.pop(name, ()):
            self.ext.unreserve(o)


def compact(ext: Extents, io, table: Dict[str, int]) -> int:
    """Moves extents to lower offsets where one is free."""
    moved = 0
    for name, old in sorted(table.items(), key=lambda kv: -kv[1]):
        new = ext.reserve()  # leak: an offset that is not lower ends the loop with the new one reserved
        if new is None or new > old:
            break
        io.move(old, new)
        table[name] = new
        ext.unreserve(old)
        moved += 1
    return moved


def reload(ext: Extents, io, names: List[str]) -> Dict[str, int]:
    table: Dict[str, int] = {}
    for name in names:
        if name in table:
            continue
        off = ext.reserve()  # clean: near miss, unreserved before the continue, else handed out in the table
        if off is None:
            break
        if not io.fetch(name, off):
            ext.unreserve(off)
            continue
        table[name] = off
    return table
