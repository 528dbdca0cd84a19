"""Blocks of host memory, and how a lease is laid over one so that the death of its storage is heard.

Every lease gets a storage of its own over the block's bytes, made by `torch.frombuffer` from a fresh
memoryview. torch keeps that memoryview until the storage itself dies, whoever refers to it: views, detached
and numpy and dlpack aliases, autograd. So a weak reference to the memoryview is told exactly once, exactly
when nothing can read the block through torch any more. The callback may run on any thread and inside the
garbage collector; it is `deque.append`, which takes no lock and runs no Python code.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from reference_modules.pool.size_classes import SizeClass

LARGE = 1 << 20
"""From here a block is a mapping of its own, which goes back to the system in one piece; below, heap memory.
"""
HUGE_PAGE = 1 << 21
ALIGNMENT = 64


class Memory(Protocol):
    """Where blocks come from. `make` raises MemoryError or OSError when there is none left."""

    clears: bool
    """Whether new memory reads as zeros."""

    def make(self, nbytes: int) -> memoryview:
        """Writable memory of this size, at least 64-byte aligned, freed when its last user is gone."""


class HostMemory:
    """Ordinary memory of this process.

    Mappings are private: Python's default for anonymous ones is shared, and then a forked child would write
    into its parent's tensors.
    """

    clears = True

    def make(self, nbytes: int) -> memoryview:
        """A mapping with huge pages where the block is large, an aligned part of a bytearray where it is
        small.
        """
        if nbytes < LARGE:
            return _aligned(bytearray(nbytes + ALIGNMENT), nbytes)
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)


def _aligned(heap: bytearray, nbytes: int) -> memoryview:
    start = -torch.frombuffer(heap, dtype=torch.uint8).data_ptr() % ALIGNMENT
    return memoryview(heap)[start : start + nbytes]


class Block:
    """Memory of one size that serves one lease after another."""

    __slots__ = (
        "__weakref__",
        "fresh",
        "idle_since",
        "memory",
        "parted",
        "requested",
        "reused",
        "signal",
        "size",
        "size_class",
    )

    def __init__(self, memory: memoryview, size_class: SizeClass, *, fresh: bool) -> None:
        self.memory = memory
        self.size = size_class.size
        self.size_class = size_class
        self.fresh = fresh
        """Nothing was written yet and the memory reads as zeros."""
        self.requested = 0
        """Bytes of the lease it serves now."""
        self.reused = False
        """It has served a second lease: keeping it was worth something."""
        self.signal: Signal | None = None
        """Set while a storage lies over the block."""
        self.parted = False
        """The lease is over, the storage not yet."""
        self.idle_since = 0.0


class Signal(weakref.ref[memoryview]):
    """Tells that the storage over `block` has died, by putting itself into the store's queue."""

    __slots__ = ("block",)
    block: Block


def lay_over(
    block: Block, nbytes: int, shape: Sequence[int], dtype: torch.dtype, died: deque[Signal]
) -> tuple[torch.Tensor, Signal]:
    """A fresh tensor whose storage is exactly the first `nbytes` of the block, and the signal that goes to
    `died` at its death.

    `resize_` and not `view`: a view carries its base along, and one made under no_grad may not be written
    in place later.
    """
    part = block.memory[:nbytes]
    signal = Signal(part, died.append)
    signal.block = block
    block.signal = signal
    tensor = torch.frombuffer(part, dtype=dtype)
    if len(shape) != 1:
        tensor.resize_(*shape) if shape else tensor.resize_(())  # a tuple costs as much again as the rest
    return tensor, signal
