"""Feature tensors come from the device tier first and spill to pinned host memory."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, Optional


@dataclass(eq=False)
class Chunk:
    tier: str
    index: int
    meta: int = -1


class ChunkTier:
    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._spare = list(range(count))
        self._bad: set = set()

    def grab(self) -> Optional[Chunk]:
        while self._spare:
            index = self._spare.pop()
            if index in self._bad:
                continue
            return Chunk(self.name, index)
        return None

    def drop(self, chunk: Chunk) -> None:
        self._spare.append(chunk.index)

    def retire(self, index: int) -> None:
        """ECC-flagged chunks never go out again."""
        self._bad.add(index)

    def spare(self) -> int:
        return len(self._spare)


class MetaSlots:
    """One descriptor per live chunk, shared with the kernels."""

    def __init__(self, count: int) -> None:
        self._open = list(range(count))

    def take_slot(self) -> int:
        return self._open.pop() if self._open else -1

    def return_slot(self, slot: int) -> None:
        self._open.append(slot)

    def open_slots(self) -> int:
        return len(self._open)


class TieredPool:
    def __init__(self, device: int, host: int, metas: int) -> None:
        self._device = ChunkTier("device", device)
        self._host = ChunkTier("host", host)
        self._meta = MetaSlots(metas)
        self._live_limit = threading.BoundedSemaphore(device + host)

    def _tier(self, chunk: Chunk) -> ChunkTier:
        return self._device if chunk.tier == "device" else self._host

    def obtain(self, device_only: bool = False) -> Optional[Chunk]:
        if not self._live_limit.acquire(blocking=False):  # leak: the device_only refusal returns None without releasing the permit
            return None
        chunk = self._device.grab()  # leak: without a descriptor None is returned and the chunk forgotten
        if chunk is None:
            if device_only:
                return None
            chunk = self._host.grab()  # leak: same return without a descriptor
        if chunk is None:
            self._live_limit.release()
            return None
        slot = self._meta.take_slot()  # clean: near miss, -1 is the failed take, else kept in the chunk and returned by give()
        if slot < 0:
            self._live_limit.release()
            return None
        chunk.meta = slot
        return chunk

    def obtain_host(self) -> Optional[Chunk]:
        if not self._live_limit.acquire(blocking=False):  # clean: near miss, each failure releases, give() releases later
            return None
        slot = self._meta.take_slot()  # clean: returned when the tier is empty, else kept in the chunk
        if slot < 0:
            self._live_limit.release()
            return None
        chunk = self._host.grab()  # clean: handed to the caller
        if chunk is None:
            self._meta.return_slot(slot)
            self._live_limit.release()
            return None
        chunk.meta = slot
        return chunk

    def give(self, chunk: Chunk) -> None:
        self._meta.return_slot(chunk.meta)
        chunk.meta = -1
        self._tier(chunk).drop(chunk)
        self._live_limit.release()


class FeatureBlocks:
    def __init__(self, pool: TieredPool) -> None:
        self.pool = pool
        self._blocks: Dict[str, Chunk] = {}

    def ensure(self, name: str) -> bool:
        if name not in self._blocks:
            chunk = self.pool.obtain()  # clean: near miss, stored only when absent, discard() gives it back
            if chunk is None:
                return False
            self._blocks[name] = chunk
        return True

    def discard(self, name: str) -> None:
        chunk = self._blocks.pop(name, None)
        if chunk is not None:
            self.pool.give(chunk)

    def demote(self, name: str) -> bool:
        """Moves a block from the device tier to host memory."""
        old = self._blocks.get(name)
        if old is None or old.tier == "host":
            return False
        new = self.pool.obtain_host()  # clean: near miss, replaces the old chunk which goes back
        if new is None:
            return False
        self._blocks[name] = new
        self.pool.give(old)
        return True

    def has_room(self) -> bool:
        chunk = self.pool.obtain(device_only=True)  # leak: room is tested by taking a chunk that is not given back
        return chunk is not None

    def clear(self) -> None:
        for name in list(self._blocks):
            self.discard(name)
