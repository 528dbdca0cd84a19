"""Activation checkpointing with a host-side store.

Selected activations are copied to pinned host slabs in forward and brought back in backward.  Slabs come out
of an arena with size classes; a slab is addressed by a small handle that also knows the shape to restore.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)

_CLASSES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)


@dataclass
class Slab:
    storage: torch.Tensor
    size_class: int
    shape: Tuple[int, ...] = ()
    dtype: torch.dtype = torch.float16


class SlabArena:
    def __init__(self, per_class: int = 8):
        self._bins: Dict[int, List[Slab]] = {c: [] for c in _CLASSES}
        self._quota = {c: per_class for c in _CLASSES}
        self.live = 0

    def _fit(self, nbytes: int) -> int:
        for c in _CLASSES:
            if nbytes <= c:
                return c
        raise ValueError(f"activation of {nbytes} bytes is over the largest slab")

    def alloc(self, nbytes: int) -> Slab:
        c = self._fit(nbytes)
        self.live += 1
        if self._bins[c]:
            return self._bins[c].pop()
        return Slab(torch.empty(c, dtype=torch.uint8, pin_memory=True), c)

    def alloc_if_cheap(self, nbytes: int) -> Optional[Slab]:
        """Only from slabs that exist already."""
        c = self._fit(nbytes)
        if not self._bins[c]:
            return None
        self.live += 1
        return self._bins[c].pop()

    def free(self, slab: Slab) -> None:
        self.live -= 1
        slab.shape = ()
        if len(self._bins[slab.size_class]) < self._quota[slab.size_class]:
            self._bins[slab.size_class].append(slab)


def stash(arena: SlabArena, x: torch.Tensor) -> Slab:
    """Copies x into a slab that the caller has to free (usually by `unstash`)."""
    nbytes = x.numel() * x.element_size()
    slab = arena.alloc(nbytes)  # clean: returned to the caller
    slab.shape, slab.dtype = tuple(x.shape), x.dtype
    slab.storage[:nbytes].view(x.dtype).view(x.shape).copy_(x, non_blocking=True)
    return slab


def unstash(arena: SlabArena, slab: Slab, device) -> torch.Tensor:
    """Restores the tensor and frees the slab."""
    n = 1
    for d in slab.shape:
        n *= d
    flat = slab.storage[: n * torch.empty((), dtype=slab.dtype).element_size()].view(slab.dtype)
    x = flat.view(slab.shape).to(device, copy=True)
    arena.free(slab)
    return x


def peek(slab: Slab) -> torch.Tensor:
    return slab.storage.view(slab.dtype)[: max(1, sum(slab.shape))]


class LayerTape:
    """What one layer keeps between its forward and its backward."""

    def __init__(self, arena: SlabArena, name: str):
        self.arena = arena
        self.name = name
        self._inputs: List[Slab] = []
        self._mask: Optional[Slab] = None
        self._stats: Optional[Slab] = None

    def keep_input(self, x: torch.Tensor) -> None:
        self._inputs.append(stash(self.arena, x))  # clean: near miss, backward pops, discard frees the rest

    def keep_mask(self, mask: torch.Tensor) -> None:
        if self._mask is not None:
            self.arena.free(self._mask)
        self._mask = stash(self.arena, mask)  # clean: freed by the next keep_mask or by discard

    def keep_stats(self, mean: torch.Tensor) -> None:
        self._stats = stash(self.arena, mean)  # leak: a second keep_stats overwrites it, discard skips it

    def backward_input(self, device) -> torch.Tensor:
        slab = self._inputs.pop()
        return unstash(self.arena, slab, device)

    def discard(self) -> None:
        for slab in self._inputs:
            self.arena.free(slab)
        self._inputs.clear()
        if self._mask is not None:
            self.arena.free(self._mask)
            self._mask = None
        self._stats = None


class OffloadHooks:
    """pack/unpack pair for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, arena: SlabArena, min_bytes: int = 1 << 18):
        self.arena = arena
        self.min_bytes = min_bytes

    def pack(self, x: torch.Tensor):
        if not x.is_cuda or x.numel() * x.element_size() < self.min_bytes:
            return ("raw", x, x.device)
        slab = stash(self.arena, x)  # clean: near miss, travels in the packed triple, unpack frees it
        return ("slab", slab, x.device)

    def unpack(self, packed):
        kind, payload, device = packed
        if kind == "raw":
            return payload
        return unstash(self.arena, payload, device)


def checkpointed_block(arena: SlabArena, fn: Callable, x: torch.Tensor, keep: bool):
    """Runs fn; with `keep` the input stays stashed and the slab is handed out with the output."""
    slab = stash(arena, x)  # clean: near miss, returned with keep, freed without
    y = fn(x)
    if keep:
        return y, slab
    arena.free(slab)
    return y, None


def recompute_segment(arena: SlabArena, blocks: Sequence[Callable], x: torch.Tensor):
    """Forward over a segment with every second input stashed, then a sanity replay of these."""
    kept: List[Slab] = []
    for i, block in enumerate(blocks):
        x, slab = checkpointed_block(arena, block, x, keep=i % 2 == 0)  # clean: appended and unstashed below
        if slab is not None:
            kept.append(slab)
    drift = 0.0
    while kept:
        slab = kept.pop()
        replay = unstash(arena, slab, x.device)
        drift = max(drift, float(replay.abs().amax()))
    return x, drift


def segment_norms(arena: SlabArena, blocks: Sequence[Callable], x: torch.Tensor) -> List[float]:
    norms = []
    for block in blocks:
        x, slab = checkpointed_block(arena, block, x, keep=True)  # leak: only peeked at, then overwritten
        norms.append(float(peek(slab).float().norm()))
    return norms


def compare_precisions(arena: SlabArena, fn: Callable, x: torch.Tensor, tol: float) -> bool:
    """Runs fn in both precisions and compares, keeping the reference on the host meanwhile."""
    ref = stash(arena, fn(x.float()))  # leak: a shape mismatch returns without freeing it
    low = fn(x.bfloat16())
    if tuple(low.shape) != ref.shape:
        log.warning("shapes differ: %s and %s", tuple(low.shape), ref.shape)
        return False
    err = (unstash(arena, ref, x.device) - low.float()).abs().amax()
    return bool(err < tol)


def offload_qkv(arena: SlabArena, q, k, v) -> Optional[List[Slab]]:
    """All three or nothing, and only from warm slabs."""
    qs = arena.alloc_if_cheap(q.numel() * 2)  # clean: both rollbacks free it
    if qs is None:
        return None
    ks = arena.alloc_if_cheap(k.numel() * 2)  # leak: the rollback for a missing third frees only the first
    if ks is None:
        arena.free(qs)
        return None
    vs = arena.alloc_if_cheap(v.numel() * 2)  # clean: returned, or None
    if vs is None:
        arena.free(qs)
        return None
    return [qs, ks, vs]
