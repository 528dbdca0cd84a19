"""Layers over a device-handle table: raw -> typed -> scoped."""
from __future__ import annotations

import logging
import weakref
from typing import Any, Callable, Generic, Iterator, Optional, TypeVar

import torch

logger = logging.getLogger(__name__)
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class HandleTable:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._objects: dict[int, Any] = {}
        self._next = 0

    def register(self, obj: Any) -> int:
        if len(self._objects) >= self.limit:
            return 0
        self._next += 1
        self._objects[self._next] = obj
        return self._next

    def unregister(self, h: int) -> None:
        self._objects.pop(h, None)

    def resolve(self, h: int) -> Any:
        return self._objects[h]


class TensorTable:
    """Typed layer; 0 becomes an exception."""

    def __init__(self, raw: HandleTable) -> None:
        self.raw = raw

    def register_tensor(self, t: torch.Tensor) -> int:
        h = self.raw.register(t.detach())  # clean: near miss, 0 is no handle, any other is returned
        if h == 0:
            raise RuntimeError("handle table full")
        return h

    def unregister_tensor(self, h: int) -> None:
        self.raw.unregister(h)

    def register_contiguous(self, t: torch.Tensor) -> Optional[int]:
        h = self.register_tensor(t)  # leak: a strided tensor gives None after it was registered
        if not t.is_contiguous():
            return None
        return h


class Scoped:
    """Owns a handle until close(); detach() passes it on."""

    def __init__(self, table: TensorTable, t: torch.Tensor) -> None:
        self.table = table
        self.h: Optional[int] = table.register_tensor(t)  # clean: close() or detach()

    def close(self) -> None:
        if self.h is not None:
            self.table.unregister_tensor(self.h)
            self.h = None

    def detach(self) -> int:
        assert self.h is not None
        h, self.h = self.h, None
        return h

    def __enter__(self) -> "Scoped":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class Finalized:
    def __init__(self, table: TensorTable, t: torch.Tensor) -> None:
        h = table.register_tensor(t)  # clean: near miss, a finalizer unregisters it when the object dies
        self.h = h
        self._fin = weakref.finalize(self, table.unregister_tensor, h)


class FinalizedMaybe:
    def __init__(self, table: TensorTable, t: torch.Tensor, track: bool) -> None:
        self.h = table.register_tensor(t)  # leak: without track there is neither a finalizer nor a close
        if track:
            weakref.finalize(self, table.unregister_tensor, self.h)


class OwnedOrBorrowed:
    """owned=True: this object unregisters; otherwise the giver does."""

    def __init__(self, table: TensorTable, h: int, owned: bool) -> None:
        self.table, self.h, self.owned = table, h, owned

    @classmethod
    def create(cls, table: TensorTable, t: torch.Tensor) -> "OwnedOrBorrowed":
        return cls(table, table.register_tensor(t), owned=True)  # clean: owned, dispose() unregisters

    @classmethod
    def create_shared(cls, table: TensorTable, t: torch.Tensor) -> "OwnedOrBorrowed":
        return cls(table, table.register_tensor(t), owned=False)  # leak: marked as borrowed though nobody else has the handle

    def dispose(self) -> None:
        if self.owned:
            self.table.unregister_tensor(self.h)
            self.owned = False


class Frame(Generic[T]):
    def __init__(self, table: TensorTable) -> None:
        self.table = table
        self.handles: list[int] = []
        self.on_close: list[Callable[[], None]] = []

    def add(self, t: torch.Tensor) -> int:
        h = self.table.register_tensor(t)  # clean: the frame's close() unregisters all
        self.handles.append(h)
        return h

    def add_callback(self, t: torch.Tensor) -> int:
        h = self.table.register_tensor(t)  # clean: near miss, through the callback list that close() runs
        self.on_close.append(lambda: self.table.unregister_tensor(h))
        return h

    def close(self) -> None:
        while self.handles:
            self.table.unregister_tensor(self.handles.pop())
        for cb in self.on_close:
            cb()
        self.on_close.clear()


def call_kernel(table: TensorTable, t: torch.Tensor, launch: Callable[[int], int]) -> int:
    with Scoped(table, t) as s:  # clean: with statement
        assert s.h is not None
        rc = launch(s.h)
        if rc != 0:
            return rc
    return 0


def call_detached(table: TensorTable, t: torch.Tensor, launch: Callable[[int], int]) -> int:
    with Scoped(table, t) as s:  # leak: detach() takes the handle out of the with and nobody unregisters it
        return launch(s.detach())


def call_detached_clean(table: TensorTable, t: torch.Tensor, launch: Callable[[int], int]) -> int:
    s = Scoped(table, t)  # clean: near miss, the detached handle is unregistered by hand
    h = s.detach()
    rc = launch(h)
    table.unregister_tensor(h)
    return rc


def launch_all(table: TensorTable, ts: list[torch.Tensor], launch: Callable[[int], int]) -> bool:
    for t in ts:
        h = table.register_contiguous(t)  # leak: a failing launch returns False with the handle registered
        if h is None:
            continue
        if launch(h) != 0:
            return False
        table.unregister_tensor(h)
    return True


def handles_of(table: TensorTable, ts: list[torch.Tensor]) -> Iterator[int]:
    frame: Frame[int] = Frame(table)
    try:
        for t in ts:
            yield frame.add(t)  # clean: the frame is closed in finally
    finally:
        frame.close()


def count_contiguous(table: TensorTable, ts: list[torch.Tensor]) -> int:
    return sum(1 for t in ts if table.register_contiguous(t) is not None)  # leak: registered for the test and lost


def share(table: TensorTable, t: torch.Tensor) -> float:
    obj = OwnedOrBorrowed.create(table, t)  # clean: disposed
    v = table.raw.resolve(obj.h).sum().item()
    obj.dispose()
    return v


def share_if_positive(table: TensorTable, t: torch.Tensor) -> float:
    obj = OwnedOrBorrowed.create(table, t)  # leak: a negative sum returns before dispose
    v = table.raw.resolve(obj.h).sum().item()
    if v < 0:
        return 0.0
    obj.dispose()
    return v
