"""Step-scoped scratch memory for mixed-precision training: frames, temporaries, scale tracking."""
from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

_log = logging.getLogger("arena")


class ArenaFull(RuntimeError):
    pass


@dataclass(eq=False)
class Block:
    start: int
    length: int
    live: bool = True


class StepArena:
    """Block allocator over one device allocation, with a free list by length."""

    def __init__(self, capacity: int):
        self.storage = torch.empty(capacity)
        self.capacity = capacity
        self._top = 0
        self._reuse: Dict[int, List[Block]] = {}
        self._live = 0
        self._open_frames = 0

    def carve(self, length: int) -> Block:
        bucket = self._reuse.get(length)
        if bucket:
            block = bucket.pop()
            block.live = True
        else:
            if self._top + length > self.capacity:
                raise ArenaFull(f"{length} elements asked for, {self.capacity - self._top} left")
            block = Block(self._top, length)
            self._top += length
        self._live += 1
        return block

    def retire(self, block: Block) -> None:
        block.live = False
        self._live -= 1
        self._reuse.setdefault(block.length, []).append(block)

    def data(self, block: Block) -> torch.Tensor:
        return self.storage[block.start:block.start + block.length]

    def open_frame(self) -> "Frame":
        self._open_frames += 1
        return Frame(self)

    def _close_frame(self) -> None:
        self._open_frames -= 1


class Frame:
    """All blocks cut from a frame are retired together."""

    def __init__(self, arena: StepArena):
        self._arena = arena
        self._blocks: List[Block] = []
        self._pinned: List[Block] = []

    def cut(self, length: int) -> torch.Tensor:
        block = self._arena.carve(length)  # clean: near miss, close retires every block of the frame
        self._blocks.append(block)
        return self._arena.data(block)

    def cut_pinned(self, length: int) -> torch.Tensor:
        block = self._arena.carve(length)  # leak: close walks _blocks only, pinned ones are never retired
        self._pinned.append(block)
        return self._arena.data(block)

    def close(self) -> None:
        for block in self._blocks:
            self._arena.retire(block)
        self._blocks.clear()
        self._arena._close_frame()

    def __enter__(self) -> "Frame":
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class Borrowed:
    """Context manager for one block; nests by counting."""

    def __init__(self, arena: StepArena, length: int):
        self._arena = arena
        self._length = length
        self._block: Optional[Block] = None
        self._depth = 0

    def __enter__(self) -> torch.Tensor:
        if self._depth == 0:
            self._block = self._arena.carve(self._length)  # clean: near miss, the outermost exit retires it
        self._depth += 1
        return self._arena.data(self._block)

    def __exit__(self, exc_type, exc, tb) -> bool:
        self._depth -= 1
        if self._depth > 0:
            return False
        self._arena.retire(self._block)
        self._block = None
        return False


class ScaleProbe:
    """Measures the largest exponent of a gradient in a scratch block."""

    def __init__(self, arena: StepArena, limit: float):
        self._arena = arena
        self._limit = limit
        self._block: Optional[Block] = None
        self.overflow = False

    def __enter__(self) -> "ScaleProbe":
        self._block = self._arena.carve(4096)  # leak: __exit__ returns before retire on an overflow
        return self

    def feed(self, grad: torch.Tensor) -> None:
        flat = grad.view(-1)[:4096]
        view = self._arena.data(self._block)[:flat.numel()]
        view.copy_(flat)
        self.overflow = self.overflow or float(view.abs().max()) > self._limit

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.overflow:
            _log.info("overflow above %.3g", self._limit)
            return False
        self._arena.retire(self._block)
        return False


def with_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(arena: StepArena, *args, **kwargs):
        frame = arena.open_frame()  # clean: closed in finally
        try:
            return fn(frame, *args, **kwargs)
        finally:
            frame.close()
    return wrapper


@with_frame
def cast_all(frame: Frame, grads: Sequence[torch.Tensor]) -> float:
    total = 0.0
    for grad in grads:
        tmp = frame.cut(grad.numel())
        tmp.copy_(grad.view(-1))
        total += float(tmp.pow(2).sum())
    return math.sqrt(total)


def unscale(arena: StepArena, grads: Sequence[torch.Tensor], scale: float) -> bool:
    frame = arena.open_frame()  # leak: returning False on a non-finite gradient leaves the frame open
    for grad in grads:
        tmp = frame.cut(grad.numel())
        torch.mul(grad.view(-1), 1.0 / scale, out=tmp)
        if not torch.isfinite(tmp).all():
            return False
        grad.view(-1).copy_(tmp)
    frame.close()
    return True


def clip(arena: StepArena, grads: Sequence[torch.Tensor], max_norm: float) -> float:
    with arena.open_frame() as frame:  # clean: with block
        norms = []
        for grad in grads:
            tmp = frame.cut(grad.numel())
            tmp.copy_(grad.view(-1))
            norms.append(float(tmp.norm()))
        total = math.sqrt(sum(n * n for n in norms))
        if total <= max_norm:
            return total
        for grad in grads:
            grad.mul_(max_norm / (total + 1e-6))
    return total


def moving_average(arena: StepArena, history: Sequence[torch.Tensor], decay: float) -> torch.Tensor:
    length = history[0].numel()
    current = arena.carve(length)  # clean: near miss, swapped with spare, both are retired at the end
    spare = arena.carve(length)  # clean: near miss, swapped with current, both are retired at the end
    arena.data(current).copy_(history[0].view(-1))
    for item in history[1:]:
        torch.lerp(item.view(-1), arena.data(current), decay, out=arena.data(spare))
        current, spare = spare, current
    out = arena.data(current).clone()
    arena.retire(current)
    arena.retire(spare)
    return out


def running_max(arena: StepArena, history: Sequence[torch.Tensor]) -> torch.Tensor:
    length = history[0].numel()
    current = arena.carve(length)  # leak: lost when the next block takes its name
    arena.data(current).copy_(history[0].view(-1))
    for item in history[1:]:
        nxt = arena.carve(length)  # leak: every block but the last is lost when current moves on
        torch.maximum(arena.data(current), item.view(-1), out=arena.data(nxt))
        current = nxt
    out = arena.data(current).clone()
    arena.retire(current)
    return out


def probe_overflow(arena: StepArena, grads: Sequence[torch.Tensor], limit: float) -> bool:
    with ScaleProbe(arena, limit) as probe:  # clean: near miss, the with is right, __exit__ is at fault
        for grad in grads:
            probe.feed(grad)
    return probe.overflow


def centred(arena: StepArena, grad: torch.Tensor) -> torch.Tensor:
    with Borrowed(arena, grad.numel()) as tmp:  # clean: with block
        tmp.copy_(grad.view(-1))
        tmp.sub_(tmp.mean())
        return tmp.clone().view_as(grad)


def temporary(arena: StepArena, source: torch.Tensor) -> Tuple[Block, torch.Tensor]:
    """A filled block and its view; the caller retires the block."""
    block = arena.carve(source.numel())  # clean: handed to the caller
    view = arena.data(block)
    view.copy_(source.view(-1))
    return block, view


def rms(arena: StepArena, tensor: torch.Tensor) -> float:
    _, view = temporary(arena, tensor)  # leak: the block is thrown away, only the view is kept
    view.pow_(2)
    return math.sqrt(float(view.mean()))
