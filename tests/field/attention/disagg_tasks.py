"""Disaggregated prefill: decode side keeps receive windows per request and task."""
from __future__ import annotations

import asyncio
import logging
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class Window:
    __slots__ = ("no", "data", "owner")

    def __init__(self, no: int, elems: int) -> None:
        self.no = no
        self.data = torch.zeros(elems)
        self.owner: Optional[str] = None


class WindowPool:
    def __init__(self, n: int, elems: int) -> None:
        self._q: "asyncio.LifoQueue[Window]" = asyncio.LifoQueue()
        for i in range(n):
            self._q.put_nowait(Window(i, elems))

    async def open_window(self, owner: str) -> Window:
        w = await self._q.get()
        w.owner = owner
        return w

    def open_window_now(self, owner: str) -> Optional[Window]:
        if self._q.empty():
            return None
        w = self._q.get_nowait()
        w.owner = owner
        return w

    def open_fresh(self, owner: str, floor: int) -> Optional[Window]:
        if self._q.empty():
            return None
        w = self._q.get_nowait()  # leak: a number under the floor is refused and the window stays off the queue
        if w.no < floor:
            return None
        w.owner = owner
        return w

    def close_window(self, w: Window) -> None:
        w.owner = None
        w.data.zero_()
        self._q.put_nowait(w)


class DecodeNode:
    def __init__(self, pool: WindowPool) -> None:
        self.pool = pool
        self.expecting: Dict[str, Window] = {}
        self.tasks: Dict[str, "asyncio.Task[float]"] = {}
        self.slots = asyncio.BoundedSemaphore(8)
        self.errors = 0

    async def expect(self, rid: str) -> bool:
        if rid in self.expecting:
            return False
        w = self.pool.open_window_now(rid)  # clean: arrived or forget takes it out of the table again
        if w is None:
            return False
        self.expecting[rid] = w
        return True

    async def arrived(self, rid: str, kv: torch.Tensor) -> Optional[torch.Tensor]:
        w = self.expecting.pop(rid, None)
        if w is None:
            self.errors += 1
            return None
        w.data[: kv.numel()].copy_(kv.flatten())
        out = w.data[: kv.numel()].clone()
        self.pool.close_window(w)
        return out

    def forget(self, rid: str) -> None:
        w = self.expecting.pop(rid, None)
        if w is not None:
            self.pool.close_window(w)

    async def _consume(self, w: Window, kv: torch.Tensor) -> float:
        try:
            w.data[: kv.numel()].copy_(kv.flatten())
            await asyncio.sleep(0)
            return float(w.data.sum())
        finally:
            self.pool.close_window(w)

    async def _peek(self, w: Window) -> float:
        await asyncio.sleep(0)
        return float(w.data.mean())

    async def start(self, rid: str, kv: torch.Tensor) -> None:
        w = await self.pool.open_window(rid)  # clean: near miss, the task closes the window it was given
        self.tasks[rid] = asyncio.create_task(self._consume(w, kv))

    async def start_peek(self, rid: str) -> None:
        w = await self.pool.open_window(rid)  # leak: the task only reads the window and nobody closes it
        self.tasks[rid] = asyncio.create_task(self._peek(w))

    async def join(self) -> List[float]:
        out = [await t for t in self.tasks.values()]
        self.tasks.clear()
        return out

    async def pull(self, rid: str, chunks: List[torch.Tensor]) -> float:
        total = 0.0
        for c in chunks:
            w = await self.pool.open_window(rid)  # leak: an empty chunk ends the transfer with the window open
            if c.numel() == 0:
                break
            w.data[: c.numel()].copy_(c)
            total += float(w.data.sum())
            self.pool.close_window(w)
        return total

    async def pull_strict(self, rid: str, chunks: List[torch.Tensor]) -> float:
        total = 0.0
        for c in chunks:
            w = await self.pool.open_window(rid)  # clean: near miss, closed before the raise as well
            if c.numel() > w.data.numel():
                self.pool.close_window(w)
                raise ValueError(f"chunk of {rid} too large")
            w.data[: c.numel()].copy_(c)
            total += float(w.data.sum())
            self.pool.close_window(w)
        return total

    async def limited(self, rid: str, kv: torch.Tensor) -> Optional[float]:
        await self.slots.acquire()  # leak: without a window None is returned and the permit kept
        w = self.pool.open_window_now(rid)  # clean: _consume closes it
        if w is None:
            return None
        val = await self._consume(w, kv)
        self.slots.release()
        return val

    async def limited_safe(self, rid: str, kv: torch.Tensor) -> Optional[float]:
        await self.slots.acquire()  # clean: near miss, the finally covers both returns
        try:
            w = self.pool.open_window_now(rid)  # clean: _consume closes it
            if w is None:
                return None
            return await self._consume(w, kv)
        finally:
            self.slots.release()

    async def mirror(self, rid: str, kv: torch.Tensor) -> Optional[float]:
        a = await self.pool.open_window(rid)  # clean: closed on both ways
        b = self.pool.open_fresh(rid + "/m", 1)  # clean: closed when it is not None
        if b is None:
            self.pool.close_window(a)
            return None
        a.data[: kv.numel()].copy_(kv.flatten())
        b.data.copy_(a.data)
        val = float((a.data * b.data).sum())
        self.pool.close_window(a)
        self.pool.close_window(b)
        return val

    async def race(self, rids: List[str]) -> int:
        ws = await asyncio.gather(*(self.pool.open_window(r) for r in rids))  # leak: only the first opened window is closed
        first = ws[0]
        no = first.no
        self.pool.close_window(first)
        return no
