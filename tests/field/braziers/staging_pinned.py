"""Host staging through page-locked blocks for asynchronous copies."""
from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Optional

import torch


@dataclass(eq=False)
class HostBlock:
    nbytes: int
    storage: torch.Tensor

    def as_tensor(self, like: torch.Tensor) -> torch.Tensor:
        n = like.numel() * like.element_size()
        return self.storage[:n].view(like.dtype).view(like.shape)


class PinnedHostPool:
    """Page-locked blocks of one size; ``lend`` blocks the caller until one is there."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self.block_bytes = block_bytes
        self._cond = threading.Condition()
        self._blocks = [
            HostBlock(block_bytes, torch.empty(block_bytes, dtype=torch.uint8).pin_memory())
            for _ in range(count)
        ]

    def lend(self) -> HostBlock:
        with self._cond:
            while not self._blocks:
                self._cond.wait()
            return self._blocks.pop()

    def lend_nowait(self) -> Optional[HostBlock]:
        with self._cond:
            return self._blocks.pop() if self._blocks else None

    def reclaim(self, block: HostBlock) -> None:
        with self._cond:
            self._blocks.append(block)
            self._cond.notify()


class Uploader:
    """Host-to-device copies; blocks return to the pool once their event has fired."""

    def __init__(self, pool: PinnedHostPool, device: str = "cuda") -> None:
        self._pool = pool
        self._device = device
        self._pending: deque[tuple[Any, HostBlock]] = deque()

    def upload(self, t: torch.Tensor) -> torch.Tensor:
        self.poll()
        block = self._pool.lend()  # clean: near miss, queued with its event, reclaimed by poll or drain
        staged = block.as_tensor(t)
        staged.copy_(t)
        on_device = staged.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((event, block))
        return on_device

    def poll(self) -> None:
        while self._pending and self._pending[0][0].query():
            _, block = self._pending.popleft()
            self._pool.reclaim(block)

    def drain(self) -> None:
        for event, block in self._pending:
            event.synchronize()
            self._pool.reclaim(block)
        self._pending.clear()


class Downloader:
    """Device-to-host copies, delivered in order to a sink."""

    def __init__(self, pool: PinnedHostPool, sink: Callable[[torch.Tensor], None]) -> None:
        self._pool = pool
        self._sink = sink
        self._pending: deque[tuple[Any, HostBlock, torch.Tensor]] = deque()
        self.delivered = 0

    def submit(self, t: torch.Tensor) -> None:
        block = self._pool.lend()  # leak: deliver() passes a copy on and never reclaims the block
        staged = block.as_tensor(t)
        staged.copy_(t, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((event, block, staged))

    def deliver(self) -> int:
        n = 0
        while self._pending:
            event, block, staged = self._pending[0]
            if not event.query():
                break
            self._pending.popleft()
            self._sink(staged[: block.nbytes].clone())
            n += 1
        self.delivered += n
        return n


def copy_all(pool: PinnedHostPool, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One block is used for as long as the tensors fit; bigger ones go unpinned."""
    out: list[torch.Tensor] = []
    block = pool.lend()  # leak: an empty tensor ends the loop by return
    for t in tensors:
        if t.numel() == 0:
            return out
        if t.numel() * t.element_size() > pool.block_bytes:
            out.append(t.cpu())
            continue
        staged = block.as_tensor(t)
        staged.copy_(t)
        out.append(staged.clone())
    pool.reclaim(block)
    return out


def background_write(
    pool: PinnedHostPool, ex: ThreadPoolExecutor, t: torch.Tensor, path: str
) -> "Future[int]":
    block = pool.lend()  # clean: near miss, the done callback reclaims it
    staged = block.as_tensor(t)
    staged.copy_(t)

    def write() -> int:
        with open(path, "wb") as fh:  # clean: with block
            return fh.write(staged.numpy().tobytes())

    fut = ex.submit(write)
    fut.add_done_callback(lambda _f: pool.reclaim(block))
    return fut


def background_digest(pool: PinnedHostPool, ex: ThreadPoolExecutor, t: torch.Tensor) -> "Future[int]":
    block = pool.lend()  # leak: the task sums the block and nobody reclaims it
    block.as_tensor(t).copy_(t)
    return ex.submit(_digest_block, block, t.numel())


def _digest_block(block: HostBlock, n: int) -> int:
    return int(block.storage[:n].to(torch.int64).sum())


def split_copy(pool: PinnedHostPool, t: torch.Tensor, parts: int) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for piece in t.chunk(parts):
            block = pool.lend_nowait()  # clean: near miss, the exit stack reclaims it
            if block is None:
                out.append(piece.cpu())
                continue
            stack.callback(pool.reclaim, block)
            staged = block.as_tensor(piece)
            staged.copy_(piece)
            out.append(staged.clone())
    return out


def largest_piece(pool: PinnedHostPool, t: torch.Tensor, parts: int) -> Optional[torch.Tensor]:
    with contextlib.ExitStack() as stack:
        best: Optional[torch.Tensor] = None
        for piece in t.chunk(parts):
            block = pool.lend_nowait()  # leak: pieces below the threshold never reach the stack
            if block is None:
                break
            staged = block.as_tensor(piece)
            staged.copy_(piece)
            if float(staged.abs().max()) < 1e-6:
                continue
            stack.callback(pool.reclaim, block)
            if best is None or staged.norm() > best.norm():
                best = staged
        return best.clone() if best is not None else None


class HostMirror:
    """A host copy that lives as long as its owner object."""

    def __init__(self, pool: PinnedHostPool, owner: torch.nn.Module, t: torch.Tensor) -> None:
        block = pool.lend()  # clean: near miss, a finalizer on the owner reclaims it
        self.host = block.as_tensor(t)
        self.host.copy_(t)
        self._fin = weakref.finalize(owner, functools.partial(pool.reclaim, block))

    def refresh(self, t: torch.Tensor) -> None:
        self.host.copy_(t)

    def close(self) -> None:
        self._fin()


class DoubleStage:
    """Two blocks used in turn; ``rotate`` changes sides."""

    def __init__(self, pool: PinnedHostPool) -> None:
        self._pool = pool
        self._front = pool.lend()  # clean: near miss, rotates with the back, close() reclaims both sides
        self._back = pool.lend()  # clean: near miss, rotates with the front, close() reclaims both sides
        self._spill: Optional[HostBlock] = None

    def rotate(self) -> None:
        self._front, self._back = self._back, self._front

    def stage(self, t: torch.Tensor) -> torch.Tensor:
        staged = self._front.as_tensor(t)
        staged.copy_(t)
        return staged

    def stage_overflow(self, t: torch.Tensor) -> Optional[torch.Tensor]:
        if self._spill is None:
            self._spill = self._pool.lend_nowait()  # leak: close() reclaims the two sides only
        if self._spill is None:
            return None
        staged = self._spill.as_tensor(t)
        staged.copy_(t)
        return staged

    def close(self) -> None:
        self._pool.reclaim(self._front)
        self._pool.reclaim(self._back)
