"""Shard sources.  A source yields (key, slab); the slab belongs to whoever gets it."""

from __future__ import annotations

import io
import logging
import tarfile
from typing import Dict, Iterator, List, Tuple

from .slabs import Slab, SlabPool

log = logging.getLogger(__name__)

Item = Tuple[str, Slab]


class Truncated(Exception):
    pass


class ObjectStore:
    def __init__(self, dial, limit: int = 4) -> None:
        self._dial = dial
        self._spare: List[object] = []
        self._limit = limit
        self.open_count = 0

    def connect(self):
        if self._spare:
            return self._spare.pop()  # clean: returned
        if self.open_count >= self._limit:
            raise ConnectionError("too many connections to the store")
        self.open_count += 1
        return self._dial()  # clean: returned

    def disconnect(self, conn) -> None:
        self._spare.append(conn)

    def fetch(self, name: str) -> bytes:
        conn = self.connect()  # leak: Truncated is raised before disconnect, and walk() catches it
        size = conn.stat(name)
        data = conn.read(name)
        if len(data) != size:
            raise Truncated(f"{name}: {len(data)} of {size}")
        self.disconnect(conn)
        return data

    def listing(self, prefix: str) -> List[str]:
        conn = self.connect()  # clean: finally
        try:
            return sorted(conn.list(prefix))
        finally:
            self.disconnect(conn)


class TarSource:
    def __init__(self, store: ObjectStore, shards: List[str], pool: SlabPool, suffixes=(".jpg", ".txt")) -> None:
        self.store, self.shards, self.pool, self.suffixes = store, shards, pool, suffixes

    def walk(self) -> Iterator[Item]:
        for shard in self.shards:
            try:
                blob = self.store.fetch(shard)
            except Truncated as exc:
                log.warning("%s", exc)
                continue
            with tarfile.open(fileobj=io.BytesIO(blob)) as tar:  # clean: with
                for member in tar:
                    if not member.name.endswith(self.suffixes):
                        continue
                    body = tar.extractfile(member).read()  # clean: a view on the BytesIO, nothing to close
                    if len(body) > self.pool.nbytes:
                        log.warning("%s in %s is too big", member.name, shard)
                        continue
                    slab = self.pool.get(len(body))  # clean: near miss, the size was checked and the slab leaves with the item
                    slab.mem[: len(body)] = memoryview(body)
                    slab.used = len(body)
                    yield member.name, slab


class PairSource:
    """Joins the image and the caption of a key.  Members of a pair may be some places apart."""

    def __init__(self, inner: TarSource, most_open: int = 64) -> None:
        self.inner = inner
        self.most_open = most_open
        self._half: Dict[str, Slab] = {}

    def walk(self) -> Iterator[Tuple[str, Slab, str]]:
        try:
            for name, slab in self.inner.walk():
                key, _, kind = name.rpartition(".")
                other = self._half.pop(key, None)
                if other is None:
                    self._half[key] = slab
                    if len(self._half) > self.most_open:
                        self._half.pop(next(iter(self._half))).decref()
                    continue
                image, text = (slab, other) if kind == "jpg" else (other, slab)
                caption = bytes(text.mem[: text.used]).decode("utf-8", "replace")
                text.decref()
                yield key, image, caption
        finally:
            for slab in self._half.values():
                slab.decref()
            self._half.clear()


class RepeatSource:
    """Few samples, many epochs: keeps slabs and hands out further references."""

    def __init__(self, store: ObjectStore, names: List[str], pool: SlabPool) -> None:
        self.store, self.pool, self.names = store, pool, names
        self._kept: Dict[str, Slab] = {}

    def fill(self) -> int:
        for name in self.names:
            if name in self._kept:
                continue
            body = self.store.fetch(name)
            slab = self.pool.get_now()  # leak: a body that is too big is skipped by continue with the slab taken
            if slab is None:
                break
            if len(body) > self.pool.nbytes:
                log.warning("%s is too big to be kept", name)
                continue
            slab.mem[: len(body)] = memoryview(body)
            slab.used = len(body)
            self._kept[name] = slab
        return len(self._kept)

    def walk(self, epochs: int) -> Iterator[Item]:
        for _ in range(epochs):
            for name, slab in self._kept.items():
                yield name, slab.incref()  # clean: near miss, the reference belongs to the item

    def shutdown(self) -> None:
        while self._kept:
            self._kept.popitem()[1].decref()
