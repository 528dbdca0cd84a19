"""GPU cache of MoE experts with asynchronous loading."""
from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

ExpertId = tuple[int, int]


@dataclass(eq=False)
class Frame:
    """Space for the weights of one expert."""

    index: int
    tier: str
    pins: int = 0
    expert: ExpertId | None = None


class FramePool:
    """Frames in one bucket per tier ("fp8", "bf16")."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._buckets: dict[str, list[Frame]] = defaultdict(list)
        for tier, count in sizes.items():
            self._buckets[tier] = [Frame(i, tier) for i in range(count)]

    def fetch_frame(self, tier: str) -> Frame | None:
        bucket = self._buckets[tier]
        if not bucket:
            return None
        frame = bucket.pop()  # clean: to the caller
        frame.pins = 0
        frame.expert = None
        return frame

    def fetch_any(self, tiers: list[str]) -> Frame | None:
        """A frame of the first tier that has one."""
        for tier in tiers:
            frame = self.fetch_frame(tier)  # clean: near miss, a frame ends the loop and is returned
            if frame is not None:
                return frame
        return None

    def store_frame(self, frame: Frame) -> None:
        self._buckets[frame.tier].append(frame)


class ExpertCache:
    """Resident experts in least-recently-used order."""

    def __init__(self, pool: FramePool, load: Callable[[ExpertId, Frame], bool], max_loads: int = 2) -> None:
        self.pool = pool
        self.load = load
        self.resident: OrderedDict[ExpertId, Frame] = OrderedDict()
        self.io = asyncio.Semaphore(max_loads)

    def _evict(self, tier: str) -> bool:
        for expert, frame in self.resident.items():
            if frame.tier == tier and frame.pins == 0:
                del self.resident[expert]
                self.pool.store_frame(frame)
                return True
        return False

    def _frame_for(self, tier: str) -> Frame | None:
        frame = self.pool.fetch_frame(tier)  # clean: returned, None goes on to evict
        if frame is not None:
            return frame
        if not self._evict(tier):
            return None
        return self.pool.fetch_frame(tier)  # clean: returned

    async def ensure(self, expert: ExpertId, tier: str = "fp8") -> Frame | None:
        """Make an expert resident."""
        frame = self.resident.get(expert)
        if frame is not None:
            self.resident.move_to_end(expert)
            return frame
        async with self.io:  # clean: scoped
            if expert in self.resident:
                return self.resident[expert]
            frame = self._frame_for(tier)  # clean: near miss, a failed load stores it back, otherwise _evict() does
            if frame is None:
                return None
            if not self.load(expert, frame):
                self.pool.store_frame(frame)
                return None
            frame.expert = expert
            self.resident[expert] = frame
            return frame

    def preload(self, experts: list[ExpertId], tier: str) -> int:
        """Fill the cache before serving starts."""
        loaded = 0
        for expert in experts:
            if expert in self.resident:
                continue
            frame = self.pool.fetch_frame(tier)  # leak: an expert that fails to load is skipped with its frame
            if frame is None:
                break
            if not self.load(expert, frame):
                logger.warning("expert %s could not be loaded", expert)
                continue
            frame.expert = expert
            self.resident[expert] = frame
            loaded += 1
        return loaded

    def promote(self, expert: ExpertId) -> bool:
        """Move a hot expert to the bf16 tier."""
        current = self.resident.get(expert)
        if current is None or current.tier == "bf16":
            return False
        frame = self.pool.fetch_frame("bf16")  # leak: replaces the current frame, which is not stored back
        if frame is None:
            return False
        if not self.load(expert, frame):
            self.pool.store_frame(frame)
            return False
        frame.pins, frame.expert = current.pins, expert
        self.resident[expert] = frame
        return True

    def demote(self, expert: ExpertId) -> bool:
        """Move a cold expert back to the fp8 tier."""
        frame = self.pool.fetch_frame("fp8")  # clean: near miss, every refusal stores it, the old frame is stored at the end
        if frame is None:
            return False
        current = self.resident.get(expert)
        if current is None or current.pins or current.tier == "fp8" or not self.load(expert, frame):
            self.pool.store_frame(frame)
            return False
        frame.expert = expert
        self.resident[expert] = frame
        self.pool.store_frame(current)
        return True

    @asynccontextmanager
    async def pinned(self, experts: list[ExpertId]) -> AsyncIterator[list[Frame]]:
        """Keep experts resident during a forward pass."""
        frames: list[Frame] = []
        try:
            for expert in experts:
                frame = await self.ensure(expert)
                if frame is None:
                    break
                frame.pins += 1  # clean: near miss, pinned frames are in the list that the finally walks
                frames.append(frame)
            yield frames
        finally:
            for frame in frames:
                frame.pins -= 1

    async def verify(self, expert: ExpertId, compare: Callable[[Frame, Frame], bool]) -> bool:
        """Load an expert a second time and compare the bits."""
        await self.io.acquire()  # leak: an expert that is not resident returns without releasing the semaphore
        current = self.resident.get(expert)
        if current is None:
            return False
        spare = self.pool.fetch_any(["fp8", "bf16"])  # leak: after a failed load only the semaphore is released
        if spare is None or not self.load(expert, spare):
            self.io.release()
            return False
        same = compare(current, spare)
        self.pool.store_frame(spare)
        self.io.release()
        return same

    async def run_layer(self, layer: int, ids: list[int], hidden: torch.Tensor, kernel) -> torch.Tensor | None:
        async with self.pinned([(layer, i) for i in ids]) as frames:  # clean: scoped, the early return too
            if len(frames) < len(ids):
                return None
            return kernel(hidden, frames)
