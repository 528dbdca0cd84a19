"""Optimizer states on NVMe: swap a sub-group in, step it, swap it out."""
from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


class SwapBuffers:
    """Aligned pinned buffers, told apart by their index."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype):
        self.tensors = [torch.empty(numel, dtype=dtype, pin_memory=True) for _ in range(count)]
        self.free_ids = list(range(count))
        self.used_ids: set[int] = set()
        self.numel = numel

    def allocate(self, numel: int) -> torch.Tensor | None:
        if not self.free_ids or numel > self.numel:
            return None
        i = self.free_ids.pop()  # clean: recorded in used_ids and returned as its tensor
        self.used_ids.add(i)
        return self.tensors[i]

    def allocate_pair(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.free_ids:
            return None
        i = self.free_ids.pop()  # leak: dropped when there is no second free index
        if not self.free_ids:
            return None
        j = self.free_ids.pop()  # clean: recorded in used_ids and returned as its tensor
        self.used_ids.update((i, j))
        return self.tensors[i], self.tensors[j]

    def free(self, t: torch.Tensor) -> None:
        for i in self.used_ids:
            if self.tensors[i].data_ptr() == t.data_ptr():
                self.used_ids.discard(i)
                self.free_ids.append(i)
                return


class AioHandles:
    """A stack of aio contexts; each costs kernel resources."""

    def __init__(self, make, count: int):
        self._stack = [make() for _ in range(count)]
        self._sem = threading.Semaphore(count)

    def open_ctx(self):
        self._sem.acquire()  # clean: close_ctx() releases it with the context
        return self._stack.pop()  # clean: returned to the caller

    def close_ctx(self, h) -> None:
        self._stack.append(h)
        self._sem.release()


class SubGroup:
    def __init__(self, gid: int, numel: int):
        self.gid = gid
        self.numel = numel
        self.master: torch.Tensor | None = None
        self.moment: torch.Tensor | None = None
        self.variance: torch.Tensor | None = None


class OptimizerSwapper:
    def __init__(self, buffers: SwapBuffers, handles: AioHandles, folder: str, pipelined: bool):
        self.buffers = buffers
        self.handles = handles
        self.folder = Path(folder)
        self.pipelined = pipelined
        self.resident: "OrderedDict[int, SubGroup]" = OrderedDict()
        self.reads: dict[int, tuple] = {}
        self.shadow: torch.Tensor | None = None

    def _file(self, gid: int, what: str) -> str:
        return os.fspath(self.folder / f"{gid}.{what}.swp")

    # -- whole states -----------------------------------------------------------

    def swap_in(self, g: SubGroup) -> bool:
        if g.gid in self.resident:
            return True
        master = self.buffers.allocate(g.numel)  # clean: near miss, freed when the moment is missing, else owned by the resident group
        if master is None:
            return False
        moment = self.buffers.allocate(g.numel)  # leak: not freed when the variance is missing
        if moment is None:
            self.buffers.free(master)
            return False
        variance = self.buffers.allocate(g.numel)  # clean: owned by the resident group, which swap_out() empties
        if variance is None:
            self.buffers.free(master)
            return False
        h = self.handles.open_ctx()  # clean: closed in finally
        try:
            for what, t in (("master", master), ("moment", moment), ("variance", variance)):
                h.sync_pread(t[: g.numel], self._file(g.gid, what))
        finally:
            self.handles.close_ctx(h)
        g.master, g.moment, g.variance = master, moment, variance
        self.resident[g.gid] = g
        return True

    def swap_out(self, gid: int, write: bool = True) -> None:
        g = self.resident.pop(gid)
        if write:
            h = self.handles.open_ctx()  # clean: closed after the writes
            for what, t in (("master", g.master), ("moment", g.moment), ("variance", g.variance)):
                h.sync_pwrite(t[: g.numel], self._file(gid, what))
            self.handles.close_ctx(h)
        for t in (g.master, g.moment, g.variance):
            self.buffers.free(t)
        g.master = g.moment = g.variance = None

    def evict_oldest(self) -> None:
        if self.resident:
            self.swap_out(next(iter(self.resident)))

    def read_master(self, g: SubGroup, out: torch.Tensor) -> None:
        h = self.handles.open_ctx()  # leak: not closed when no buffer is left
        buf = self.buffers.allocate(g.numel)  # clean: freed after the copy
        if buf is None:
            raise MemoryError("no swap buffer")
        h.sync_pread(buf[: g.numel], self._file(g.gid, "master"))
        out.copy_(buf[: g.numel])
        self.buffers.free(buf)
        self.handles.close_ctx(h)

    def verify(self, g: SubGroup) -> bool:
        pair = self.buffers.allocate_pair()  # leak: the second buffer of the pair is never freed
        if pair is None:
            return False
        a, b = pair
        h = self.handles.open_ctx()  # clean: closed before the comparison
        h.sync_pread(a[: g.numel], self._file(g.gid, "master"))
        h.sync_pread(b[: g.numel], self._file(g.gid, "shadow"))
        self.handles.close_ctx(h)
        same = torch.equal(a[: g.numel], b[: g.numel])
        self.buffers.free(a)
        return same

    # -- pipelining -------------------------------------------------------------

    def start_read(self, g: SubGroup) -> bool:
        if g.gid in self.reads:
            return True
        buf = self.buffers.allocate(g.numel)  # clean: in reads with its context until finish_read()
        if buf is None:
            return False
        h = self.handles.open_ctx()  # clean: in reads with its buffer until finish_read()
        h.async_pread(buf[: g.numel], self._file(g.gid, "master"))
        self.reads[g.gid] = (h, buf, g.numel)
        return True

    def finish_read(self, gid: int, out: torch.Tensor) -> None:
        h, buf, n = self.reads.pop(gid)
        h.wait()
        self.handles.close_ctx(h)
        out.copy_(buf[:n])
        self.buffers.free(buf)

    def begin_step(self, g: SubGroup) -> None:
        if self.pipelined:
            self.shadow = self.buffers.allocate(g.numel)  # leak: end_step() frees it only for a written step

    def end_step(self, g: SubGroup, wrote: bool) -> None:
        if self.pipelined and wrote:
            if self.shadow is not None:
                self.buffers.free(self.shadow)
        self.shadow = None

    def scale_master(self, g: SubGroup, factor: float) -> None:
        staged = None
        if g.master is None:
            staged = self.buffers.allocate(g.numel)  # clean: near miss, freed when it was staged
            if staged is None:
                logger.warning("group %d not scaled", g.gid)
                return
        target = g.master if staged is None else staged
        target[: g.numel].mul_(factor)
        if staged is not None:
            self.buffers.free(staged)
