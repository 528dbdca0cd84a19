"""Offload of saved activations to pinned host memory between forward and backward."""
from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Iterator, NamedTuple

import torch


class Span(NamedTuple):
    offset: int
    nbytes: int


class PinnedArena:
    """First-fit allocator over one pinned host region. Spans are merged when they are freed."""

    def __init__(self, nbytes: int):
        self.base = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._holes: list[Span] = [Span(0, nbytes)]
        self.in_use = 0

    def malloc(self, nbytes: int) -> Span | None:
        need = (nbytes + 255) & ~255
        for i, hole in enumerate(self._holes):
            if hole.nbytes >= need:
                rest = Span(hole.offset + need, hole.nbytes - need)
                self._holes[i : i + 1] = [rest] if rest.nbytes else []
                self.in_use += need
                return Span(hole.offset, need)
        return None

    def free(self, span: Span) -> None:
        self.in_use -= span.nbytes
        self._holes.append(span)
        self._holes.sort()
        merged = [self._holes[0]]
        for s in self._holes[1:]:
            top = merged[-1]
            if top.offset + top.nbytes == s.offset:
                merged[-1] = Span(top.offset, top.nbytes + s.nbytes)
            else:
                merged.append(s)
        self._holes = merged

    def view(self, span: Span, like: torch.Tensor) -> torch.Tensor:
        raw = self.base[span.offset : span.offset + like.numel() * like.element_size()]
        return raw.view(like.dtype).view(like.shape)


@dataclass
class Packed:
    span: Span | None
    shape: torch.Size
    dtype: torch.dtype
    resident: torch.Tensor | None = None
    scale: float = 1.0


class OffloadHooks:
    """pack/unpack for torch.autograd.graph.saved_tensors_hooks."""

    def __init__(self, arena: PinnedArena, min_bytes: int = 1 << 16):
        self.arena = arena
        self.min_bytes = min_bytes

    def pack(self, t: torch.Tensor) -> Packed:
        nbytes = t.numel() * t.element_size()
        if nbytes < self.min_bytes:
            return Packed(None, t.shape, t.dtype, resident=t)
        span = self.arena.malloc(nbytes)  # clean: near miss, carried by Packed, unpack frees it whenever set
        if span is None:
            return Packed(None, t.shape, t.dtype, resident=t)
        self.arena.view(span, t).copy_(t, non_blocking=True)
        return Packed(span, t.shape, t.dtype)

    def unpack(self, p: Packed) -> torch.Tensor:
        if p.span is None:
            return p.resident
        out = torch.empty(p.shape, dtype=p.dtype, device="cuda")
        out.copy_(self.arena.view(p.span, out))
        self.arena.free(p.span)
        return out


class Fp8OffloadHooks:
    """Halves the host traffic of large activations by storing them in fp8 with a scale."""

    def __init__(self, arena: PinnedArena):
        self.arena = arena

    def pack(self, t: torch.Tensor) -> Packed:
        scale = float(t.abs().amax()) / 448.0
        span = self.arena.malloc(t.numel())  # leak: unpack frees only spans whose scale is above zero
        if span is None:
            return Packed(None, t.shape, t.dtype, resident=t)
        small = (t / scale if scale else t).to(torch.float8_e4m3fn)
        self.arena.view(span, small).copy_(small, non_blocking=True)
        return Packed(span, t.shape, t.dtype, scale=scale)

    def unpack(self, p: Packed) -> torch.Tensor:
        if p.span is None:
            return p.resident
        if p.scale == 0.0:
            return torch.zeros(p.shape, dtype=p.dtype, device="cuda")
        small = torch.empty(p.shape, dtype=torch.float8_e4m3fn, device="cuda")
        small.copy_(self.arena.view(p.span, small))
        self.arena.free(p.span)
        return small.to(p.dtype) * p.scale


