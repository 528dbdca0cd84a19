#!/usr/bin/env python3
"""Loads sharded weights: files are opened once, tensors go through staging buffers."""
import argparse
import json
import logging
import os
import struct
import sys
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import nn

logger = logging.getLogger("loader")

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StagingBuffers:
    def __init__(self, n: int, size: int):
        self.size = size
        self.idle: List[torch.Tensor] = [torch.empty(size, dtype=torch.uint8) for _ in range(n)]

    def pull(self) -> torch.Tensor:
        return self.idle.pop() if self.idle else torch.empty(self.size, dtype=torch.uint8)

    def push(self, t: torch.Tensor) -> None:
        self.idle.append(t)


class ShardReader:
    def __init__(self, path: str):
        self.path = path
        self.file = open(path, "rb")  # clean: close() closes it
        (n,) = struct.unpack("<Q", self.file.read(8))
        self.header: Dict[str, dict] = json.loads(self.file.read(n))
        self.base = 8 + n

    def keys(self) -> List[str]:
        return [k for k in self.header if k != "__metadata__"]

    def read_into(self, key: str, buf: torch.Tensor) -> int:
        lo, hi = self.header[key]["data_offsets"]
        self.file.seek(self.base + lo)
        return self.file.readinto(memoryview(buf.numpy())[: hi - lo])

    def close(self) -> None:
        self.file.close()


def iter_weights(paths: List[str], staging: StagingBuffers) -> Iterator[Tuple[str, torch.Tensor]]:
    for path in paths:
        reader = ShardReader(path)
        buf = staging.pull()  # clean: pushed back after the shard
        for key in reader.keys():
            n = reader.read_into(key, buf)
            meta = reader.header[key]
            yield key, buf[:n].view(DTYPES[meta["dtype"]]).view(meta["shape"]).clone()
        staging.push(buf)
        reader.close()


def load_into(model: nn.Module, path: str, staging: StagingBuffers, remap: Callable[[str], Optional[str]]) -> int:
    params = dict(model.named_parameters())
    reader = ShardReader(path)
    loaded = 0
    for key in reader.keys():
        buf = staging.pull()  # leak: keys that remap to None are skipped with the buffer
        n = reader.read_into(key, buf)
        name = remap(key)
        if name is None:
            continue
        p = params[name]
        p.data.copy_(buf[:n].view(DTYPES[reader.header[key]["dtype"]]).view_as(p))
        staging.push(buf)
        loaded += 1
    reader.close()
    return loaded


def load_into_checked(model: nn.Module, path: str, staging: StagingBuffers) -> List[str]:
    params = dict(model.named_parameters())
    reader = ShardReader(path)
    missing = []
    buf = staging.pull()  # clean: near miss, unknown keys continue and the push follows the loop
    for key in reader.keys():
        if key not in params:
            missing.append(key)
            continue
        n = reader.read_into(key, buf)
        params[key].data.copy_(buf[:n].view(params[key].dtype).view_as(params[key]))
    staging.push(buf)
    reader.close()
    return missing


def read_index(root: str) -> Dict[str, str]:
    path = os.path.join(root, "model.index.json")
    if not os.path.exists(path):
        return {}
    with open(path) as fh:  # clean: with block
        return json.load(fh)["weight_map"]


def count_parameters(path: str) -> int:
    fh = open(path, "rb")  # leak: a short header returns zero with the file open
    head = fh.read(8)
    if len(head) < 8:
        return 0
    header = json.loads(fh.read(struct.unpack("<Q", head)[0]))
    fh.close()
    total = 0
    for k, meta in header.items():
        if k == "__metadata__":
            continue
        n = 1
        for d in meta["shape"]:
            n *= d
        total += n
    return total


def tied_embedding(model: nn.Module, reader: ShardReader, staging: StagingBuffers, key: str) -> bool:
    buf = staging.pull()  # leak: float() of half precision data is a new tensor, and that one is pushed
    n = reader.read_into(key, buf)
    buf = buf[:n].view(torch.float16).float()
    for name, p in model.named_parameters():
        if name.endswith("embed.weight") or name.endswith("lm_head.weight"):
            p.data.copy_(buf.view_as(p))
    staging.push(buf)
    return True


def main(argv: Optional[List[str]] = None) -> int:
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--log-file")
    args = ap.parse_args(argv)
    out = open(args.log_file, "w") if args.log_file else sys.stdout  # clean: near miss, closed exactly when it is not stdout
    total = 0
    for shard in sorted(set(read_index(args.root).values())):
        n = count_parameters(os.path.join(args.root, shard))
        if args.list:
            print(shard, n, file=out)
        total += n
    print("total", total, file=out)
    if out is not sys.stdout:
        out.close()
    return 0 if total else 1


if __name__ == "__main__":
    sys.exit(main())
