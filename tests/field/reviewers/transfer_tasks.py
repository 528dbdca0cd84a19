"""Asynchronous KV transfers: windows of in-flight descriptors, futures and callbacks."""
from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable

import torch


class DescriptorRing:
    """Transfer descriptors; `grab` one, fill it, `retire` it after completion."""

    def __init__(self, depth: int):
        self._spare = list(range(depth))
        self.slots: list[torch.Tensor | None] = [None] * depth

    def grab(self) -> int | None:
        if not self._spare:
            return None
        return self._spare.pop()  # clean: handed out

    def grab_filled(self, t: torch.Tensor) -> int | None:
        if not self._spare:
            return None
        d = self._spare.pop()  # leak: an empty tensor makes it return None without putting the descriptor back
        if t.numel() == 0:
            return None
        self.slots[d] = t
        return d

    def retire(self, d: int) -> None:
        self.slots[d] = None
        self._spare.append(d)


@dataclass
class Transfer:
    desc: int
    future: Future


class TransferEngine:
    def __init__(self, ring: DescriptorRing, workers: int = 2):
        self.ring = ring
        self.executor = ThreadPoolExecutor(workers)
        self.inflight: dict[str, Transfer] = {}
        self.unacked: list[int] = []
        self.tasks: set[asyncio.Task] = set()
        self.window = asyncio.Semaphore(8)

    def _copy(self, d: int, dst: torch.Tensor) -> int:
        src = self.ring.slots[d]
        if src is not None:
            dst.copy_(src)
        return d

    def send(self, t: torch.Tensor, dst: torch.Tensor) -> bool:
        d = self.ring.grab()  # clean: near miss, the done callback retires it whatever the result
        if d is None:
            return False
        self.ring.slots[d] = t
        fut = self.executor.submit(self._copy, d, dst)
        fut.add_done_callback(lambda _f, d=d: self.ring.retire(d))
        return True

    def send_notify(self, t: torch.Tensor, dst: torch.Tensor, notify: Callable[[int], None] | None) -> bool:
        d = self.ring.grab()  # leak: without `notify` no callback is attached and nobody retires the descriptor
        if d is None:
            return False
        self.ring.slots[d] = t
        fut = self.executor.submit(self._copy, d, dst)
        if notify is not None:

            def on_done(_f: Future) -> None:
                notify(d)
                self.ring.retire(d)

            fut.add_done_callback(on_done)
        return True

    def start(self, key: str, t: torch.Tensor, dst: torch.Tensor) -> bool:
        if key in self.inflight:
            return False
        d = self.ring.grab()  # clean: near miss, owned by the Transfer in `inflight`, retired by poll()
        if d is None:
            return False
        self.ring.slots[d] = t
        self.inflight[key] = Transfer(d, self.executor.submit(self._copy, d, dst))
        return True

    def poll(self) -> list[str]:
        done = [k for k, tr in self.inflight.items() if tr.future.done()]
        for k in done:
            tr = self.inflight.pop(k)
            self.ring.retire(tr.desc)
        return done

    def restart(self, key: str, t: torch.Tensor, dst: torch.Tensor) -> bool:
        d = self.ring.grab()  # leak: a transfer already in flight under the key is overwritten with its descriptor
        if d is None:
            return False
        self.ring.slots[d] = t
        self.inflight[key] = Transfer(d, self.executor.submit(self._copy, d, dst))
        return True

    def send_unacked(self, tensors: list[torch.Tensor], dst: torch.Tensor) -> int:
        n = 0
        for t in tensors:
            d = self.ring.grab()  # leak: collected in `unacked`, which shutdown() clears without retiring
            if d is None:
                break
            self.ring.slots[d] = t
            self._copy(d, dst)
            self.unacked.append(d)
            n += 1
        return n

    def send_blocking(self, tensors: list[torch.Tensor], dst: torch.Tensor) -> int:
        n = 0
        for t in tensors:
            d = self.ring.grab()  # clean: retired in the same round
            if d is None:
                break
            self.ring.slots[d] = t
            self._copy(d, dst)
            self.ring.retire(d)
            n += 1
        return n

    async def pull(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        await self.window.acquire()  # leak: a shape mismatch returns with the window permit taken
        if dst.shape != src.shape:
            return False
        dst.copy_(src)
        self.window.release()
        return True

    async def pull_in_background(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        await self.window.acquire()  # clean: near miss, the spawned task releases the permit in its finally
        task = asyncio.create_task(self._pull_owned(dst, src))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _pull_owned(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Runs with one window permit, which it releases."""
        try:
            await asyncio.sleep(0)
            if dst.shape == src.shape:
                dst.copy_(src)
        finally:
            self.window.release()

    async def ping(self, d_timeout: float) -> bool:
        d = self.ring.grab()  # clean: near miss, the timeout handler falls through to the retire
        if d is None:
            return False
        ok = True
        try:
            await asyncio.wait_for(asyncio.sleep(0), d_timeout)
        except asyncio.TimeoutError:
            ok = False
        self.ring.retire(d)
        return ok

    def shutdown(self) -> None:
        self.executor.shutdown(wait=True)
        self.poll()
        self.unacked.clear()
