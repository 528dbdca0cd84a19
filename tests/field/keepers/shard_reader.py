"""Sample reader over tar-like shards: shared file handles, slabs and a thread of decoders."""
from __future__ import annotations

import mmap
import os
import queue
import struct
import threading
from collections import OrderedDict
from typing import Any, Dict, Iterator, List, Optional

import numpy as np

HEADER = struct.Struct("<IQ")


class HandleCache:
    """Open shards counted by users; a shard nobody uses may be closed when the cache is full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: "OrderedDict[str, Dict[str, Any]]" = OrderedDict()
        self._lock = threading.Lock()

    def use(self, path: str) -> Dict[str, Any]:
        with self._lock:
            ent = self._open.get(path)
            if ent is None:
                self._shrink()
                fd = os.open(path, os.O_RDONLY)  # clean: in the entry, closed by _shrink and close
                ent = self._open[path] = {"path": path, "fd": fd, "users": 0}
            ent["users"] += 1
            return ent

    def done(self, ent: Dict[str, Any]) -> None:
        with self._lock:
            ent["users"] -= 1

    def _shrink(self) -> None:
        for path in list(self._open):
            if len(self._open) < self.limit:
                return
            if self._open[path]["users"] == 0:
                os.close(self._open.pop(path)["fd"])

    def close(self) -> None:
        for ent in self._open.values():
            os.close(ent["fd"])
        self._open.clear()


class SlabPool:
    def __init__(self, slabs: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._idle: "queue.SimpleQueue[bytearray]" = queue.SimpleQueue()
        for _ in range(slabs):
            self._idle.put(bytearray(nbytes))

    def lend(self, timeout: Optional[float] = None) -> Optional[bytearray]:
        try:
            return self._idle.get(timeout=timeout)
        except queue.Empty:
            return None

    def reclaim(self, slab: bytearray) -> None:
        self._idle.put(slab)


class ShardReader:
    def __init__(self, handles: HandleCache, slabs: SlabPool, depth: int = 8) -> None:
        self.handles = handles
        self.slabs = slabs
        self.ready: "queue.Queue[Optional[Dict[str, Any]]]" = queue.Queue(maxsize=depth)
        self.stopped = threading.Event()
        self.bad: List[str] = []

    def count(self, path: str) -> int:
        ent = self.handles.use(path)  # leak: an empty shard returns before done
        size = os.fstat(ent["fd"]).st_size
        if size < HEADER.size:
            return 0
        n, pos = 0, 0
        while pos + HEADER.size <= size:
            _, length = HEADER.unpack(os.pread(ent["fd"], HEADER.size, pos))
            pos += HEADER.size + length
            n += 1
        self.handles.done(ent)
        return n

    def labels(self, path: str, limit: int) -> List[int]:
        found: List[int] = []
        ent = self.handles.use(path)  # clean: near miss, both breaks of the loop meet done behind it
        pos = 0
        while True:
            raw = os.pread(ent["fd"], HEADER.size, pos)
            if len(raw) < HEADER.size:
                break
            label, length = HEADER.unpack(raw)
            found.append(label)
            if len(found) == limit:
                break
            pos += HEADER.size + length
        self.handles.done(ent)
        return found

    def work(self, paths: List[str]) -> None:
        for path in paths:
            try:
                ent = self.handles.use(path)  # clean: near miss, a failing open took no user; otherwise the finally is done with it
            except OSError:
                self.bad.append(path)
                continue
            try:
                self._read(ent)
            finally:
                self.handles.done(ent)
        self.ready.put(None)

    def _read(self, ent: Dict[str, Any]) -> None:
        pos = 0
        while not self.stopped.is_set():
            raw = os.pread(ent["fd"], HEADER.size, pos)
            if len(raw) < HEADER.size:
                return
            label, length = HEADER.unpack(raw)
            body = pos + HEADER.size
            slab = self.slabs.lend(timeout=1.0)  # leak: a record longer than the slab is skipped while holding it
            if slab is None:
                continue
            pos = body + length
            if length > self.slabs.nbytes:
                self.bad.append(f"{ent['path']}@{body}")
                continue
            slab[:length] = os.pread(ent["fd"], length, body)
            self.ready.put({"slab": slab, "n": length, "label": label})

    def samples(self) -> Iterator[Dict[str, Any]]:
        while True:
            rec = self.ready.get()
            if rec is None:
                return
            data = np.frombuffer(bytes(rec["slab"][:rec["n"]]), dtype=np.uint8)
            self.slabs.reclaim(rec["slab"])
            yield {"data": data, "label": rec["label"]}

    def stop(self) -> None:
        self.stopped.set()
        while True:
            try:
                rec = self.ready.get_nowait()
            except queue.Empty:
                return
            if rec is not None:
                self.slabs.reclaim(rec["slab"])

    def inject(self, payloads: List[bytes], label: int) -> int:
        sent = 0
        for payload in payloads:
            slab = self.slabs.lend(timeout=0.1)  # clean: near miss, reclaimed when ready is full, else samples or stop reclaims
            if slab is None:
                return sent
            slab[:len(payload)] = payload
            try:
                self.ready.put({"slab": slab, "n": len(payload), "label": label}, timeout=1.0)
            except queue.Full:
                self.slabs.reclaim(slab)
                break
            sent += 1
        return sent

    def concat(self, left: bytes, right: bytes) -> Optional[bytes]:
        head = self.slabs.lend(timeout=0.1)  # leak: stays lent when there is no slab for the tail
        if head is None:
            return None
        tail = self.slabs.lend(timeout=0.1)  # clean: None in the early return, reclaimed behind the join
        if tail is None:
            return None
        head[:len(left)] = left
        tail[:len(right)] = right
        joined = bytes(head[:len(left)] + tail[:len(right)])
        for slab in (head, tail):
            self.slabs.reclaim(slab)
        return joined

    def mapped_sum(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY)  # clean: near miss, closed once the map exists or the file is empty
        if os.fstat(fd).st_size == 0:
            os.close(fd)
            return 0
        view = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)  # clean: closed in the finally
        os.close(fd)
        try:
            return sum(view[:64])
        finally:
            view.close()

    def fingerprint(self, path: str) -> Optional[int]:
        try:
            fd = os.open(path, os.O_RDONLY)  # leak: a short file returns None and the descriptor stays open
        except FileNotFoundError:
            return None
        head = os.read(fd, 16)
        if len(head) < 16:
            return None
        os.close(fd)
        return hash(head)
