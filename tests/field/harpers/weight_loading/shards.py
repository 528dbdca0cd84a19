"""Shard files: headers, memory maps and a cache of opened shards with reference counts."""
from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import BinaryIO


@dataclass
class TensorInfo:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass
class Shard:
    path: str
    fp: BinaryIO
    mm: mmap.mmap
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    refs: int = 0

    def payload(self, info: TensorInfo) -> bytes:
        return self.mm[info.begin:info.end]


def parse_header(fp: BinaryIO) -> dict[str, TensorInfo]:
    (length,) = struct.unpack("<Q", fp.read(8))
    raw = json.loads(fp.read(length))
    raw.pop("__metadata__", None)
    base = 8 + length
    infos = {}
    for name, meta in raw.items():
        lo, hi = meta["data_offsets"]
        infos[name] = TensorInfo(name, meta["dtype"], tuple(meta["shape"]), base + lo, base + hi)
    return infos


class ShardCache:
    """open_shard counts up, close_shard counts down and closes the file at zero."""

    def __init__(self, root: str):
        self.root = root
        self._open: dict[str, Shard] = {}

    def open_shard(self, name: str) -> Shard:
        shard = self._open.get(name)
        if shard is None:
            fp = open(os.path.join(self.root, name), "rb")  # clean: near miss, kept in the shard and closed at zero
            tensors = parse_header(fp)
            shard = Shard(name, fp, mmap.mmap(fp.fileno(), 0, access=mmap.ACCESS_READ), tensors)
            self._open[name] = shard
        shard.refs += 1
        return shard

    def close_shard(self, shard: Shard) -> None:
        shard.refs -= 1
        if shard.refs == 0:
            del self._open[shard.path]
            shard.mm.close()
            shard.fp.close()

    def find(self, tensor: str, names: list[str]) -> Shard | None:
        """The first shard which holds the tensor, opened for the caller."""
        for name in names:
            shard = self.open_shard(name)  # clean: returned if it holds the tensor, closed otherwise
            if tensor in shard.tensors:
                return shard
            self.close_shard(shard)
        return None

    def find_last(self, tensor: str, names: list[str]) -> Shard | None:
        """Later shards override former ones."""
        found = None
        for name in names:
            shard = self.open_shard(name)  # leak: an overridden shard and one without the tensor are never closed
            if tensor in shard.tensors:
                found = shard
        return found

    def find_newest(self, tensor: str, names: list[str]) -> Shard | None:
        found = None
        for name in names:
            shard = self.open_shard(name)  # clean: near miss, overridden ones are closed as are those without the tensor
            if tensor not in shard.tensors:
                self.close_shard(shard)
                continue
            if found is not None:
                self.close_shard(found)
            found = shard
        return found


def read_index(root: str) -> dict[str, str]:
    path = os.path.join(root, "model.safetensors.index.json")
    if not os.path.exists(path):
        return {}
    with open(path) as fp:  # clean: closed by with
        return json.load(fp)["weight_map"]


def count_tensors(paths: list[str]) -> int:
    total = 0
    for path in paths:
        fp = open(path, "rb")  # leak: files of no length go to the next turn without close
        if os.fstat(fp.fileno()).st_size < 8:
            continue
        total += len(parse_header(fp))
        fp.close()
    return total
