"""Snapshot registry: checkpoints on the shared disk stay while someone pins them."""
from __future__ import annotations

import contextlib
import enum
import logging
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import torch

log = logging.getLogger("snapshots")


class Missing(LookupError):
    pass


class Damaged(RuntimeError):
    pass


class Role(enum.Enum):
    POLICY = "policy"
    REFERENCE = "reference"
    REWARD = "reward"


class Pin:
    def __init__(self, registry: "SnapshotRegistry", step: int, path: Path):
        self._registry = registry
        self.step = step
        self.path = path
        self.released = False

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._registry._unpin(self.step)

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *exc) -> None:
        self.release()


@dataclass
class Snapshot:
    step: int
    path: Path
    pins: int = 0
    doomed: bool = False
    complete: bool = True


class SnapshotRegistry:
    def __init__(self, root: Path, keep: int = 3):
        self.root = root
        self.keep = keep
        self._lock = threading.RLock()
        self._snaps: dict[int, Snapshot] = {}

    def add(self, step: int, path: Path, complete: bool = True) -> None:
        with self._lock:
            if step in self._snaps:
                self._snaps[step].complete = complete
                return
            self._snaps[step] = Snapshot(step, path, complete=complete)
            for old in sorted(self._snaps)[: -self.keep]:
                self._doom(old)

    def pin(self, step: int) -> Pin:
        with self._lock:
            snap = self._snaps.get(step)
            if snap is None or snap.doomed:
                raise Missing(step)
            snap.pins += 1  # clean: the Pin is returned and takes the count back
            return Pin(self, step, snap.path)

    def pin_latest(self) -> Pin:
        with self._lock:
            if not self._snaps:
                raise Missing("latest")
            snap = self._snaps[max(self._snaps)]
            snap.pins += 1  # leak: Damaged is raised after the count went up
            if not snap.complete:
                raise Damaged(f"step {snap.step} is still being written")
            return Pin(self, snap.step, snap.path)

    def _unpin(self, step: int) -> None:
        with self._lock:
            snap = self._snaps[step]
            snap.pins -= 1
            if snap.doomed and snap.pins == 0:
                self._delete(snap)

    def _doom(self, step: int) -> None:
        snap = self._snaps[step]
        snap.doomed = True
        if snap.pins == 0:
            self._delete(snap)

    def _delete(self, snap: Snapshot) -> None:
        del self._snaps[snap.step]
        shutil.rmtree(snap.path, ignore_errors=True)

    def steps(self) -> list[int]:
        with self._lock:
            return [s for s, snap in self._snaps.items() if not snap.doomed]


def load_shard(pin: Pin, name: str) -> dict:
    file = pin.path / f"{name}.pt"
    if not file.exists():
        raise Damaged(f"{file} is absent")
    return torch.load(file, map_location="cpu")


class RoleTable:
    """Which snapshot serves which role at present."""

    def __init__(self, registry: SnapshotRegistry):
        self.registry = registry
        self._current: dict[Role, Pin] = {}

    def assign(self, role: Role, step: int) -> None:
        fresh = self.registry.pin(step)  # clean: near miss, the one before is released; drop() or close() releases this one
        before = self._current.get(role)
        self._current[role] = fresh
        if before is not None:
            before.release()

    def drop(self, role: Role) -> None:
        pin = self._current.pop(role, None)
        if pin:
            pin.release()

    def path(self, role: Role) -> Optional[Path]:
        pin = self._current.get(role)
        return pin.path if pin else None

    def close(self) -> None:
        for role in list(self._current):
            self.drop(role)


class ReferenceModel:
    """Frozen copy for the KL term; moves forward every few thousand steps."""

    def __init__(self, registry: SnapshotRegistry, step: int):
        self.registry = registry
        self.pin = registry.pin(step)  # leak: advance() rebinds self.pin without releasing this one
        self.weights: Optional[dict] = None

    def advance(self, step: int) -> None:
        if step <= self.pin.step:
            return
        self.pin = self.registry.pin(step)  # leak: the next advance() rebinds it
        self.weights = None

    def materialise(self) -> dict:
        if self.weights is None:
            self.weights = load_shard(self.pin, "model")
        return self.weights

    def close(self) -> None:
        self.weights = None
        self.pin.release()


class Watcher:
    """Polls for a new snapshot and holds it until the evaluator has fetched it."""

    def __init__(self, registry: SnapshotRegistry):
        self.registry = registry
        self.seen = -1
        self._held: Optional[Pin] = None

    def poll(self) -> bool:
        try:
            pin = self.registry.pin_latest()  # leak: an already seen step returns without releasing its pin
        except (Missing, Damaged):
            return False
        if pin.step == self.seen:
            return False
        self.seen = pin.step
        if self._held is not None:
            self._held.release()
        self._held = pin
        return True

    def fetch(self) -> Optional[Pin]:
        """The caller releases it."""
        pin, self._held = self._held, None
        return pin

    def close(self) -> None:
        if self._held is not None:
            self._held.release()


def average(registry: SnapshotRegistry, steps: list[int]) -> dict:
    acc: dict = {}
    with contextlib.ExitStack() as stack:
        pins = [stack.enter_context(registry.pin(s)) for s in steps]  # clean: the stack releases those that were entered
        for pin in pins:
            for k, v in load_shard(pin, "model").items():
                acc[k] = acc.get(k, 0) + v / len(pins)
    return acc


def publish(registry: SnapshotRegistry, step: int, engines) -> int:
    with registry.pin(step) as pin:  # clean: with statement
        weights = load_shard(pin, "model")
        return sum(bool(e.update_weights(weights)) for e in engines)


def best_of(registry: SnapshotRegistry, evaluate, floor: float) -> Optional[Pin]:
    """Returns the pinned winner or None."""
    best: Optional[Pin] = None
    best_score = floor
    for step in registry.steps():
        try:
            pin = registry.pin(step)  # clean: near miss, the loser of each comparison is released, the winner returned
        except Missing:
            continue
        score = evaluate(pin.path)
        if score > best_score:
            if best is not None:
                best.release()
            best, best_score = pin, score
        else:
            pin.release()
    return best


def promote(registry: SnapshotRegistry, evaluate, target: Path, floor: float) -> bool:
    winner = best_of(registry, evaluate, floor)  # leak: an existing target returns with the winner still pinned
    if winner is None:
        return False
    if target.exists():
        log.warning("%s exists, not promoted", target)
        return False
    with winner:
        shutil.copytree(winner.path, target)
    return True


def iter_shards(registry: SnapshotRegistry, step: int, names: list[str]) -> Iterator[tuple[str, dict]]:
    pin = registry.pin(step)  # clean: released in the finally of the generator
    try:
        for name in names:
            yield name, load_shard(pin, name)
    finally:
        pin.release()
