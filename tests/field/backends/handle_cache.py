"""Counted handles on memory-mapped model shards, with thin layers above them."""
from __future__ import annotations

import mmap
import os
import threading
from typing import Iterable


class Shard:
    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb")  # clean: closed by dispose
        self.view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed by dispose
        self.users = 0

    def dispose(self) -> None:
        self.view.close()
        self._file.close()


class ShardCache:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._shards: dict[str, Shard] = {}

    def obtain(self, path: str) -> Shard | None:
        with self._lock:
            shard = self._shards.get(path)
            if shard is None:
                if not os.path.exists(path):
                    return None
                shard = self._shards[path] = Shard(path)  # clean: tabled, disposed of with the last user
            shard.users += 1  # clean: the use belongs to the caller
            return shard

    def peek(self, path: str) -> Shard | None:
        return self._shards.get(path)

    def dismiss(self, shard: Shard) -> None:
        with self._lock:
            shard.users -= 1
            if shard.users == 0:
                self._shards.pop(shard.path, None)
                shard.dispose()


class Catalog:
    """Names over paths."""

    def __init__(self, cache: ShardCache, root: str) -> None:
        self._cache = cache
        self._root = root
        self.aliases: dict[str, str] = {}

    def open_model(self, name: str) -> Shard | None:
        path = os.path.join(self._root, self.aliases.get(name, name))
        return self._cache.obtain(path)  # clean: handed to the caller

    def open_checked(self, name: str, magic: bytes) -> Shard | None:
        shard = self.open_model(name)  # leak: a wrong magic gives None and keeps the use
        if shard is None:
            return None
        if shard.view[: len(magic)] != magic:
            return None
        return shard

    def open_first(self, names: Iterable[str], at_least: int) -> Shard | None:
        for name in names:
            shard = self.open_model(name)  # clean: near miss, one too short is dismissed before the next is tried
            if shard is None:
                continue
            if len(shard.view) >= at_least:
                return shard
            self.close_model(shard)
        return None

    def close_model(self, shard: Shard) -> None:
        self._cache.dismiss(shard)


class ShardReader:
    """Reads from a shard given to it or opened by itself; closes only its own."""

    def __init__(self, catalog: Catalog, name: str, shard: Shard | None = None) -> None:
        self._catalog = catalog
        self._owns = shard is None
        self._shard = shard if shard is not None else catalog.open_model(name)  # clean: near miss, the flag set from the same test closes it

    @property
    def ready(self) -> bool:
        return self._shard is not None

    def read(self, offset: int, length: int) -> bytes:
        return self._shard.view[offset : offset + length] if self._shard else b""

    def close(self) -> None:
        if self._owns and self._shard is not None:
            self._catalog.close_model(self._shard)
        self._shard = None


class TensorLoader:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._open: dict[str, Shard] = {}

    def header(self, name: str) -> bytes:
        shard = self._catalog.open_model(name)  # clean: near miss, the bytes are copied and the shard closed
        if shard is None:
            return b""
        head = bytes(shard.view[:64])
        self._catalog.close_model(shard)
        return head

    def tensor(self, name: str, offset: int, length: int) -> bytes:
        reader = ShardReader(self._catalog, name)  # leak: a short read returns with the reader open
        if not reader.ready:
            return b""
        data = reader.read(offset, length)
        if len(data) < length:
            return data
        reader.close()
        return data

    def tensors(self, name: str, spans: list[tuple[int, int]]) -> list[bytes]:
        shard = self._catalog.open_model(name)  # leak: the reader it is lent to does not own it and closes nothing
        if shard is None:
            return []
        reader = ShardReader(self._catalog, name, shard)
        found = [reader.read(offset, length) for offset, length in spans]
        reader.close()
        return found

    def total(self, names: list[str]) -> int:
        size = 0
        for name in names:
            shard = self._catalog.open_checked(name, b"TNSR")  # leak: an empty body continues without close
            if shard is None:
                continue
            body = len(shard.view) - 4
            if body == 0:
                continue
            size += body
            self._catalog.close_model(shard)
        return size

    def keep(self, name: str) -> bool:
        shard = self._catalog.open_model(name)  # clean: near miss, closed when it is kept already, else tabled for close_all
        if shard is None:
            return False
        if name in self._open:
            self._catalog.close_model(shard)
            return True
        self._open[name] = shard
        return True

    def close_all(self) -> None:
        while self._open:
            _, shard = self._open.popitem()
            self._catalog.close_model(shard)
