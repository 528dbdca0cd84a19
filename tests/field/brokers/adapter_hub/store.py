from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class PinnedChunk:
    offset: int
    tensor: torch.Tensor


class PinnedHeap:
    def __init__(self, chunks: int, numel: int) -> None:
        base = torch.empty(chunks * numel, pin_memory=True)
        self.numel = numel
        self._chunks = [PinnedChunk(i, base[i * numel : (i + 1) * numel]) for i in range(chunks)]
        self._mu = threading.Lock()

    def rent(self) -> Optional[PinnedChunk]:
        with self._mu:
            return self._chunks.pop() if self._chunks else None

    def unrent(self, chunk: PinnedChunk) -> None:
        with self._mu:
            self._chunks.append(chunk)


class AdapterStore:
    """Adapters by name in rented pinned chunks."""

    def __init__(self, heap: PinnedHeap) -> None:
        self.heap = heap
        self._by_name: dict[str, list[PinnedChunk]] = {}

    def put(self, name: str, parts: list[torch.Tensor]) -> bool:
        chunks: list[PinnedChunk] = []
        for part in parts:
            chunk = self.heap.rent()  # leak: the rollback for an oversized part covers only the chunks already in the list
            if chunk is None:
                self._undo(chunks)
                return False
            if part.numel() > self.heap.numel:
                self._undo(chunks)
                return False
            chunk.tensor[: part.numel()].copy_(part.flatten())
            chunks.append(chunk)
        self.remove(name)
        self._by_name[name] = chunks
        return True

    def _undo(self, chunks: list[PinnedChunk]) -> None:
        for c in chunks:
            self.heap.unrent(c)
        chunks.clear()

    def remove(self, name: str) -> None:
        self._undo(self._by_name.pop(name, []))

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def merge(self, dst: str, a: str, b: str) -> bool:
        if a not in self._by_name or b not in self._by_name:
            return False
        out = self.heap.rent()  # clean: near miss, becomes the only chunk of dst after the old ones are removed
        if out is None:
            return False
        out.tensor.copy_(self._by_name[a][0].tensor + self._by_name[b][0].tensor)
        self.remove(dst)
        self._by_name[dst] = [out]
        return True

    def norm(self, name: str) -> float:
        tmp = self.heap.rent()  # clean: near miss, the finally unrents for an unknown name too
        if tmp is None:
            return 0.0
        try:
            parts = self._by_name.get(name)
            if parts is None:
                return 0.0
            tmp.tensor.copy_(parts[0].tensor)
            return float(tmp.tensor.norm())
        finally:
            self.heap.unrent(tmp)
