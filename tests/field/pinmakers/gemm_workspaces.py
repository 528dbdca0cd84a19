"""Scratch for projection GEMMs: handle-style workspaces under two layers of wrappers.

The bottom layer is written like the C interface it stands in for (integer
handles, negative status codes); the upper ones are what the modules use.
"""
from __future__ import annotations

from types import TracebackType
from typing import Dict, Iterable, Iterator, List, Optional, Type

import torch

WS_NOMEM = -1
WS_BADSIZE = -2

_table: Dict[int, torch.Tensor] = {}
_spare: List[int] = []
_next = 0
_limit = 64


def ws_create(nbytes: int) -> int:
    """A handle, or a negative status."""
    global _next
    if nbytes <= 0:
        return WS_BADSIZE
    if _spare:
        h = _spare.pop()
        if _table[h].numel() < nbytes:
            _table[h] = torch.empty(nbytes, dtype=torch.uint8)
        return h
    if len(_table) >= _limit:
        return WS_NOMEM
    h = _next
    _next += 1
    _table[h] = torch.empty(nbytes, dtype=torch.uint8)
    return h


def ws_create_exact(nbytes: int) -> int:
    for _ in range(len(_spare)):
        h = _spare.pop()  # leak: a spare handle of another size is popped and not put back
        if _table[h].numel() == nbytes:
            return h
    return ws_create(nbytes)  # clean: returned to the caller


def ws_destroy(h: int) -> None:
    _spare.append(h)


def ws_tensor(h: int, shape: Iterable[int]) -> torch.Tensor:
    shape = tuple(shape)
    n = 4
    for s in shape:
        n *= s
    return _table[h][:n].view(torch.float32).view(shape)


class Workspace:
    """Owns a handle unless it was adopted from somebody else."""

    def __init__(self, handle: int, own: bool = True):
        self.handle = handle
        self.own = own

    @classmethod
    def create(cls, nbytes: int) -> "Workspace":
        h = ws_create(nbytes)  # clean: owned by the returned object, whose close() destroys it
        if h < 0:
            raise MemoryError(f"ws_create: status {h}")
        return cls(h)

    @classmethod
    def create_zeroed(cls, nbytes: int) -> "Workspace":
        h = ws_create(nbytes)  # leak: the object is built with own=False, so close() leaves the handle alive
        if h < 0:
            raise MemoryError(f"ws_create: status {h}")
        _table[h].zero_()
        return cls(h, False)

    def close(self) -> None:
        if self.own and self.handle >= 0:
            ws_destroy(self.handle)
        self.handle = -1

    def tensor(self, *shape: int) -> torch.Tensor:
        return ws_tensor(self.handle, shape)

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, t: Optional[Type[BaseException]], e: Optional[BaseException], tb: Optional[TracebackType]) -> None:
        self.close()


class WorkspaceSet:
    """Named workspaces of a module, created on first use."""

    def __init__(self) -> None:
        self._items: Dict[str, Workspace] = {}

    def get(self, name: str, nbytes: int) -> Workspace:
        ws = self._items.get(name)
        if ws is not None and _table[ws.handle].numel() >= nbytes:
            return ws
        if ws is not None:
            del self._items[name]
            ws.close()
        self._items[name] = Workspace.create(nbytes)  # clean: the one that was too small is closed above
        return self._items[name]

    def swap(self, name: str, nbytes: int) -> Workspace:
        fresh = Workspace.create(nbytes)  # clean: kept in the set
        old = self._items.pop(name, None)
        if old is not None:
            old.close()
        self._items[name] = fresh
        return fresh

    def close(self) -> None:
        for ws in self._items.values():
            ws.close()
        self._items.clear()


class PersistentSet:
    """Workspaces that outlive a step, by layer number."""

    def __init__(self, layers: int):
        self._by_layer: List[Optional[Workspace]] = [None] * layers

    def set_size(self, layer: int, nbytes: int) -> None:
        self._by_layer[layer] = Workspace.create(nbytes)  # leak: a second set_size overwrites the layer's workspace

    def at(self, layer: int) -> Optional[Workspace]:
        return self._by_layer[layer]

    def close(self) -> None:
        for ws in self._by_layer:
            if ws is not None:
                ws.close()
        self._by_layer = [None] * len(self._by_layer)


def split_k_matmul(a: torch.Tensor, b: torch.Tensor, splits: int) -> torch.Tensor:
    m, n = a.shape[0], b.shape[1]
    with Workspace.create(4 * splits * m * n) as ws:  # clean: with block
        parts = ws.tensor(splits, m, n)
        for i, (pa, pb) in enumerate(zip(a.chunk(splits, 1), b.chunk(splits, 0))):
            torch.matmul(pa, pb, out=parts[i])
        return parts.sum(0)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, exact: bool) -> torch.Tensor:
    h = ws_create(4 * x.numel())  # leak: the exact branch returns without destroying the handle
    if h < 0:
        return torch.nn.functional.gelu(x + bias)
    t = ws_tensor(h, x.shape)
    torch.add(x, bias, out=t)
    if exact:
        return torch.nn.functional.gelu(t)
    y = torch.nn.functional.gelu(t, approximate="tanh")
    ws_destroy(h)
    return y


def transposed(x: torch.Tensor, scratch: Optional[Workspace] = None) -> torch.Tensor:
    own = scratch is None
    ws = Workspace.create(4 * x.numel()) if own else scratch  # clean: near miss, closed when own
    t = ws.tensor(x.shape[1], x.shape[0])
    t.copy_(x.T)
    y = t.clone()
    if own:
        ws.close()
    return y


def row_blocks(x: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    h = ws_create(4 * rows * x.shape[1])  # clean: destroyed in finally, also when the consumer stops
    if h < 0:
        yield from x.split(rows)
        return
    try:
        for part in x.split(rows):
            t = ws_tensor(h, part.shape)
            t.copy_(part)
            yield t
    finally:
        ws_destroy(h)


def calibrate(sizes: Iterable[int], retries: int) -> Dict[int, bool]:
    fits: Dict[int, bool] = {}
    for nbytes in sizes:
        h = WS_NOMEM
        for _ in range(retries):
            h = ws_create_exact(nbytes)  # leak: the loop goes on after success, so all but the last handle are lost
        fits[nbytes] = h >= 0
        if h >= 0:
            ws_destroy(h)
    return fits
