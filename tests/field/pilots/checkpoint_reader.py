from __future__ import annotations

import io
import json
import logging
import mmap
import os
import struct
from typing import BinaryIO, Iterator, Optional

import numpy as np
import torch

logger = logging.getLogger("ckpt")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


class ShardHandle:
    def __init__(self, path: str):
        self.path = path
        self.fh: BinaryIO = open(path, "rb")  # clean: kept by the handle, close() closes it
        self.mm = mmap.mmap(self.fh.fileno(), 0, access=mmap.ACCESS_READ)  # clean: kept by the handle, close() closes it
        (n,) = struct.unpack("<Q", self.mm[:8])
        self.header: dict = json.loads(self.mm[8 : 8 + n])
        self.base = 8 + n
        self.refs = 0

    def close(self) -> None:
        self.mm.close()
        self.fh.close()


class HandleCache:
    def __init__(self, root: str):
        self.root = root
        self._open: dict[str, ShardHandle] = {}

    def retain(self, shard: str) -> ShardHandle:
        handle = self._open.get(shard)
        if handle is None:
            handle = ShardHandle(os.path.join(self.root, shard))  # clean: near miss, cached in _open until drop() sees the last reference go
            self._open[shard] = handle
        handle.refs += 1
        return handle

    def drop(self, handle: ShardHandle) -> None:
        handle.refs -= 1
        if handle.refs == 0:
            self._open.pop(os.path.basename(handle.path), None)
            handle.close()


class CheckpointReader:
    def __init__(self, root: str):
        self.root = root
        self.cache = HandleCache(root)
        self.index = self._read_index()

    def _read_index(self) -> dict[str, str]:
        path = os.path.join(self.root, "model.safetensors.index.json")
        if not os.path.exists(path):
            return {}
        fh = open(path, "r", encoding="utf-8")  # leak: the handled decode error returns an empty index with the file open
        try:
            data = json.load(fh)
        except json.JSONDecodeError:
            logger.warning("broken index %s", path)
            return {}
        fh.close()
        return data["weight_map"]

    def _decode(self, handle: ShardHandle, name: str) -> torch.Tensor:
        info = handle.header[name]
        lo, hi = info["data_offsets"]
        raw = np.frombuffer(handle.mm, np.uint8, hi - lo, handle.base + lo).copy()
        return torch.from_numpy(raw).view(_DTYPES[info["dtype"]]).view(info["shape"])

    def get(self, name: str) -> Optional[torch.Tensor]:
        shard = self.index.get(name)
        if shard is None:
            return None
        handle = self.cache.retain(shard)  # leak: a name missing from the shard's header returns None with the reference kept
        if name not in handle.header:
            return None
        t = self._decode(handle, name)
        self.cache.drop(handle)
        return t

    def get_slice(self, name: str, rank: int, world: int) -> Optional[torch.Tensor]:
        if name not in self.index:
            return None
        handle = self.cache.retain(self.index[name])  # clean: near miss, every return stands inside the try
        try:
            if name not in handle.header:
                return None
            t = self._decode(handle, name)
            if t.dim() == 0:
                return t
            return t.chunk(world, dim=0)[rank].clone()
        finally:
            self.cache.drop(handle)

    def iterate(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        handle: Optional[ShardHandle] = None
        for name, shard in sorted(self.index.items(), key=lambda kv: kv[1]):
            if not name.startswith(prefix):
                continue
            if handle is None or os.path.basename(handle.path) != shard:
                handle = self.cache.retain(shard)  # leak: moving on to the next shard rebinds handle without a drop
            yield name, self._decode(handle, name)
        if handle is not None:
            self.cache.drop(handle)

    def iterate_by_shard(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in sorted(set(self.index.values())):
            handle = self.cache.retain(shard)  # clean: near miss, the finally also runs when the generator is closed
            try:
                for name in handle.header:
                    if name == "__metadata__":
                        continue
                    yield name, self._decode(handle, name)
            finally:
                self.cache.drop(handle)

    def validate(self) -> list[str]:
        missing: list[str] = []
        held: dict[str, ShardHandle] = {}
        for name, shard in self.index.items():
            if shard not in held:
                held[shard] = self.cache.retain(shard)  # clean: near miss, one reference a shard and all dropped below
            if name not in held[shard].header:
                missing.append(name)
        for handle in held.values():
            self.cache.drop(handle)
        return missing

    def pair_diff(self, a: str, b: str) -> float:
        ha = self.cache.retain(self.index[a])  # clean: dropped after the comparison
        hb = ha if self.index[a] == self.index[b] else self.cache.retain(self.index[b])  # leak: only ha is dropped when the names lie in two shards
        diff = (self._decode(ha, a).float() - self._decode(hb, b).float()).abs().max()
        self.cache.drop(ha)
        return float(diff)

    def preload(self, names: list[str]) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = {}
        for name in names:
            handle = self.cache.retain(self.index[name])  # clean: near miss, the skip drops first
            if handle.header[name]["dtype"] not in _DTYPES:
                self.cache.drop(handle)
                continue
            out[name] = self._decode(handle, name)
            self.cache.drop(handle)
        return out


def read_optimizer_shard(path: str, rank: int) -> Optional[dict]:
    fh = io.FileIO(path)  # clean: near miss, the BufferedReader owns fh and the with closes both
    with io.BufferedReader(fh, 1 << 20) as reader:  # clean: the with block closes it on each return
        magic = reader.read(4)
        if magic != b"OPTS":
            return None
        reader.seek(4 + 8 * rank)
        (offset,) = struct.unpack("<Q", reader.read(8))
        reader.seek(offset)
        return torch.load(reader, map_location="cpu")


def latest_step(root: str) -> Optional[int]:
    try:
        fh = open(os.path.join(root, "latest"), "r")  # leak: a tag that does not start with global_step returns None with the file open
    except FileNotFoundError:
        return None
    tag = fh.read().strip()
    if not tag.startswith("global_step"):
        return None
    fh.close()
    return int(tag.removeprefix("global_step"))
