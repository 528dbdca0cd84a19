"""Streaming video inference: decode -> batch -> model -> encode.

Frames travel in tensors rented from a FrameDepot; each stage passes the frame
on to the next queue or returns it.
"""
from __future__ import annotations

import asyncio
import collections
import logging
from typing import AsyncIterator, Awaitable, Callable, Optional

import torch

log = logging.getLogger("frame_stream")


class DepotEmpty(Exception):
    ...


class FrameDepot:
    def __init__(self, count: int, height: int, width: int, device: str = "cpu"):
        slab = torch.empty(count, 3, height, width, dtype=torch.uint8, device=device)
        self._shelf: asyncio.Queue[torch.Tensor] = asyncio.Queue()
        for frame in slab.unbind(0):
            self._shelf.put_nowait(frame)

    async def draw(self) -> torch.Tensor:
        return await self._shelf.get()  # clean: returned to the caller

    def draw_nowait(self) -> torch.Tensor:
        try:
            return self._shelf.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            raise DepotEmpty from None

    def draw_or_none(self) -> Optional[torch.Tensor]:
        return None if self._shelf.empty() else self._shelf.get_nowait()  # clean: returned to the caller

    async def draw_matching(self, height: int) -> Optional[torch.Tensor]:
        frame = await self._shelf.get()  # leak: a frame of another height is swallowed by the depot itself
        if frame.shape[1] != height:
            return None
        return frame

    def restock(self, frame: torch.Tensor) -> None:
        self._shelf.put_nowait(frame)


class Decoder:
    def __init__(self, depot: FrameDepot, container):
        self.depot = depot
        self.container = container
        self.corrupt = 0

    async def decode(self, out: asyncio.Queue) -> None:
        for packet in self.container.packets():
            frame = await self.depot.draw()  # leak: a corrupt packet is skipped by continue with its frame
            if not self.container.decode_into(packet, frame):
                self.corrupt += 1
                continue
            await out.put((packet.pts, frame))
        await out.put(None)


class Batcher:
    def __init__(self, depot: FrameDepot, size: int):
        self.depot = depot
        self.size = size
        self.pending: collections.deque[tuple[int, torch.Tensor]] = collections.deque()

    async def collect(self, src: asyncio.Queue) -> AsyncIterator[tuple[list[int], torch.Tensor]]:
        while True:
            item = await src.get()
            if item is not None:
                self.pending.append(item)
            if self.pending and (item is None or len(self.pending) == self.size):
                stamps = [p for p, _ in self.pending]
                batch = torch.stack([f for _, f in self.pending]).float().div_(255)
                self.flush()
                yield stamps, batch
            if item is None:
                return

    def flush(self) -> None:
        while self.pending:
            _, frame = self.pending.popleft()
            self.depot.restock(frame)

    def pad(self) -> int:
        added = 0
        while len(self.pending) < self.size:
            blank = self.depot.draw_or_none()  # clean: queued in self.pending, which flush empties
            if blank is None:
                break
            self.pending.append((-1, blank.zero_()))
            added += 1
        return added


class Stage:
    """Runs fn over rented frames."""

    def __init__(self, depot: FrameDepot, fn: Callable[[torch.Tensor], torch.Tensor]):
        self.depot = depot
        self.fn = fn
        self.tasks: set[asyncio.Task] = set()

    async def once(self, src: torch.Tensor) -> torch.Tensor:
        frame = await self.depot.draw()  # clean: restocked in finally and only the copy leaves
        try:
            frame.copy_(src)
            return self.fn(frame).clone()
        finally:
            self.depot.restock(frame)

    async def blend(self, a: torch.Tensor, b: torch.Tensor) -> Optional[torch.Tensor]:
        fa = await self.depot.draw()  # leak: DepotEmpty for the second frame returns None and fa is not restocked
        try:
            fb = self.depot.draw_nowait()  # clean: restocked with fa
        except DepotEmpty:
            log.info("no second frame")
            return None
        fa.copy_(a)
        fb.copy_(b)
        out = (fa.float() + fb.float()) / 2
        self.depot.restock(fa)
        self.depot.restock(fb)
        return out

    async def submit(self, src: torch.Tensor, sink: Callable[[torch.Tensor], Awaitable[None]]) -> None:
        frame = await self.depot.draw()  # clean: near miss, owned by the task, whose body restocks in finally
        frame.copy_(src)
        task = asyncio.create_task(self._drive(frame, sink))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _drive(self, frame: torch.Tensor, sink) -> None:
        try:
            await sink(self.fn(frame))
        finally:
            self.depot.restock(frame)

    async def submit_lossy(self, src: torch.Tensor, sink) -> None:
        frame = await self.depot.draw()  # leak: the task's body catches ConnectionError and ends without restock
        frame.copy_(src)
        task = asyncio.create_task(self._drive_lossy(frame, sink))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _drive_lossy(self, frame: torch.Tensor, sink) -> None:
        try:
            await sink(self.fn(frame))
        except ConnectionError:
            log.warning("sink went away")
            return
        self.depot.restock(frame)

    def preview(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        frame = self._fitted(src)  # clean: restocked below when not None
        if frame is None:
            return None
        out = self.fn(frame).mean(0)
        self.depot.restock(frame)
        return out

    def _fitted(self, src: torch.Tensor) -> Optional[torch.Tensor]:
        frame = self.depot.draw_or_none()  # clean: returned to the caller or restocked on a mismatch of shapes
        if frame is None:
            return None
        if frame.shape != src.shape:
            self.depot.restock(frame)
            return None
        return frame.copy_(src)

    def brightness(self, src: torch.Tensor) -> float:
        frame = self._fitted(src)  # leak: only its mean is used, and no path restocks it
        return 0.0 if frame is None else float(frame.float().mean())
