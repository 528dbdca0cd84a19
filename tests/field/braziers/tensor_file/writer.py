"""Writing and rewriting shards."""
from __future__ import annotations

import contextlib
import json
import os
import struct
from typing import Mapping, Optional

import torch

from .handles import HandleTable, WriterTable
from .reader import ShardReader

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.int8: "I8"}


def write_shard(path: str, tensors: Mapping[str, torch.Tensor]) -> int:
    header: dict[str, dict] = {}
    offset = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        span = [offset, offset + size]
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": span}
        offset += size
    blob = json.dumps(header).encode()
    tmp = path + ".tmp"
    with open(tmp, "wb") as fh:  # clean: with block
        fh.write(struct.pack("<Q", len(blob)))
        fh.write(blob)
        for t in tensors.values():
            fh.write(t.contiguous().numpy().tobytes())
    os.replace(tmp, path)
    return offset


def merge_shards(table: HandleTable, paths: list[str], dest: str) -> int:
    merged: dict[str, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            reader = ShardReader(table, path)  # clean: near miss, the exit stack closes it
            stack.callback(reader.close)
            for name in reader.names():
                merged.setdefault(name, reader.read(name))
    return write_shard(dest, merged)


def cast_shard(table: HandleTable, path: str, dtype: torch.dtype, dest: Optional[str] = None) -> int:
    reader = ShardReader(table, path)  # leak: casting in place never closes it
    tensors = {name: reader.read(name).to(dtype) for name in reader.names()}
    if dest is not None and dest != path:
        reader.close()
        return write_shard(dest, tensors)
    return write_shard(path, tensors)


class StreamingWriter:
    """Appends tensors to rolled shards and keeps an index beside them."""

    def __init__(self, root: str, limit: int = 1 << 30) -> None:
        os.makedirs(root, exist_ok=True)
        self._shards = WriterTable(root, limit)
        self._index = open(os.path.join(root, "index.jsonl"), "a")  # clean: near miss, closed by finish()
        self.count = 0

    def add(self, name: str, t: torch.Tensor) -> None:
        shard, offset = self._shards.append(t.numpy().tobytes())
        row = {"name": name, "shard": shard, "offset": offset, "shape": list(t.shape)}
        self._index.write(json.dumps(row) + "\n")
        self.count += 1

    def finish(self) -> int:
        self._shards.close()
        self._index.close()
        return self.count
