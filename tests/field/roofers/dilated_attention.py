"""LongNet style dilated attention: one sparse branch per (segment, rate)."""
from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None


class Workspace:
    __slots__ = ("nbytes", "storage")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = bytearray(nbytes) if torch is None else torch.empty(nbytes, dtype=torch.uint8)


class WorkspaceArena:
    """Size-ordered free list of scratch allocations."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._items: list[Workspace] = []
        self.live = 0

    def checkout(self, nbytes: int) -> Workspace:
        self.live += 1
        i = bisect.bisect_left(self._sizes, nbytes)
        if i < len(self._items):
            self._sizes.pop(i)
            return self._items.pop(i)
        return Workspace(nbytes)

    def checkin(self, ws: Workspace) -> None:
        i = bisect.bisect_left(self._sizes, ws.nbytes)
        self._sizes.insert(i, ws.nbytes)
        self._items.insert(i, ws)
        self.live -= 1

    def warm(self, sizes: Sequence[int]) -> None:
        held = [self.checkout(n) for n in sizes]  # clean: every one is checked in below
        for ws in held:
            self.checkin(ws)


@dataclass(frozen=True)
class Branch:
    segment: int
    rate: int


@dataclass
class Partial:
    ws: Workspace
    weight: float


class DilatedAttention:
    def __init__(
        self,
        arena: WorkspaceArena,
        branches: Sequence[Branch],
        head_dim: int,
        kernel: Callable[..., Any],
        deterministic: bool = False,
    ) -> None:
        self.arena = arena
        self.branches = list(branches)
        self.head_dim = head_dim
        self.kernel = kernel
        self.deterministic = deterministic
        self._lse = arena.checkout(4 * max(b.segment for b in branches))  # clean: checked in by close
        self._stage: Optional[Workspace] = None
        self._index: Optional[Workspace] = None

    def close(self) -> None:
        self.arena.checkin(self._lse)
        if self._stage is not None:
            self.arena.checkin(self._stage)
            self._stage = None
        if self._index is not None:
            self.arena.checkin(self._index)
            self._index = None

    def _nbytes(self, n: int, br: Branch) -> int:
        return 2 * self.head_dim * (-(-n // br.rate))

    def _ensure_stage(self, nbytes: int) -> Workspace:
        if self._stage is not None and self._stage.nbytes >= nbytes:
            return self._stage
        self._stage = self.arena.checkout(nbytes)  # leak: a stage too small is overwritten
        return self._stage

    def _ensure_index(self, nbytes: int) -> Workspace:
        if self._index is not None and self._index.nbytes < nbytes:
            self.arena.checkin(self._index)
            self._index = None
        if self._index is None:
            self._index = self.arena.checkout(nbytes)  # clean: near miss, the old one was checked in first
        return self._index

    def forward(self, q, k, v, gates: Sequence[float]):
        n = len(q)
        stage = self._ensure_stage(2 * n * self.head_dim)
        partials = []
        for br, gate in zip(self.branches, gates):
            ws = self.arena.checkout(self._nbytes(n, br))  # leak: partials of no weight are filtered out unreturned
            self.kernel(q, k, v, br, ws, stage)
            partials.append(Partial(ws, gate))
        partials = [p for p in partials if p.weight > 0.0]
        out = self._merge(partials)
        for p in partials:
            self.arena.checkin(p.ws)
        return out

    def forward_branch(self, q, k, v, br: Branch):
        n = len(q)
        idx = self._ensure_index(4 * n)
        ws = self.arena.checkout(self._nbytes(n, br))  # leak: the short-sequence return skips the check-in
        if n <= br.segment and br.rate == 1:
            return self.kernel(q, k, v, br, None, idx)
        out = self.kernel(q, k, v, br, ws, idx)
        self.arena.checkin(ws)
        return out

    def gather_heads(self, x):
        """One gather buffer per dilation rate."""
        bufs: dict[int, Workspace] = {}
        for br in self.branches:
            bufs[br.rate] = self.arena.checkout(self._nbytes(len(x), br))  # leak: branches that share a rate overwrite each other
        rows = [self.kernel(x, None, None, br, bufs[br.rate], None) for br in self.branches]
        for ws in bufs.values():
            self.arena.checkin(ws)
        return rows

    def scatter_heads(self, x):
        bufs: dict[int, Workspace] = {}
        for br in sorted(self.branches, key=lambda b: b.segment):
            if br.rate not in bufs:
                bufs[br.rate] = self.arena.checkout(self._nbytes(len(x), br))  # clean: near miss, one per rate and all checked in
            self.kernel(x, None, None, br, bufs[br.rate], None)
        while bufs:
            _, ws = bufs.popitem()
            self.arena.checkin(ws)

    def forward_or_reference(self, q, k, v, br: Branch, reference: Callable[..., Any]):
        ws = self.arena.checkout(self._nbytes(len(q), br))  # leak: kept when the kernel fails and the reference takes over
        try:
            out = self.kernel(q, k, v, br, ws, None)
            self.arena.checkin(ws)
            return out
        except RuntimeError:
            return reference(q, k, v, br)

    def backward(self, q, k, v, dout):
        n = len(q)
        dq = self.arena.checkout(4 * n * self.head_dim)  # clean: finally
        locks = None
        try:
            if self.deterministic:
                locks = self.arena.checkout(4 * n)  # clean: near miss, returned in finally under the None check
            return [self.kernel(q, k, v, br, dq, locks) for br in self.branches]
        finally:
            if locks is not None:
                self.arena.checkin(locks)
            self.arena.checkin(dq)

    @staticmethod
    def _merge(partials: Sequence[Partial]) -> float:
        return sum(p.weight for p in partials)
