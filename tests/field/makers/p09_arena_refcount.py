"""Reference-counted arena segments for activation checkpointing."""
from __future__ import annotations

import threading
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch


class Segment:
    """A region of the arena. retain/release count its users."""

    def __init__(self, arena: "Arena", offset: int, numel: int) -> None:
        self.arena = arena
        self.offset = offset
        self.numel = numel
        self.refs = 1

    def retain(self) -> "Segment":
        self.refs += 1
        return self

    def release(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.arena._recycle(self)

    def tensor(self, shape: Sequence[int]) -> torch.Tensor:
        return self.arena.memory[self.offset : self.offset + self.numel].view(*shape)


class Arena:
    """First-fit arena over one flat tensor."""

    def __init__(self, numel: int, device) -> None:
        self.memory = torch.empty(numel, device=device)
        self._holes: List[Tuple[int, int]] = [(0, numel)]
        self._mutex = threading.Lock()

    def carve(self, numel: int) -> Optional[Segment]:
        with self._mutex:  # clean: with block
            for i, (offset, size) in enumerate(self._holes):
                if size < numel:
                    continue
                if size == numel:
                    self._holes.pop(i)  # clean: the whole hole becomes the segment
                else:
                    self._holes[i] = (offset + numel, size - numel)
                return Segment(self, offset, numel)
        return None

    def _recycle(self, seg: Segment) -> None:
        with self._mutex:  # clean: with block
            self._holes.append((seg.offset, seg.numel))
            self._holes.sort()
            merged: List[Tuple[int, int]] = []
            for offset, size in self._holes:
                if merged and merged[-1][0] + merged[-1][1] == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((offset, size))
            self._holes = merged


class SavedActivations:
    """What backward needs; owns one reference per saved segment."""

    def __init__(self) -> None:
        self._saved: Dict[str, Segment] = {}

    def save(self, name: str, seg: Segment) -> None:
        old = self._saved.get(name)
        self._saved[name] = seg.retain()  # clean: near miss, the old reference is released next
        if old is not None:
            old.release()

    def save_all(self, named: Dict[str, Segment]) -> None:
        for name, seg in named.items():
            if name.startswith("_"):
                continue
            self._saved.setdefault(name, seg.retain())  # leak: setdefault keeps an existing entry and the new reference is lost

    def peek(self, name: str, shape: Sequence[int]) -> Optional[torch.Tensor]:
        seg = self._saved.get(name)
        return None if seg is None else seg.tensor(shape)

    def share(self, name: str) -> Optional[Segment]:
        seg = self._saved.get(name)
        return seg.retain() if seg is not None else None  # clean: the reference belongs to the caller

    def free_all(self) -> None:
        while self._saved:
            _, seg = self._saved.popitem()  # clean: released
            seg.release()


class CheckpointedBlock:
    def __init__(self, arena: Arena, fn: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
        self.arena = arena
        self.fn = fn
        self.name = name

    def forward(self, x: torch.Tensor, saved: SavedActivations) -> torch.Tensor:
        seg = self.arena.carve(x.numel())  # clean: near miss, saved keeps its own reference and this one is released
        if seg is None:
            return self.fn(x)
        seg.tensor(x.shape).copy_(x)
        saved.save(self.name, seg)
        seg.release()
        return self.fn(x)

    def forward_inplace(self, x: torch.Tensor, saved: SavedActivations) -> torch.Tensor:
        seg = self.arena.carve(x.numel())  # leak: save retains again and the carve reference stays
        if seg is None:
            return self.fn(x)
        view = seg.tensor(x.shape)
        view.copy_(x)
        saved.save(self.name, seg)
        return self.fn(view)

    def backward(self, saved: SavedActivations, grad: torch.Tensor) -> Optional[torch.Tensor]:
        seg = saved.share(self.name)  # leak: not released when the shapes disagree
        if seg is None:
            return None
        if seg.numel != grad.numel():
            return None
        x = seg.tensor(grad.shape).clone().requires_grad_(True)
        with torch.enable_grad():
            y = self.fn(x)
        y.backward(grad)
        seg.release()
        return x.grad


def iter_chunks(arena: Arena, x: torch.Tensor, chunk: int) -> Iterator[torch.Tensor]:
    seg = arena.carve(chunk * x.shape[1])  # clean: near miss, finally covers a consumer that stops early
    if seg is None:
        yield from x.split(chunk)
        return
    try:
        for part in x.split(chunk):
            view = arena.memory[seg.offset : seg.offset + part.numel()].view(part.shape)
            view.copy_(part)
            yield view
    finally:
        seg.release()


def defragment(arena: Arena, live: List[Segment], shapes: List[Sequence[int]]) -> int:
    moved = 0
    for i, seg in enumerate(live):
        target = arena.carve(seg.numel)  # leak: a target that lies behind is left carved
        if target is None:
            break
        if target.offset < seg.offset:
            target.tensor(shapes[i]).copy_(seg.tensor(shapes[i]))
            seg.release()
            live[i] = target
            moved += 1
    return moved
