"""Cache of vision encoder outputs, with reference counts per image."""

from __future__ import annotations

import hashlib
from typing import Optional

import torch


class CacheRegion:
    """Rows of one big tensor, rented out in multiples of ``step`` rows."""

    def __init__(self, rows: int, dim: int, step: int = 64) -> None:
        self.data = torch.zeros(rows, dim)
        self.step = step
        self._gaps = list(range(0, rows, step))

    def rent(self) -> Optional[int]:
        return self._gaps.pop() if self._gaps else None  # clean: returned

    def unrent(self, start: int) -> None:
        self._gaps.append(start)


class Entry:
    def __init__(self, key: str, start: int, rows: int) -> None:
        self.key, self.start, self.rows = key, start, rows
        self.users = 0


class EncoderCache:
    def __init__(self, region: CacheRegion, encoder: torch.nn.Module) -> None:
        self.region = region
        self.encoder = encoder
        self._entries: dict[str, Entry] = {}

    def _key(self, image: torch.Tensor) -> str:
        return hashlib.sha256(image.numpy().tobytes()).hexdigest()

    def _evict_one(self) -> bool:
        for key, entry in list(self._entries.items()):
            if entry.users == 0:
                del self._entries[key]
                self.region.unrent(entry.start)
                return True
        return False

    def _compute(self, key: str, image: torch.Tensor) -> Entry:
        start = self.region.rent()  # leak: an output longer than one step raises after the rent
        while start is None:
            if not self._evict_one():
                raise RuntimeError("encoder cache: everything is in use")
            start = self.region.rent()  # leak: the same raise follows when the rent worked only after an eviction
        out = self.encoder(image)
        if out.shape[0] > self.region.step:
            raise ValueError(f"{out.shape[0]} rows for one image")
        self.region.data[start : start + out.shape[0]] = out
        return Entry(key, start, out.shape[0])

    def acquire(self, image: torch.Tensor) -> Entry:
        key = self._key(image)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._compute(key, image)  # clean: a new key, and _evict_one gives its rows back
        entry.users += 1  # clean: the entry is returned, and release lowers the count
        return entry

    def release(self, entry: Entry) -> None:
        entry.users -= 1

    def rows(self, image: torch.Tensor) -> torch.Tensor:
        entry = self.acquire(image)  # leak: the clone is returned, the count of the entry stays up
        return self.region.data[entry.start : entry.start + entry.rows].clone()

    def mean(self, image: torch.Tensor) -> torch.Tensor:
        entry = self.acquire(image)  # clean: released in the finally, after the mean was taken
        try:
            return self.region.data[entry.start : entry.start + entry.rows].mean(0)
        finally:
            self.release(entry)

    def gather(self, images: list[torch.Tensor]) -> torch.Tensor:
        entries: list[Entry] = []
        try:
            for image in images:
                entries.append(self.acquire(image))  # clean: each one in the list is released, even if a later one raises
            return torch.cat([self.region.data[e.start : e.start + e.rows] for e in entries])
        finally:
            for entry in entries:
                self.release(entry)

    def gather_unique(self, images: list[torch.Tensor]) -> dict[str, Entry]:
        """Entries by key; the caller releases the values of the dict."""
        found: dict[str, Entry] = {}
        for image in images:
            entry = self.acquire(image)  # leak: the second of two equal images overwrites its key, one count too many remains
            found[entry.key] = entry
        return found