class LayerOffloader:
    """Explicit offload per layer: stow after the layer ran, recall before its backward."""

    def __init__(self, arena: PinnedArena):
        self.arena = arena
        self.by_layer: dict[int, tuple[Span, torch.Tensor]] = {}
        self.aux: dict[int, Span] = {}

    def stow(self, layer: int, t: torch.Tensor) -> bool:
        old = self.by_layer.pop(layer, None)
        if old is not None:
            self.arena.free(old[0])
        span = self.arena.malloc(t.numel() * t.element_size())  # clean: recall or a second stow frees it
        if span is None:
            return False
        self.arena.view(span, t).copy_(t)
        self.by_layer[layer] = (span, t.new_empty(0))
        return True

    def recall(self, layer: int, like: torch.Tensor) -> torch.Tensor | None:
        entry = self.by_layer.pop(layer, None)
        if entry is None:
            return None
        like.copy_(self.arena.view(entry[0], like))
        self.arena.free(entry[0])
        return like

    def stow_rng(self, layer: int, state: torch.Tensor) -> None:
        span = self.arena.malloc(state.numel())  # leak: recall_rng takes it out of aux and only copies
        if span is not None:
            self.arena.view(span, state).copy_(state)
            self.aux[layer] = span

    def recall_rng(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        span = self.aux.pop(layer, None)
        if span is None:
            return torch.cuda.get_rng_state()
        return self.arena.view(span, like).clone()


@contextlib.contextmanager
def staging(arena: PinnedArena, nbytes: int) -> Iterator[Span | None]:
    span = arena.malloc(nbytes)  # clean: freed when the block ends
    try:
        yield span
    finally:
        if span is not None:
            arena.free(span)


@contextlib.contextmanager
def staging_pair(arena: PinnedArena, nbytes: int):
    front = arena.malloc(nbytes)  # leak: not freed where the back half is not to be had
    if front is None:
        yield None
        return
    back = arena.malloc(nbytes)  # clean: freed with the front after the block
    if back is None:
        yield None
        return
    try:
        yield front, back
    finally:
        arena.free(back)
        arena.free(front)


def upload_chunks(arena: PinnedArena, src: torch.Tensor, dst: torch.Tensor, chunk: int) -> int:
    """Copies pageable host memory to the device through a pinned window."""
    moved = 0
    with staging(arena, chunk * src.element_size()) as span:  # clean: the context manager frees it
        if span is None:
            dst.copy_(src)
            return src.numel()
        for at in range(0, src.numel(), chunk):
            part = src[at : at + chunk]
            win = arena.view(span, part)
            win.copy_(part)
            dst[at : at + part.numel()].copy_(win)
            moved += part.numel()
    return moved


def spill_if_needed(arena: PinnedArena, t: torch.Tensor, free_bytes: int) -> Span | None:
    """Moves t to the host when the device is short; the span belongs to the caller."""
    span = arena.malloc(t.numel() * t.element_size())  # leak: enough device memory, returns None over it
    if free_bytes > t.numel() * t.element_size() * 2:
        return None
    if span is not None:
        arena.view(span, t).copy_(t)
    return span


def checkpointed_block(arena: PinnedArena, fn, x: torch.Tensor, free_bytes: int) -> torch.Tensor:
    span = spill_if_needed(arena, x, free_bytes)  # clean: freed on the only path where it is not None
    y = fn(x)
    if span is not None:
        x.copy_(arena.view(span, x))
        arena.free(span)
    return y


def attach(arena: PinnedArena, owner: object, t: torch.Tensor) -> torch.Tensor | None:
    """A host copy that lives as long as its owner."""
    span = arena.malloc(t.numel() * t.element_size())  # clean: near miss, freed by the finalizer
    if span is None:
        return None
    weakref.finalize(owner, arena.free, span)
    host = arena.view(span, t)
    host.copy_(t)
    return host


def grow_window(arena: PinnedArena, want: int, floor: int) -> Span | None:
    """The largest span up to `want`, halving until it fits."""
    size = want
    while size >= floor:
        span = arena.malloc(size)  # clean: near miss, a None holds nothing, anything else is handed on
        if span is not None:
            return span
        size //= 2
    return None


def measure_window(arena: PinnedArena, want: int) -> int:
    span = grow_window(arena, want, 4096)  # leak: the size is reported, the span is never freed
    return span.nbytes if span else 0
