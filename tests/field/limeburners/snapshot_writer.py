"""Asynchronous checkpoint snapshots.

State is copied to host staging areas, and a writer thread stores them.  Areas come from a small bank; the
bytes in flight are limited by a budget that is charged before the copy and refunded after the write.
"""
from __future__ import annotations

import concurrent.futures as cf
import hashlib
import os
import threading
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Mapping, Optional, Tuple

import torch


class ByteBudget:
    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._cv = threading.Condition()

    def charge(self, n: int, wait: bool = True) -> bool:
        with self._cv:
            while self.used + n > self.limit:
                if not wait:
                    return False
                self._cv.wait()
            self.used += n
            return True

    def refund(self, n: int) -> None:
        with self._cv:
            self.used -= n
            self._cv.notify_all()


class AreaBank:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._areas: List[bytearray] = [bytearray(nbytes) for _ in range(count)]
        self._sem = threading.Semaphore(count)

    def rent(self) -> bytearray:
        self._sem.acquire()  # clean: near miss, end_rent releases the semaphore
        return self._areas.pop()

    def end_rent(self, area: bytearray) -> None:
        self._areas.append(area)
        self._sem.release()

    def rent_if_idle(self) -> Optional[bytearray]:
        if not self._sem.acquire(blocking=False):  # clean: near miss, end_rent releases the semaphore
            return None
        return self._areas.pop()

    def rent_large(self, nbytes: int) -> Optional[bytearray]:
        """An area of at least nbytes."""
        area = self.rent_if_idle()  # leak: one that is too small is neither returned nor put back
        if area is None or len(area) < nbytes:
            return None
        return area


@dataclass
class Piece:
    name: str
    area: bytearray
    nbytes: int
    digest: str = ""


@dataclass
class Snapshot:
    step: int
    pieces: List[Piece] = field(default_factory=list)
    committed: bool = False


def copy_in(bank: AreaBank, name: str, t: torch.Tensor) -> Piece:
    """The piece's area belongs to the caller."""
    area = bank.rent()  # clean: in the piece that is returned
    raw = t.detach().cpu().numpy().tobytes()
    area[: len(raw)] = raw
    return Piece(name, area, len(raw))


def end_piece(bank: AreaBank, piece: Piece) -> None:
    bank.end_rent(piece.area)


class SnapshotWriter:
    def __init__(self, bank: AreaBank, budget: ByteBudget, root: str):
        self.bank = bank
        self.budget = budget
        self.root = root
        self.pool = cf.ThreadPoolExecutor(2)
        self.open: Dict[int, Snapshot] = {}
        self.last_good = -1

    def take(self, step: int, state: Mapping[str, torch.Tensor]) -> Snapshot:
        snap = Snapshot(step)
        for name, t in state.items():
            self.budget.charge(t.numel() * t.element_size())  # clean: refunded with the piece
            snap.pieces.append(copy_in(self.bank, name, t))  # clean: near miss, write or abandon ends them
        self.open[step] = snap
        return snap

    def _drop(self, piece: Piece) -> None:
        self.budget.refund(piece.nbytes)
        end_piece(self.bank, piece)

    def write(self, snap: Snapshot) -> None:
        folder = os.path.join(self.root, f"step-{snap.step}")
        os.makedirs(folder, exist_ok=True)
        while snap.pieces:
            piece = snap.pieces.pop()
            with open(os.path.join(folder, piece.name), "wb") as fh:  # clean: closed by the with
                fh.write(memoryview(piece.area)[: piece.nbytes])
            self._drop(piece)
        snap.committed = True
        self.last_good = max(self.last_good, snap.step)
        self.open.pop(snap.step, None)

    def abandon(self, step: int) -> None:
        snap = self.open.pop(step, None)
        if snap is None:
            return
        for piece in snap.pieces:
            self._drop(piece)
        snap.pieces.clear()

    def write_async(self, step: int, state: Mapping[str, torch.Tensor]) -> cf.Future:
        snap = self.take(step, state)  # clean: near miss, written by the pool's task
        return self.pool.submit(self.write, snap)

    def take_selected(self, step: int, state: Mapping[str, torch.Tensor], keep: Callable[[str], bool]) -> int:
        """A light snapshot of selected tensors."""
        snap = Snapshot(step)
        for name, t in state.items():
            piece = copy_in(self.bank, name, t)  # leak: one that is not kept is skipped with its area
            if not keep(name):
                continue
            self.budget.charge(piece.nbytes)  # clean: refunded with the piece
            snap.pieces.append(piece)
        self.open[step] = snap
        return len(snap.pieces)

    def emergency(self, step: int, state: Mapping[str, torch.Tensor], grace: int) -> int:
        """On SIGTERM: as much as fits, without waiting."""
        saved = 0
        for name, t in state.items():
            n = t.numel() * t.element_size()
            if not self.budget.charge(n, wait=False):  # leak: without an idle area the charge stays
                break
            area = self.bank.rent_if_idle()  # clean: end_rent below, or None
            if area is None:
                break
            area[:n] = t.detach().cpu().numpy().tobytes()
            with open(os.path.join(self.root, f"sos-{step}-{name}"), "wb") as fh:  # clean: closed by the with
                fh.write(memoryview(area)[:n])
            self.bank.end_rent(area)
            self.budget.refund(n)
            saved += 1
            if saved >= grace:
                break
        return saved

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for step in list(self.open):
            self.abandon(step)


