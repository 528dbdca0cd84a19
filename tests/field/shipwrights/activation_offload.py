"""Offload of saved activations to pinned host memory.

Used through ``torch.autograd.graph.saved_tensors_hooks``: pack copies to the
host, unpack copies back.
"""
import itertools
import logging
from collections import deque
from typing import Any, Dict, Optional, Tuple

import torch
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger("offload")

_SIZES = [1 << p for p in range(16, 31)]


class PinnedArena:
    """Power-of-two pinned blocks."""

    def __init__(self, budget: int):
        self.budget = budget
        self.spent = 0
        self.bins: Dict[int, deque] = {s: deque() for s in _SIZES}

    @staticmethod
    def _bin(nbytes: int) -> int:
        for s in _SIZES:
            if nbytes <= s:
                return s
        raise ValueError(f"{nbytes} bytes is above the largest bin")

    def pin(self, nbytes: int) -> Optional[torch.Tensor]:
        size = self._bin(nbytes)
        if self.bins[size]:
            return self.bins[size].popleft()  # clean: returned to the caller
        if self.spent + size > self.budget:
            return None
        self.spent += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def unpin(self, block: torch.Tensor) -> None:
        self.bins[block.numel()].append(block)

    def pin_or_trim(self, nbytes: int) -> Optional[torch.Tensor]:
        block = self.pin(nbytes)  # clean: returned when there is one
        if block is not None:
            return block
        size = self._bin(nbytes)
        for s in reversed(_SIZES):
            while s != size and self.bins[s] and self.spent + size > self.budget:
                self.bins[s].popleft()  # clean: trimmed blocks are freed and the budget is lowered
                self.spent -= s
        return self.pin(nbytes)  # clean: returned

    def merge(self, size: int) -> bool:
        """Two idle blocks become one of the next size."""
        if len(self.bins[size]) < 2 or size * 2 not in self.bins:
            return False
        a = self.bins[size].popleft()  # leak: when the big block cannot be made a and b are not put back
        b = self.bins[size].popleft()  # leak: when the big block cannot be made a and b are not put back
        try:
            big = torch.empty(size * 2, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            return False
        del a, b
        self.bins[size * 2].append(big)
        return True


def _view(block: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return block[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)


class OffloadSession:
    """State of one forward/backward: keys are handed to autograd."""

    def __init__(self, arena: PinnedArena, stream: torch.cuda.Stream, min_bytes: int = 1 << 20):
        self.arena = arena
        self.stream = stream
        self.min_bytes = min_bytes
        self.keys = itertools.count()
        self.table: Dict[int, Tuple[torch.Tensor, torch.Tensor, torch.device]] = {}
        self.prefetched: Dict[int, torch.Tensor] = {}

    def pack(self, t: torch.Tensor) -> Any:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes or not t.is_cuda:
            return t
        block = self.arena.pin(nbytes)  # clean: in table until unpack() or purge()
        if block is None:
            return t
        host = _view(block, t)
        with torch.cuda.stream(self.stream):
            host.copy_(t, non_blocking=True)
        key = next(self.keys)
        self.table[key] = (block, host, t.device)
        return key

    def unpack(self, handle: Any) -> torch.Tensor:
        if isinstance(handle, torch.Tensor):
            return handle
        block, host, device = self.table.pop(handle)
        out = self.prefetched.pop(handle, None)
        if out is None:
            out = host.to(device)
        self.arena.unpin(block)
        return out

    def purge(self) -> None:
        for block, _, _ in self.table.values():
            self.arena.unpin(block)
        self.table.clear()
        self.prefetched.clear()


class CompressedSession(OffloadSession):
    """Packs in half precision with a per-tensor scale."""

    def pack(self, t: torch.Tensor) -> Any:
        if t.dtype != torch.float32:
            return super().pack(t)
        block = self.arena.pin(t.numel() * 2)  # leak: a tensor whose scale is zero is returned without unpin
        if block is None:
            return t
        scale = t.abs().amax()
        if scale == 0:
            return torch.zeros_like(t)
        host = block[: t.numel() * 2].view(torch.float16).view(t.shape)
        host.copy_(t / scale)
        key = next(self.keys)
        self.table[key] = (block, host, t.device)
        return key


class RotatingSession(OffloadSession):
    """Keeps only the newest tensor per (shape, dtype); for reversible nets."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.newest: Dict[tuple, torch.Tensor] = {}
        self.twins: Dict[tuple, torch.Tensor] = {}

    def keep(self, t: torch.Tensor) -> None:
        block = self.arena.pin(t.numel() * t.element_size())  # leak: the newest block of the same key is overwritten
        if block is None:
            return
        _view(block, t).copy_(t)
        self.newest[(tuple(t.shape), t.dtype)] = block

    def keep_exchanged(self, t: torch.Tensor) -> None:
        key = (tuple(t.shape), t.dtype)
        block = self.arena.pin(t.numel() * t.element_size())  # clean: near miss, the older one is unpinned when replaced
        if block is None:
            return
        _view(block, t).copy_(t)
        older, self.twins[key] = self.twins.get(key), block
        if older is not None:
            self.arena.unpin(older)

    def purge(self) -> None:
        super().purge()
        for kept in (self.newest, self.twins):
            while kept:
                self.arena.unpin(kept.popitem()[1])


class offload_activations:
    """with offload_activations(arena): loss = model(x); loss.backward()"""

    def __init__(self, arena: PinnedArena, reserve: int = 0):
        self.arena = arena
        self.reserve = reserve
        self.cushion: Optional[torch.Tensor] = None
        self.session = OffloadSession(arena, torch.cuda.Stream())
        self.hooks = saved_tensors_hooks(self.session.pack, self.session.unpack)

    def __enter__(self):
        if self.reserve:
            self.cushion = self.arena.pin(self.reserve)  # leak: __exit__ returns before unpin when the body raised
        self.hooks.__enter__()
        return self.session

    def __exit__(self, exc_type, exc, tb):
        self.hooks.__exit__(exc_type, exc, tb)
        self.session.purge()
        if exc_type is not None:
            logger.warning("offloaded region failed: %s", exc)
            return False
        if self.cushion is not None:
            self.arena.unpin(self.cushion)
            self.cushion = None
        return False


class staged:
    """One pinned block for the time of a with."""

    def __init__(self, arena: PinnedArena, nbytes: int):
        self.arena = arena
        self.nbytes = nbytes

    def __enter__(self):
        self.block = self.arena.pin_or_trim(self.nbytes)  # clean: __exit__ returns early only for None
        return self.block

    def __exit__(self, *exc):
        if self.block is None:
            return False
        self.arena.unpin(self.block)
        return False


def snapshot_activations(arena: PinnedArena, acts: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Host copies of named activations; the caller unpins through release_snapshot."""
    held: Dict[str, torch.Tensor] = {}
    for name, t in acts.items():
        block = arena.pin(t.numel() * t.element_size())  # clean: near miss, all in held and given back when one is missing
        if block is None:
            release_snapshot(arena, held)
            return {}
        _view(block, t).copy_(t)
        held[name] = block
    return held


def release_snapshot(arena: PinnedArena, held: Dict[str, torch.Tensor]) -> None:
    for block in held.values():
        arena.unpin(block)
    held.clear()


def compare_snapshots(arena, acts, other) -> float:
    held = snapshot_activations(arena, acts)  # leak: names that differ return before release_snapshot
    if set(held) != set(other):
        return float("inf")
    worst = max((float((_view(held[n], t) - other[n]).abs().max()) for n, t in acts.items()), default=0.0)
    release_snapshot(arena, held)
    return worst


def round_trip(arena: PinnedArena, t: torch.Tensor) -> Optional[torch.Tensor]:
    with staged(arena, t.numel() * t.element_size()) as block:  # clean: given back on leaving
        if block is None:
            return None
        host = _view(block, t)
        host.copy_(t)
        return host.to(t.device)
