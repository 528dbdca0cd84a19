"""Pinned staging buffers used to move tensors between host and disk."""
from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional

import torch


class StagingPool:
    """Size-bucketed pool; `borrow` makes a new buffer when a bucket is empty."""

    def __init__(self, limit_bytes: int, pin: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.pin = pin
        self.lent_bytes = 0
        self.buckets: Dict[int, List[torch.Tensor]] = defaultdict(list)

    @staticmethod
    def _bucket(numel: int) -> int:
        size = 1 << 12
        while size < numel:
            size <<= 1
        return size

    def borrow(self, numel: int) -> Optional[torch.Tensor]:
        size = self._bucket(numel)
        if self.lent_bytes + size > self.limit_bytes:
            return None
        bucket = self.buckets[size]
        if bucket:
            buf = bucket.pop()  # clean: pool body, returned to the borrower
        else:
            buf = torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)
        self.lent_bytes += size
        return buf

    def return_buffer(self, buf: torch.Tensor) -> None:
        self.lent_bytes -= buf.numel()
        self.buckets[buf.numel()].append(buf)

    @contextmanager
    def lease(self, numel: int) -> Iterator[torch.Tensor]:
        buf = self.borrow(numel)  # clean: near miss, nothing is held in the raising branch, finally returns the rest
        if buf is None:
            raise MemoryError(f"staging pool exhausted ({numel})")
        try:
            yield buf
        finally:
            self.return_buffer(buf)


class CheckpointReader:
    def __init__(self, pool: StagingPool, store: Dict[str, bytes]) -> None:
        self.pool = pool
        self.store = store

    def _read_raw(self, name: str) -> Optional[torch.Tensor]:
        blob = self.store.get(name)
        if blob is None:
            return None
        buf = self.pool.borrow(len(blob))  # clean: helper hands the filled buffer to its caller
        if buf is not None:
            buf[: len(blob)].copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
        return buf

    def load_param(self, name: str, dst: torch.Tensor) -> bool:
        raw = self._read_raw(name)  # leak: contents are copied to dst, the pooled buffer itself is dropped
        if raw is None:
            return False
        dst.view(torch.uint8).flatten().copy_(raw[: dst.nbytes])
        return True

    def load_shard(self, name: str, dst: torch.Tensor, offset: int) -> bool:
        raw = self._read_raw(name)  # clean: near miss, returned on the short path and on the normal one
        if raw is None:
            return False
        if offset + dst.nbytes > raw.numel():
            self.pool.return_buffer(raw)
            return False
        dst.view(torch.uint8).flatten().copy_(raw[offset: offset + dst.nbytes])
        self.pool.return_buffer(raw)
        return True

    def checksum(self, name: str, nbytes: int) -> int:
        raw = self._read_raw(name)  # leak: raw is rebound to its converted copy, which is not the buffer
        if raw is None:
            return 0
        raw = raw[:nbytes].to(torch.int64)
        return int(raw.sum().item())

    def preload(self, names: List[str]) -> Dict[str, torch.Tensor]:
        cache: Dict[str, torch.Tensor] = {}
        for name in names:
            raw = self._read_raw(name)  # clean: collected in the dict which the caller receives
            if raw is None:
                continue
            if name in cache:
                self.pool.return_buffer(raw)
                continue
            cache[name] = raw
        return cache

    def verify_all(self, names: List[str], expected: Dict[str, int]) -> List[str]:
        bad: List[str] = []
        cache = self.preload(names)  # leak: buffers of the mismatching names are not returned
        for name, raw in cache.items():
            if int(raw.sum().item()) != expected.get(name, -1):
                bad.append(name)
                continue
            self.pool.return_buffer(raw)
        return bad


class CheckpointWriter:
    def __init__(self, pool: StagingPool, sink: Dict[str, bytes]) -> None:
        self.pool = pool
        self.sink = sink
        self.pending: List[tuple] = []

    def write_sync(self, name: str, src: torch.Tensor) -> None:
        with self.pool.lease(src.nbytes) as buf:  # clean: with block returns the buffer
            buf[: src.nbytes].copy_(src.contiguous().view(torch.uint8).flatten())
            self.sink[name] = buf[: src.nbytes].numpy().tobytes()

    def write_async(self, name: str, src: torch.Tensor) -> bool:
        buf = self.pool.borrow(src.nbytes)  # clean: queued in pending, returned by flush
        if buf is None:
            return False
        buf[: src.nbytes].copy_(src.contiguous().view(torch.uint8).flatten())
        self.pending.append((name, buf, src.nbytes))
        return True

    def flush(self) -> None:
        while self.pending:
            name, buf, nbytes = self.pending.pop()
            self.sink[name] = buf[:nbytes].numpy().tobytes()
            self.pool.return_buffer(buf)

    def write_pair(self, name: str, key: torch.Tensor, value: torch.Tensor) -> bool:
        kbuf = self.pool.borrow(key.nbytes)  # leak: kept when the value buffer cannot be had
        vbuf = self.pool.borrow(value.nbytes)  # leak: kept when the key buffer cannot be had
        if kbuf is None or vbuf is None:
            return False
        for tag, buf, t in (("k", kbuf, key), ("v", vbuf, value)):
            buf[: t.nbytes].copy_(t.contiguous().view(torch.uint8).flatten())
            self.sink[f"{name}.{tag}"] = buf[: t.nbytes].numpy().tobytes()
            self.pool.return_buffer(buf)
        return True
