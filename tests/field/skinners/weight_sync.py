"""Weight synchronisation from trainers to rollout workers.

The trainer publishes versions; a version's blobs stay alive while someone retains it. Workers
install a version, serve with it, and let it go when the next one is installed.
"""
from __future__ import annotations

import abc
import logging
import threading
import time
from collections import defaultdict
from typing import Callable, Dict, List, Optional, Tuple

import torch

log = logging.getLogger("weights")


class Refcounted(abc.ABC):
    def __init__(self) -> None:
        self._refs = 1
        self._guard = threading.Lock()

    def retain(self) -> "Refcounted":
        with self._guard:
            self._refs += 1
        return self

    def unretain(self) -> None:
        with self._guard:
            self._refs -= 1
            dead = self._refs == 0
        if dead:
            self._dispose()

    @abc.abstractmethod
    def _dispose(self) -> None:
        """Give the memory back."""


class BlobPool:
    def __init__(self, blob_numel: int, count: int):
        self.blob_numel = blob_numel
        self._blobs = [torch.empty(blob_numel) for _ in range(count)]
        self._mu = threading.Lock()

    def withdraw(self) -> Optional[torch.Tensor]:
        with self._mu:
            return self._blobs.pop() if self._blobs else None

    def deposit(self, blob: torch.Tensor) -> None:
        with self._mu:
            self._blobs.append(blob)


class Version(Refcounted):
    def __init__(self, number: int, pool: BlobPool):
        super().__init__()
        self.number = number
        self.pool = pool
        self.blobs: List[torch.Tensor] = []
        self.meta: Optional[torch.Tensor] = None

    def add(self, weights: torch.Tensor) -> bool:
        blob = self.pool.withdraw()  # clean: near miss, _dispose deposits every blob
        if blob is None:
            return False
        blob[:weights.numel()].copy_(weights.view(-1))
        self.blobs.append(blob)
        return True

    def annotate(self, values: torch.Tensor) -> bool:
        if self.meta is None:
            self.meta = self.pool.withdraw()  # leak: _dispose deposits the blobs and not the meta blob
        if self.meta is None:
            return False
        self.meta[:values.numel()].copy_(values)
        return True

    def _dispose(self) -> None:
        for blob in self.blobs:
            self.pool.deposit(blob)
        self.blobs = []


class VersionStore:
    """The newest version, and those that are still served."""

    def __init__(self, pool: BlobPool):
        self.pool = pool
        self._current: Optional[Version] = None
        self._mu = threading.Lock()
        self._staged: Dict[int, Version] = {}
        self._watch: Dict[int, List[Version]] = defaultdict(list)

    def publish(self, version: Version) -> None:
        """Takes over the caller's reference."""
        with self._mu:
            old, self._current = self._current, version
        if old is not None:
            old.unretain()

    def checkout(self) -> Optional[Version]:
        """The current version with a reference for the caller."""
        with self._mu:
            if self._current is None:
                return None
            return self._current.retain()  # clean: handed to the caller

    def stage(self, number: int, tensors: List[torch.Tensor]) -> bool:
        if number in self._staged:
            return False
        version = Version(number, self.pool)  # clean: near miss, given up when short, else kept for promote
        for tensor in tensors:
            if not version.add(tensor):
                version.unretain()
                return False
        self._staged[number] = version
        return True

    def promote(self, number: int) -> bool:
        version = self._staged.pop(number, None)
        if version is None:
            return False
        self.publish(version)
        return True

    def watch(self, worker: int) -> bool:
        version = self.checkout()  # clean: near miss, the list of the worker is emptied by unwatch
        if version is None:
            return False
        self._watch[worker].append(version)
        return True

    def unwatch(self, worker: int) -> int:
        versions = self._watch.pop(worker, [])
        for version in versions:
            version.unretain()
        return len(versions)

    def current_number(self) -> int:
        version = self.checkout()  # leak: the number is returned and the reference kept
        return version.number if version is not None else -1


class RolloutWorker:
    def __init__(self, store: VersionStore, load: Callable[[List[torch.Tensor]], None]):
        self.store = store
        self.load = load
        self._serving: Optional[Version] = None
        self._history: List[Version] = []
        self._baseline: Optional[Version] = None

    def refresh(self) -> bool:
        version = self.store.checkout()  # clean: near miss, the same version is given up, a new one is kept
        if version is None:
            return False
        if self._serving is not None and self._serving.number == version.number:
            version.unretain()
            return False
        old, self._serving = self._serving, version
        self.load(version.blobs)
        if old is not None:
            self._history.append(old)
        return True

    def trim(self, keep: int) -> None:
        while len(self._history) > keep:
            self._history.pop(0).unretain()

    def set_baseline(self) -> None:
        if self._serving is not None:
            self._baseline = self._serving.retain()  # leak: the baseline set before is overwritten

    def rebase_every(self, rounds: int, every: int) -> None:
        for i in range(rounds):
            self.refresh()
            if i % every == 0:
                self.set_baseline()

    def kl_to_baseline(self) -> float:
        if self._baseline is None or self._serving is None:
            return 0.0
        diffs = [float((a - b).pow(2).mean()) for a, b in zip(self._baseline.blobs, self._serving.blobs)]
        return sum(diffs) / max(len(diffs), 1)

    def stop(self) -> None:
        self.trim(0)
        if self._serving is not None:
            self._serving.unretain()
            self._serving = None
        if self._baseline is not None:
            self._baseline.unretain()
            self._baseline = None


class Broadcaster(threading.Thread):
    """Sends each version to all workers from one thread."""

    def __init__(self, store: VersionStore, send: Callable[[int, torch.Tensor], bool], world: int):
        super().__init__(daemon=True)
        self.store = store
        self.send = send
        self.world = world
        self._stopping = threading.Event()
        self._sent = -1

    def run(self) -> None:
        while not self._stopping.is_set():
            version = self.store.checkout()  # leak: continue on a version sent already keeps its reference
            if version is None:
                time.sleep(0.1)
                continue
            if version.number <= self._sent:
                time.sleep(0.1)
                continue
            for rank in range(self.world):
                for blob in version.blobs:
                    self.send(rank, blob)
            self._sent = version.number
            version.unretain()

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def average(store: VersionStore, other: Version) -> Optional[torch.Tensor]:
    """Mean of two versions in one blob, which belongs to the caller."""
    version = store.checkout()  # clean: given up on both ways on
    if version is None:
        return None
    blob = store.pool.withdraw()  # clean: handed to the caller
    if blob is None:
        version.unretain()
        return None
    torch.add(version.blobs[0], other.blobs[0], out=blob).mul_(0.5)
    version.unretain()
    return blob


def distance_to_average(store: VersionStore, other: Version) -> float:
    blob = average(store, other)  # clean: deposited below
    if blob is None:
        return 0.0
    value = float((blob - other.blobs[0]).norm())
    store.pool.deposit(blob)
    return value


def averaged_copy(store: VersionStore, other: Version) -> Optional[torch.Tensor]:
    blob = average(store, other)  # leak: cloned for the caller and dropped
    if blob is None:
        return None
    return blob.clone().requires_grad_(False)
