"""Moving tensors through pinned staging buffers, and the gate that lets one transfer through at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .memory_pool import TensorMemoryPool


class TransferGate:
    """At most so many transfers at once."""

    def __init__(self, width: int = 1) -> None:
        self._slots = threading.Semaphore(width)

    def acquire(self) -> None:
        self._slots.acquire()

    def release(self) -> None:
        self._slots.release()


@contextmanager
def staged(pool: TensorMemoryPool, tensor: Tensor) -> Iterator[Tensor]:
    """A copy of `tensor` in staging memory for as long as the block runs."""
    buffer = pool.allocate(tensor.shape, tensor.dtype)
    buffer.copy_(tensor)
    yield buffer
    pool.deallocate(buffer)


@contextmanager
def landing(pool: TensorMemoryPool, like: Tensor) -> Iterator[Tensor]:
    """Staging memory of the same shape, to be filled by the block."""
    buffer = pool.allocate(like.shape, like.dtype)
    try:
        yield buffer
    finally:
        pool.deallocate(buffer)


class Offloader:
    """Moves activations out of the way and back, one at a time."""

    def __init__(self, pool: TensorMemoryPool, gate: TransferGate) -> None:
        self._memory_pool = pool
        self._gate = gate
        self._parked: dict[str, Tensor] = {}

    def park(self, name: str, tensor: Tensor) -> None:
        """Keep a copy under `name`; a copy that is already there is given back first."""
        self.drop(name)
        self._gate.acquire()
        try:
            copy = self._memory_pool.allocate(tensor.shape, tensor.dtype)
            self._parked[name] = copy
            copy.copy_(tensor)
        finally:
            self._gate.release()

    def fetch(self, name: str, into: Tensor) -> None:
        """Copy back and forget."""
        self._gate.acquire()
        try:
            into.copy_(self._parked[name])
        finally:
            self._gate.release()
        self.drop(name)

    def drop(self, name: str) -> None:
        copy = self._parked.pop(name, None)
        if copy is not None:
            self._memory_pool.deallocate(copy)

    def close(self) -> None:
        while self._parked:
            _, copy = self._parked.popitem()
            self._memory_pool.deallocate(copy)
