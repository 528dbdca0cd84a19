"""KV offload tiers: host slots, disk extents and the keys' write locks."""
from __future__ import annotations

import logging
import threading
import time
from queue import Empty, Queue
from types import TracebackType
from typing import Callable, Dict, List, Optional, Tuple, Type

logger = logging.getLogger(__name__)


class Tier:
    """Slots of one offload tier. Subclasses decide where the bytes live."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self._open_slots = list(range(slots))
        self._mu = threading.Lock()

    def allocate(self) -> int:
        with self._mu:
            return self._open_slots.pop() if self._open_slots else -1

    def free(self, slot: int) -> None:
        with self._mu:
            self._open_slots.append(slot)

    def write(self, slot: int, data: bytes) -> bool:
        raise NotImplementedError

    def read(self, slot: int) -> bytes:
        raise NotImplementedError


class HostTier(Tier):
    def __init__(self, slots: int) -> None:
        super().__init__("host", slots)
        self._mem: Dict[int, bytes] = {}

    def write(self, slot: int, data: bytes) -> bool:
        self._mem[slot] = data
        return True

    def read(self, slot: int) -> bytes:
        return self._mem[slot]


class DiskTier(Tier):
    def __init__(self, path: str, slots: int, page: int) -> None:
        super().__init__("disk", slots)
        self.page = page
        self.file = open(path, "w+b")  # clean: the tier's file, closed by shutdown()

    def write(self, slot: int, data: bytes) -> bool:
        if len(data) > self.page:
            return False
        self.file.seek(slot * self.page)
        return self.file.write(data) == len(data)

    def read(self, slot: int) -> bytes:
        self.file.seek(slot * self.page)
        return self.file.read(self.page)

    def shutdown(self) -> None:
        self.file.close()


class KeyLocks:
    """Write locks for block hashes."""

    def __init__(self) -> None:
        self._held: Dict[int, float] = {}
        self._mu = threading.Lock()

    def try_lock(self, key: int) -> bool:
        with self._mu:
            if key in self._held:
                return False
            self._held[key] = time.monotonic()
            return True

    def unlock(self, key: int) -> None:
        with self._mu:
            self._held.pop(key, None)


class SlotGuard:
    """Holds a slot during a write; keep() hands it to the index."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.slot = -1
        self.kept = False

    def keep(self) -> int:
        self.kept = True
        return self.slot

    def __enter__(self) -> "SlotGuard":
        self.slot = self.tier.allocate()  # clean: near miss, freed by __exit__ unless keep() moved it on
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], exc: Optional[BaseException], tb: Optional[TracebackType]
    ) -> None:
        if self.kept or self.slot < 0:
            return
        self.tier.free(self.slot)


class OffloadStore:
    def __init__(self, host: Tier, disk: Tier) -> None:
        self.host = host
        self.disk = disk
        self.locks = KeyLocks()
        self.index: Dict[int, Tuple[Tier, int]] = {}
        self.staged: Dict[int, int] = {}
        self.jobs: "Queue[Tuple[int, int]]" = Queue()
        self.stopping = threading.Event()

    def store(self, key: int, data: bytes) -> bool:
        if key in self.index or not self.locks.try_lock(key):  # clean: near miss, finally unlocks
            return False
        try:
            with SlotGuard(self.host) as guard:  # clean: the guard frees it or the index keeps it
                if guard.slot < 0 or not self.host.write(guard.slot, data):
                    return False
                self.index[key] = (self.host, guard.keep())
                return True
        finally:
            self.locks.unlock(key)

    def evict(self, key: int) -> None:
        entry = self.index.pop(key, None)
        if entry is not None:
            tier, slot = entry
            tier.free(slot)

    def store_disk(self, key: int, data: bytes) -> bool:
        if not self.locks.try_lock(key):  # leak: a key already in the index returns while locked
            return False
        if key in self.index:
            return True
        slot = self.disk.allocate()  # leak: the slot of a failed write is neither indexed nor freed
        if slot < 0:
            self.locks.unlock(key)
            return False
        written = self.disk.write(slot, data)
        if written:
            self.index[key] = (self.disk, slot)
        self.locks.unlock(key)
        return written

    def promote(self, key: int) -> bool:
        """Moves a disk entry to the host."""
        tier, slot = self.index[key]
        if tier is not self.disk:
            return False
        target = self.host.allocate()  # clean: near miss, freed when the write fails, else indexed
        if target < 0:
            return False
        ok = self.host.write(target, self.disk.read(slot))
        old, new = (self.disk, slot), (self.host, target)
        keep, drop = (new, old) if ok else (old, new)
        self.index[key] = keep
        drop[0].free(drop[1])
        return ok

    # -- background writes ---------------------------------------------

    def stage(self, key: int, data: bytes) -> bool:
        slot = self.host.allocate()  # clean: near miss, queued, worker() or drain() frees it
        if slot < 0:
            return False
        self.host.write(slot, data)
        self.jobs.put((key, slot))
        return True

    def worker(self) -> None:
        while not self.stopping.is_set():
            try:
                key, slot = self.jobs.get(timeout=0.1)
            except Empty:
                continue
            self.store_disk(key, self.host.read(slot))
            self.host.free(slot)

    def drain(self) -> int:
        dropped = 0
        while not self.jobs.empty():
            _, slot = self.jobs.get_nowait()
            self.host.free(slot)
            dropped += 1
        return dropped

    def hold(self, key: int, data: bytes) -> bool:
        """A temporary host copy until commit() or discard()."""
        if key in self.staged:
            return True
        slot = self.host.allocate()  # leak: discard() clears the table without freeing the slots
        if slot < 0:
            return False
        self.host.write(slot, data)
        self.staged[key] = slot
        return True

    def commit(self, key: int) -> bool:
        slot = self.staged.pop(key)
        done = self.store_disk(key, self.host.read(slot))
        self.host.free(slot)
        return done

    def discard(self) -> None:
        if self.staged:
            logger.info("discarding %d staged blocks", len(self.staged))
        self.staged.clear()

    def compact(self, keys: List[int], order: Callable[[int], int]) -> int:
        """Rewrites disk entries in the given order."""
        moved = 0
        for key in sorted(keys, key=order):
            if not self.locks.try_lock(key):  # leak: keys that are not on disk continue without an unlock
                continue
            tier, slot = self.index.get(key, (self.host, -1))
            if tier is not self.disk:
                continue
            target = self.disk.allocate()  # leak: a target not below slot is neither used nor freed
            if 0 <= target < slot:
                self.disk.write(target, self.disk.read(slot))
                self.index[key] = (self.disk, target)
                self.disk.free(slot)
                moved += 1
            self.locks.unlock(key)
        return moved
