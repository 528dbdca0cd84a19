"""Checkpoint loading: shard files, a descriptor budget, read buffers and the index."""
from __future__ import annotations

import json
import os
import struct
import threading
from dataclasses import dataclass
from typing import BinaryIO, Iterator, Optional


class FdBudget:
    """Limits how many shard files all loader threads hold open together."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._cv = threading.Condition()

    def charge(self) -> None:
        with self._cv:
            while self._n == 0:
                self._cv.wait()
            self._n -= 1

    def credit(self) -> None:
        with self._cv:
            self._n += 1
            self._cv.notify()


class ReadBuffers:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._spare = [bytearray(size) for _ in range(count)]

    def borrow(self) -> bytearray:
        return self._spare.pop() if self._spare else bytearray(self.size)

    def give(self, buf: bytearray) -> None:
        self._spare.append(buf)


@dataclass
class TensorInfo:
    name: str
    dtype: str
    begin: int
    end: int


class Shard:
    """An open safetensors file."""

    def __init__(self, path: str, budget: FdBudget) -> None:
        self.path = path
        self.budget = budget
        budget.charge()  # clean: close credits it
        self.file: Optional[BinaryIO] = open(path, "rb")  # clean: close closes it
        self.header: dict[str, TensorInfo] = {}

    def parse(self) -> "Shard":
        (n,) = struct.unpack("<Q", self.file.read(8))
        for name, meta in json.loads(self.file.read(n)).items():
            if name == "__metadata__":
                continue
            begin, end = meta["data_offsets"]
            self.header[name] = TensorInfo(name, meta["dtype"], 8 + n + begin, 8 + n + end)
        return self

    def read_into(self, info: TensorInfo, buf: bytearray) -> int:
        self.file.seek(info.begin)
        return self.file.readinto(memoryview(buf)[:info.end - info.begin])

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
            self.budget.credit()


class Loader:
    def __init__(self, root: str, budget: FdBudget, bufs: ReadBuffers) -> None:
        self.root = root
        self.budget = budget
        self.bufs = bufs

    def _open_shard(self, fname: str) -> Shard:
        shard = Shard(os.path.join(self.root, fname), self.budget)  # clean: handed to the caller
        return shard.parse()

    def names(self, fname: str) -> list[str]:
        shard = self._open_shard(fname)  # leak: the names are returned, the shard stays open
        return sorted(shard.header)

    def find(self, fnames: list[str], tensor: str) -> Optional[str]:
        for fname in fnames:
            shard = self._open_shard(fname)  # leak: the shard in which it is found is not closed
            if tensor in shard.header:
                return fname
            shard.close()
        return None

    def iterate(self, fname: str, skip: set[str]) -> Iterator[tuple[str, bytes]]:
        shard = self._open_shard(fname)  # clean: closed in the finally, also if the consumer stops
        buf = self.bufs.borrow()  # clean: near miss, one buffer for all, given back in the finally
        try:
            for name, info in shard.header.items():
                if name in skip:
                    continue
                n = shard.read_into(info, buf)
                yield name, bytes(buf[:n])
        finally:
            self.bufs.give(buf)
            shard.close()

    def load_merged(self, fname: str, parts: list[str]) -> bytes:
        """Concatenate q, k and v."""
        shard = self._open_shard(fname)  # clean: closed at the end
        pieces: list[bytearray] = []
        out = bytearray()
        for part in parts:
            buf = self.bufs.borrow()  # leak: only the last of the pieces is given back
            n = shard.read_into(shard.header[part], buf)
            pieces.append(buf)
            out += buf[:n]
        if pieces:
            self.bufs.give(pieces.pop())
        shard.close()
        return bytes(out)

    def verify(self, fname: str, expected: int) -> bool:
        self.budget.charge()  # leak: a size mismatch returns without the credit
        path = os.path.join(self.root, fname)
        if os.path.getsize(path) != expected:
            return False
        with open(path, "rb") as f:  # clean: with
            ok = f.read(8) != b"\0" * 8
        self.budget.credit()
        return ok


def read_index(root: str) -> dict[str, str]:
    f = open(os.path.join(root, "model.safetensors.index.json"))  # leak: never closed
    index = json.load(f)
    return dict(index.get("weight_map", {}))


def has_quant_config(root: str) -> bool:
    path = os.path.join(root, "config.json")
    if not os.path.exists(path):
        return False
    f = open(path)  # clean: closed in the finally
    try:
        return "quantization_config" in json.load(f)
    finally:
        f.close()


def reopen(shard: Shard) -> Shard:
    """A second handle on the same file, for another thread; the caller closes both."""
    return Shard(shard.path, shard.budget).parse()  # clean: handed to the caller


def same_layout(a: Shard, b: Shard) -> bool:
    twin = reopen(a)  # leak: a different number of tensors returns before close
    if len(twin.header) != len(b.header):
        return False
    same = all(twin.header[n].dtype == b.header[n].dtype for n in b.header)
    twin.close()
    return same
