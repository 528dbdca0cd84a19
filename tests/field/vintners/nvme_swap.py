"""Optimizer state swapped to NVMe through a set of aligned host buffers."""
from __future__ import annotations

import abc
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)


class SwapBufferManager:
    """`count` aligned buffers, addressed by id."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype) -> None:
        self.count = count
        self.numel = numel
        self.all_buffers = [torch.zeros(numel, dtype=dtype, pin_memory=True) for _ in range(count)]
        self.free_ids = list(range(count))
        self.used_ids: List[int] = []

    def allocate(self, numel: int) -> Optional[torch.Tensor]:
        if not self.free_ids or numel > self.numel:
            return None
        bid = self.free_ids.pop()
        self.used_ids.append(bid)
        return self.all_buffers[bid].narrow(0, 0, numel)

    def allocate_all(self, numel: int) -> List[torch.Tensor]:
        bufs = []
        while self.free_ids and numel <= self.numel:
            bufs.append(self.allocate(numel))  # clean: handed to the caller in the list
        return bufs

    def allocate_exact(self, numels: Sequence[int]) -> Optional[List[torch.Tensor]]:
        bufs: List[torch.Tensor] = []
        for n in numels:
            buf = self.allocate(n)  # clean: near miss, a refusal frees those that came before
            if buf is None:
                self.free(bufs)
                return None
            bufs.append(buf)
        return bufs

    def free(self, buffers: Sequence[torch.Tensor]) -> None:
        starts = {b.data_ptr(): i for i, b in enumerate(self.all_buffers)}
        for b in buffers:
            bid = starts[b.data_ptr()]
            self.used_ids.remove(bid)
            self.free_ids.append(bid)


class FdCache:
    """Opened swap files by path; put() closes a file with no users once there are too many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._fds: Dict[str, int] = {}
        self._users: Dict[str, int] = {}

    def take(self, path: str) -> int:
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDWR | os.O_CREAT)  # clean: put() or shutdown() closes it
            self._users[path] = 0
        self._users[path] += 1
        return self._fds[path]

    def put(self, path: str) -> None:
        self._users[path] -= 1
        if self._users[path] == 0 and len(self._fds) > self.limit:
            os.close(self._fds.pop(path))
            del self._users[path]

    def shutdown(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._users.clear()


@dataclass
class InFlight:
    name: str
    buffers: List[torch.Tensor]
    futures: List[Future]


class SwapperBase(abc.ABC):
    def __init__(self, folder: str, buffers: SwapBufferManager, fds: FdCache) -> None:
        self.folder = folder
        self.buffers = buffers
        self.fds = fds
        self.io = ThreadPoolExecutor(4)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name.replace(".", "_") + ".swp")

    @abc.abstractmethod
    def swap_in(self, name: str, like: Sequence[torch.Tensor]) -> Optional[List[torch.Tensor]]:
        ...

    def _write(self, path: str, buf: torch.Tensor, offset: int) -> int:
        fd = self.fds.take(path)  # clean: put after the write
        n = os.pwrite(fd, memoryview(buf.numpy()).cast("B"), offset)
        self.fds.put(path)
        return n

    def _read(self, path: str, buf: torch.Tensor, offset: int) -> int:
        fd = self.fds.take(path)  # leak: a short read returns before the put
        want = buf.numel() * buf.element_size()
        n = os.preadv(fd, [memoryview(buf.numpy()).cast("B")], offset)
        if n < want:
            log.error("%s: short read, %d of %d", path, n, want)
            return n
        self.fds.put(path)
        return n

    def close(self) -> None:
        self.io.shutdown()


class BlockingSwapper(SwapperBase):
    """Reads and writes in place; the buffers live from swap_in to swap_out."""

    def __init__(self, *a) -> None:
        super().__init__(*a)
        self._resident: Dict[str, List[torch.Tensor]] = {}

    def swap_in(self, name: str, like: Sequence[torch.Tensor]) -> Optional[List[torch.Tensor]]:
        bufs = self.buffers.allocate_exact([t.numel() for t in like])  # clean: near miss, both ends free
        if bufs is None:
            return None
        offset = 0
        for b in bufs:
            self._read(self.path(name), b, offset)
            offset += b.numel() * b.element_size()
        self._resident[name] = bufs
        return bufs

    def swap_out(self, name: str) -> None:
        bufs = self._resident.pop(name)
        offset = 0
        for b in bufs:
            offset += self._write(self.path(name), b, offset)
        self.buffers.free(bufs)

    def evict(self, name: str) -> None:
        """Like swap_out for state that did not change."""
        self.buffers.free(self._resident.pop(name))


