import atexit
import functools
import logging
import weakref
from typing import Callable, Dict, List, Optional

import torch

log = logging.getLogger("ipc")


class IpcHandleTable:
    """Numbered registrations of buffers with the peer ranks."""

    def __init__(self, limit: int = 256):
        self.limit = limit
        self._entries: Dict[int, torch.Tensor] = {}
        self._next = 0

    def register_buffer(self, t: torch.Tensor) -> int:
        if len(self._entries) >= self.limit:
            raise RuntimeError("too many registrations")
        self._next += 1
        self._entries[self._next] = t
        return self._next

    def deregister_buffer(self, h: int) -> None:
        self._entries.pop(h, None)

    def tensor(self, h: int) -> torch.Tensor:
        return self._entries[h]


class SharedTensor:
    def __init__(self, table: IpcHandleTable, shape):
        self.data = torch.zeros(shape)
        self.handle = table.register_buffer(self.data)  # clean: the finalizer deregisters it
        self._fin = weakref.finalize(self, table.deregister_buffer, self.handle)

    def close(self) -> None:
        self._fin()


class LooseTensor:
    def __init__(self, table: IpcHandleTable, shape, persistent: bool):
        self.table = table
        self.data = torch.zeros(shape)
        self.persistent = persistent
        self.handle = table.register_buffer(self.data)  # leak: close does nothing for persistent tensors and nothing else deregisters

    def close(self) -> None:
        if self.persistent:
            return
        self.table.deregister_buffer(self.handle)


class CountedTensor:
    def __init__(self, table: IpcHandleTable, shape):
        self.table = table
        self.handle: Optional[int] = table.register_buffer(torch.zeros(shape))  # clean: near miss, close is idempotent and deregisters the first time

    def close(self) -> None:
        if self.handle is None:
            return
        self.table.deregister_buffer(self.handle)
        self.handle = None


def with_registration(table: IpcHandleTable, t: torch.Tensor, fn: Callable[[int], torch.Tensor]) -> torch.Tensor:
    h = table.register_buffer(t)  # clean: deregistered in the finally
    try:
        return fn(h)
    finally:
        table.deregister_buffer(h)


def on_exit(table: IpcHandleTable, t: torch.Tensor) -> int:
    h = table.register_buffer(t)  # clean: near miss, the exit hook deregisters it
    atexit.register(table.deregister_buffer, h)
    return h


def make_undo(table: IpcHandleTable, t: torch.Tensor) -> Callable[[], None]:
    h = table.register_buffer(t)  # clean: the closure that is returned deregisters it

    def undo() -> None:
        table.deregister_buffer(h)

    return undo


def broadcast_once(table: IpcHandleTable, t: torch.Tensor, peers: List[Callable[[torch.Tensor], None]]) -> None:
    undo = make_undo(table, t)  # clean: undo is called
    for p in peers:
        p(t)
    undo()


def broadcast_some(table: IpcHandleTable, t: torch.Tensor, peers: List[Callable[[torch.Tensor], bool]]) -> bool:
    undo = make_undo(table, t)  # leak: a peer that refuses returns before undo is called
    for p in peers:
        if not p(t):
            log.error("peer refused broadcast")
            return False
    undo()
    return True


def expose(table: IpcHandleTable, t: torch.Tensor) -> torch.Tensor:
    h = table.register_buffer(t)  # leak: the partial that would deregister is built and never called or stored
    functools.partial(table.deregister_buffer, h)
    return table.tensor(h)


class AllReduceGroup:
    def __init__(self, table: IpcHandleTable, world: int):
        self.table = table
        self.world = world
        self.undo: List[Callable[[], None]] = []
        self.handles: List[int] = []
        self.input: Optional[int] = None

    def attach(self, t: torch.Tensor) -> None:
        self.undo.append(make_undo(self.table, t))  # clean: detach runs every undo

    def attach_graph(self, ts: List[torch.Tensor]) -> None:
        for t in ts:
            self.handles.append(self.table.register_buffer(t))  # leak: detach clears the handle list without deregistering

    def set_input(self, t: torch.Tensor) -> None:
        h = self.table.register_buffer(t)  # clean: near miss, the previous input is deregistered before the overwrite
        if self.input is not None:
            self.table.deregister_buffer(self.input)
        self.input = h

    def detach(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.handles.clear()
        if self.input is not None:
            self.table.deregister_buffer(self.input)
            self.input = None

    def reduce(self, t: torch.Tensor, register: bool) -> torch.Tensor:
        h = self.table.register_buffer(t) if register else None  # clean: near miss, the same flag guards the removal
        out = t.clone()
        for _ in range(self.world - 1):
            out.add_(t)
        if register:
            self.table.deregister_buffer(h)
        return out

    def reduce_checked(self, t: torch.Tensor) -> torch.Tensor:
        h = self.table.register_buffer(t)  # leak: not contiguous means an early result without deregistering
        if not t.is_contiguous():
            return t * self.world
        out = self.table.tensor(h).clone().mul_(self.world)
        self.table.deregister_buffer(h)
        return out
