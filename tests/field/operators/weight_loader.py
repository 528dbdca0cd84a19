"""Streaming weight loader with pinned staging buffers and a shard cache."""
from __future__ import annotations

import fcntl
import json
import logging
import mmap
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@dataclass
class TensorInfo:
    name: str
    shard: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]


class StagingPool:
    """Pinned buffers for host-to-device copies."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._buffers.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def get_buffer(self) -> torch.Tensor:
        return self._buffers.get()  # clean: to the caller

    def put_buffer(self, buffer: torch.Tensor) -> None:
        self._buffers.put(buffer)


class ShardReader:
    """A memory-mapped shard file."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # clean: closed by close()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)  # clean: closed by close()

    def read_into(self, info: TensorInfo, out: torch.Tensor) -> None:
        data = bytearray(self._map[info.offset:info.offset + info.nbytes])
        out[:info.nbytes].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def close(self) -> None:
        self._map.close()
        self._file.close()


class ShardCache:
    """Open readers with use counts; idle readers are closed over the limit."""

    def __init__(self, root: Path, max_open: int = 8) -> None:
        self.root = root
        self.max_open = max_open
        self._readers: dict[str, ShardReader] = {}
        self._uses: dict[str, int] = {}

    def open_shard(self, shard: str) -> ShardReader:
        """A reader in use; done_with() ends the use."""
        if shard not in self._readers:
            self._readers[shard] = ShardReader(self.root / shard)  # clean: near miss, the cache had no such reader, done_with() or close_idle() closes it
            self._uses[shard] = 0
        self._uses[shard] += 1  # clean: the use belongs to the caller
        return self._readers[shard]

    def done_with(self, shard: str) -> None:
        self._uses[shard] -= 1
        if self._uses[shard] == 0 and len(self._readers) > self.max_open:
            self._readers.pop(shard).close()
            del self._uses[shard]

    def close_idle(self) -> None:
        for shard in [s for s, n in self._uses.items() if n == 0]:
            self._readers.pop(shard).close()
            del self._uses[shard]


class WeightLoader:
    """Copies tensors of a checkpoint into model parameters."""

    def __init__(self, shards: ShardCache, staging: StagingPool, index: dict[str, TensorInfo]) -> None:
        self.shards = shards
        self.staging = staging
        self.index = index

    def load_param(self, name: str, param: torch.Tensor) -> bool:
        """Load one parameter; False when shapes differ."""
        info = self.index[name]
        reader = self.shards.open_shard(info.shard)  # leak: a shape mismatch returns without done_with()
        if tuple(param.shape) != info.shape:
            logger.error("%s: expected %s, checkpoint has %s", name, tuple(param.shape), info.shape)
            return False
        buffer = self.staging.get_buffer()  # clean: put back after the copy
        reader.read_into(info, buffer)
        param.view(torch.uint8).view(-1).copy_(buffer[:info.nbytes])
        self.staging.put_buffer(buffer)
        self.shards.done_with(info.shard)
        return True

    def load_all(self, params: dict[str, torch.Tensor], skip: set[str]) -> list[str]:
        """Load every parameter; returns the names that were not found."""
        missing: list[str] = []
        for name, param in params.items():
            buffer = self.staging.get_buffer()  # leak: skipped, missing and mismatched names continue with the buffer
            if name in skip:
                continue
            info = self.index.get(name)
            if info is None:
                missing.append(name)
                continue
            reader = self.shards.open_shard(info.shard)  # leak: a tensor of another size continues without done_with()
            if info.nbytes != param.nbytes:
                missing.append(name)
                continue
            reader.read_into(info, buffer)
            self.shards.done_with(info.shard)
            param.view(torch.uint8).view(-1).copy_(buffer[:info.nbytes])
            self.staging.put_buffer(buffer)
        return missing

    def iter_tensors(self, shard: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of a shard; the tensor is valid until the next one."""
        reader = self.shards.open_shard(shard)  # clean: near miss, the finally ends the use also when the generator is closed
        buffer = self.staging.get_buffer()  # clean: near miss, put back by the same finally
        try:
            for info in self.index.values():
                if info.shard != shard:
                    continue
                reader.read_into(info, buffer)
                yield info.name, buffer[:info.nbytes]
        finally:
            self.staging.put_buffer(buffer)
            self.shards.done_with(shard)

    def checksum(self, name: str) -> int:
        info = self.index[name]
        buffer = self.staging.get_buffer()  # leak: the sum is returned and the buffer is not put back
        reader = self.shards.open_shard(info.shard)  # clean: done right after the read
        reader.read_into(info, buffer)
        self.shards.done_with(info.shard)
        return int(buffer[:info.nbytes].sum())


def download_lock(root: Path) -> bool:
    """Whether another process is downloading into root."""
    f = open(root / ".lock", "w")  # leak: the answer for a locked directory returns with the file open
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(f, fcntl.LOCK_UN)
    f.close()
    return False


def read_index(path: Path) -> dict[str, TensorInfo]:
    with open(path, encoding="utf-8") as f:  # clean: scoped
        raw = json.load(f)
    return {name: TensorInfo(name, e["shard"], e["offset"], e["nbytes"], tuple(e["shape"])) for name, e in raw.items()}
