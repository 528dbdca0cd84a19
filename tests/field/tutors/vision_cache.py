"""Cache of vision encoder outputs, shared by reference count."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch


class Embedding:
    """A cached encoder output; cells go home with the last reference."""

    def __init__(self, home: "CellSet", cells: list[int]) -> None:
        self.home = home
        self.cells = cells
        self.refs = 1

    def retain(self) -> "Embedding":
        self.refs += 1
        return self

    def drop(self) -> None:
        self.refs -= 1
        if self.refs == 0:
            self.home.put_back(self.cells)
            self.cells = []


class CellSet:
    """Cells of the embedding store as a set of free numbers."""

    def __init__(self, count: int, width: int) -> None:
        self.store = torch.empty(count, width)
        self._free = set(range(count))

    def carve(self, count: int) -> Optional[list[int]]:
        if len(self._free) < count:
            return None
        return [self._free.pop() for _ in range(count)]  # clean: near miss, counted beforehand, list goes to the caller

    def put_back(self, cells: list[int]) -> None:
        self._free.update(cells)


@dataclass
class ImageRequest:
    hashes: list[str]
    embeddings: list[Embedding] = field(default_factory=list)


class VisionCache:
    def __init__(self, cells: CellSet, encode: Callable[[str], Optional[torch.Tensor]]) -> None:
        self.cells = cells
        self.encode = encode
        self._lru: OrderedDict[str, Embedding] = OrderedDict()

    def evict_oldest(self) -> None:
        if self._lru:
            _, emb = self._lru.popitem(last=False)
            emb.drop()

    def forget(self, key: str) -> None:
        emb = self._lru.pop(key, None)
        if emb is not None:
            emb.drop()

    def clear(self) -> None:
        while self._lru:
            self.evict_oldest()

    def fill(self, key: str, patches: int) -> bool:
        if key in self._lru:
            return True
        cells = self.cells.carve(patches)  # leak: an undecodable image returns with the cells carved
        if cells is None:
            return False
        out = self.encode(key)
        if out is None:
            return False
        self.cells.store[cells] = out
        self._lru[key] = Embedding(self.cells, cells)
        return True

    def fill_evicting(self, key: str, patches: int) -> bool:
        if key in self._lru:
            return True
        cells = self.cells.carve(patches)  # clean: near miss, put back when undecodable, else owned by the LRU
        while cells is None and self._lru:
            self.evict_oldest()
            cells = self.cells.carve(patches)  # clean: near miss, only tried while cells is None
        if cells is None:
            return False
        out = self.encode(key)
        if out is None:
            self.cells.put_back(cells)
            return False
        self.cells.store[cells] = out
        self._lru[key] = Embedding(self.cells, cells)
        return True

    def get(self, key: str) -> Optional[Embedding]:
        """Cached embedding, retained for the caller."""
        emb = self._lru.get(key)
        if emb is None:
            return None
        self._lru.move_to_end(key)
        return emb.retain()  # clean: handed to the caller

    def attach(self, request: ImageRequest) -> bool:
        for key in request.hashes:
            emb = self.get(key)  # clean: near miss, a miss detaches those attached before
            if emb is None:
                self.detach(request)
                return False
            request.embeddings.append(emb)
        return True

    def detach(self, request: ImageRequest) -> None:
        for emb in request.embeddings:
            emb.drop()
        request.embeddings.clear()

    def attach_first(self, request: ImageRequest) -> bool:
        found = [self.get(key) for key in request.hashes]  # leak: only the first hit is kept, other references are lost
        for emb in found:
            if emb is not None:
                request.embeddings.append(emb)
                return True
        return False

    def contains_all(self, keys: list[str]) -> bool:
        return all(self.get(key) is not None for key in keys)  # leak: each test retains and never drops

    def norm(self, key: str) -> float:
        emb = self.get(key)  # clean: dropped after reading
        if emb is None:
            return 0.0
        value = float(self.cells.store[emb.cells].norm())
        emb.drop()
        return value

    def pooled(self, keys: list[str], limit: int) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []
        for key in keys:
            emb = self.get(key)  # leak: reaching the limit breaks before drop
            if emb is None:
                continue
            rows.append(self.cells.store[emb.cells].mean(0))
            if len(rows) == limit:
                break
            emb.drop()
        return rows

    def alias(self, key: str, other: str) -> bool:
        emb = self._lru.get(key)
        if emb is None or other in self._lru:
            return False
        self._lru[other] = emb.retain()  # clean: near miss, the alias is evicted on its own
        return True