class PipelinedSwapper(SwapperBase):
    """Reads the next state while the current one is updated; writes behind."""

    def __init__(self, *a) -> None:
        super().__init__(*a)
        self._reads: Dict[str, InFlight] = {}
        self._writes: List[InFlight] = []

    def prefetch(self, name: str, like: Sequence[torch.Tensor]) -> bool:
        if name in self._reads:
            return True
        bufs = self.buffers.allocate_exact([t.numel() for t in like])  # leak: cancel_reads() frees none
        if bufs is None:
            return False
        futures, offset = [], 0
        for b in bufs:
            futures.append(self.io.submit(self._read, self.path(name), b, offset))
            offset += b.numel() * b.element_size()
        self._reads[name] = InFlight(name, bufs, futures)
        return True

    def swap_in(self, name: str, like: Sequence[torch.Tensor]) -> Optional[List[torch.Tensor]]:
        if not self.prefetch(name, like):
            return None
        flight = self._reads.pop(name)
        for f in flight.futures:
            f.result()
        return flight.buffers

    def cancel_reads(self) -> int:
        n = len(self._reads)
        for flight in self._reads.values():
            for f in flight.futures:
                f.cancel() or f.result()
        self._reads = {}
        return n

    def swap_out(self, name: str, bufs: List[torch.Tensor]) -> None:
        futures, offset = [], 0
        for b in bufs:
            futures.append(self.io.submit(self._write, self.path(name), b, offset))
            offset += b.numel() * b.element_size()
        self._writes.append(InFlight(name, bufs, futures))

    def reap(self, block: bool) -> int:
        still: List[InFlight] = []
        for flight in self._writes:
            if block or all(f.done() for f in flight.futures):
                for f in flight.futures:
                    f.result()
                self.buffers.free(flight.buffers)
            else:
                still.append(flight)
        done = len(self._writes) - len(still)
        self._writes = still
        return done

    def close(self) -> None:
        self.reap(block=True)
        super().close()


# ---- optimizer steps over swapped state ------------------------------------------------------


def adam_step(sw: PipelinedSwapper, names: List[str], params: Dict[str, torch.Tensor], lr: float) -> int:
    updated = 0
    for i, name in enumerate(names):
        p = params[name]
        state = sw.swap_in(name, [p, p])  # clean: near miss, swap_out() takes it and reap() frees it
        if state is None:
            sw.reap(block=True)
            state = sw.swap_in(name, [p, p])  # clean: near miss, the first gave nothing
        if state is None:
            continue
        if i + 1 < len(names):
            sw.prefetch(names[i + 1], [params[names[i + 1]]] * 2)
        m, v = state
        g = p.grad.view(-1).cpu()
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        p.data.view(-1).sub_((lr * m / (v.sqrt() + 1e-8)).to(p.device))
        sw.swap_out(name, state)
        updated += 1
    sw.reap(block=True)
    return updated


def second_moment_norms(sw: PipelinedSwapper, params: Dict[str, torch.Tensor]) -> List[Tuple[str, float]]:
    out = []
    for name, p in params.items():
        state = sw.swap_in(name, [p, p])  # leak: read only, neither swapped out nor freed
        if state is None:
            log.info("no buffers for %s", name)
            continue
        out.append((name, float(state[1].norm())))
    return out


def self_test(manager: SwapBufferManager, numel: int) -> bool:
    bufs = manager.allocate_all(numel)  # leak: all but the first are not freed
    if not bufs:
        return False
    for i, b in enumerate(bufs):
        b.fill_(i)
    ok = all(float(b[0]) == i for i, b in enumerate(bufs))
    manager.free(bufs[:1])
    return ok


def copy_state(manager: SwapBufferManager, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A private, converted copy by way of a pinned buffer where one is free."""
    buf = manager.allocate(src.numel())  # leak: the conversion rebinds the name, so no buffer is freed
    if buf is None:
        return src.to("cpu", dtype)
    buf.copy_(src.view(-1))
    buf = buf.to(dtype, copy=True).view(src.shape)
    return buf