def fingerprint(bank: AreaBank, state: Mapping[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(state):
        piece = copy_in(bank, name, state[name])  # leak: hashed, then overwritten
        h.update(name.encode())
        h.update(memoryview(piece.area)[: piece.nbytes])
    return h.hexdigest()


class EmaTrack:
    """Exponential average held in rented areas, one per parameter; `reset` begins anew."""

    def __init__(self, bank: AreaBank, decay: float):
        self.bank = bank
        self.decay = decay
        self.areas: Dict[str, Piece] = {}
        self.frozen: Optional[Piece] = None

    def start(self, name: str, t: torch.Tensor) -> None:
        if name in self.areas:
            end_piece(self.bank, self.areas.pop(name))
        self.areas[name] = copy_in(self.bank, name, t)  # clean: start or reset ends it

    def freeze(self, name: str, t: torch.Tensor) -> None:
        self.frozen = copy_in(self.bank, name, t)  # leak: thaw and reset only clear the field

    def thaw(self) -> Optional[str]:
        name = self.frozen.name if self.frozen else None
        self.frozen = None
        return name

    def reset(self) -> None:
        for piece in self.areas.values():
            end_piece(self.bank, piece)
        self.areas.clear()
        self.frozen = None


def upload_snapshot(writer: SnapshotWriter, step: int, state, put: Callable[[str, bytes], bool]) -> bool:
    snap = writer.take(step, state)  # clean: near miss, abandon drops the pieces on both ways
    ok = True
    for piece in snap.pieces:
        if not put(piece.name, bytes(piece.area[: piece.nbytes])):
            ok = False
            break
    writer.abandon(step)
    return ok


def stage_flagged(bank: AreaBank, t: torch.Tensor, area: Optional[bytearray] = None) -> int:
    """Stages into the given area or into one of its own."""
    own = area is None
    if own:
        area = bank.rent()  # clean: near miss, ended when it is our own
    raw = t.detach().cpu().numpy().tobytes()
    area[: len(raw)] = raw
    total = sum(area[: len(raw)])
    if own:
        bank.end_rent(area)
    return total


def stage_or_reuse(bank: AreaBank, t: torch.Tensor, cached: Optional[bytearray]) -> Tuple[int, bool]:
    """As stage_flagged, with an area that is used when it is large enough."""
    n = t.numel() * t.element_size()
    area = cached
    fresh = False
    if cached is None or len(cached) < n:
        area = bank.rent()  # leak: ended only if there was no cached one, not if that was too small
        fresh = True
    area[:n] = t.detach().cpu().numpy().tobytes()
    total = sum(area[:n])
    if cached is None:
        bank.end_rent(area)
    return total, fresh
