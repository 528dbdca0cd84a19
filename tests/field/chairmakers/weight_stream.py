"""Stream safetensors shards through pinned staging memory onto the device.

Reader threads fill staging regions, the main thread copies them over and runs the
weight loaders. Nothing but the header of a shard is ever held in pageable memory.
"""
import argparse
import json
import logging
import mmap
import os
import queue
import struct
import threading
from pathlib import Path

import torch

log = logging.getLogger("weights")

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I8": torch.int8}
SENTINEL = object()


class ShardCorrupt(Exception):
    pass


class NameClash(Exception):
    pass


class Staging:
    """A handful of equally large pinned regions."""

    def __init__(self, regions, nbytes):
        self.nbytes = nbytes
        self._idle = queue.Queue()
        for _ in range(regions):
            self._idle.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def get_region(self, timeout=60.0):
        return self._idle.get(timeout=timeout)  # clean: handed to the caller

    def put_region(self, region):
        self._idle.put(region)


class Shard:
    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)  # clean: closed in close()
        self.map = None
        self.header = {}
        self.base = 0

    def open(self):
        self.map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)  # clean: close() closes it whenever it is there
        (n,) = struct.unpack("<Q", self.map[:8])
        if n > len(self.map) - 8:
            raise ShardCorrupt(f"{self.path}: header of {n} bytes")
        self.header = json.loads(self.map[8:8 + n])
        self.header.pop("__metadata__", None)
        self.base = 8 + n
        return self

    def names(self):
        return list(self.header)

    def slice_of(self, name):
        lo, hi = self.header[name]["data_offsets"]
        return memoryview(self.map)[self.base + lo:self.base + hi]

    def close(self):
        if self.map is not None:
            self.map.close()
            self.map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_shards(folder):
    """All shards of a checkpoint, opened; raises on the first that is damaged."""
    shards = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        shard = Shard(path)  # leak: ShardCorrupt out of open() drops this one and those before it
        shard.open()
        shards.append(shard)
    return shards


def total_bytes(folder):
    """Size of all tensors; damaged shards count as nothing."""
    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        shard = Shard(path)  # clean: near miss, the handler falls through to the finally
        try:
            shard.open()
            total += sum(m["data_offsets"][1] - m["data_offsets"][0] for m in shard.header.values())
        except ShardCorrupt as exc:
            log.warning("%s", exc)
            continue
        finally:
            shard.close()
    return total


class Piece:
    """A tensor that lies in a staging region."""

    def __init__(self, name, meta, region, nbytes, staging):
        self.name, self.meta = name, meta
        self.region, self.nbytes, self.staging = region, nbytes, staging

    def tensor(self):
        flat = self.region[:self.nbytes].view(DTYPES[self.meta["dtype"]])
        return flat.reshape(self.meta["shape"])

    def free(self):
        region, self.region = self.region, None
        if region is not None:
            self.staging.put_region(region)


class Reader(threading.Thread):
    def __init__(self, shard, wanted, staging, out, stop):
        super().__init__(daemon=True)
        self.shard, self.wanted, self.staging = shard, wanted, staging
        self.out, self.stop = out, stop

    def run(self):
        try:
            for name in self.shard.names():
                if self.stop.is_set():
                    return
                if name not in self.wanted:
                    continue
                data = self.shard.slice_of(name)
                region = self.staging.get_region()  # leak: a tensor larger than a region is skipped after the region was taken
                if len(data) > self.staging.nbytes:
                    log.error("%s needs %d bytes, regions have %d", name, len(data), self.staging.nbytes)
                    continue
                region[:len(data)] = torch.frombuffer(data, dtype=torch.uint8)
                self.out.put(Piece(name, self.shard.header[name], region, len(data), self.staging))
        finally:
            self.out.put(SENTINEL)


def iterate_pieces(shards, wanted, staging):
    """Pieces in the order in which the readers have them. Whoever iterates frees them."""
    out = queue.Queue()
    stop = threading.Event()
    readers = [Reader(s, wanted, staging, out, stop) for s in shards]
    for r in readers:
        r.start()
    alive = len(readers)
    try:
        while alive:
            item = out.get()
            if item is SENTINEL:
                alive -= 1
                continue
            yield item
    finally:
        stop.set()
        while alive:
            item = out.get()
            if item is SENTINEL:
                alive -= 1
            else:
                item.free()


def load_model(model, folder, staging, strict=True):
    params = dict(model.named_parameters())
    shards = open_shards(folder)  # leak: NameClash below leaves before the shards are closed
    seen = set()
    for shard in shards:
        for name in shard.names():
            if name in seen:
                raise NameClash(name)
            seen.add(name)
    try:
        for piece in iterate_pieces(shards, params, staging):  # clean: near miss, freed in the inner finally, the rest by the generator
            try:
                param = params[piece.name]
                loader = getattr(param, "weight_loader", None)
                if loader is not None:
                    loader(param, piece.tensor())
                else:
                    param.data.copy_(piece.tensor(), non_blocking=True)
                torch.cuda.current_stream().synchronize()
            finally:
                piece.free()
    finally:
        for shard in shards:
            shard.close()
    missing = set(params) - seen
    if missing and strict:
        raise KeyError(f"{len(missing)} parameters are not in {folder}")
    return missing


def patch_expert(param, shard, name, staging):
    """Overwrites one expert in place; False if the checkpoint has another shape."""
    region = staging.get_region()  # clean: put back by every path, the shape check included
    data = shard.slice_of(name)
    shape = tuple(shard.header[name]["shape"])
    if shape != tuple(param.shape):
        staging.put_region(region)
        return False
    region[:len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    param.data.copy_(region[:len(data)].view(param.dtype).reshape(shape))
    staging.put_region(region)
    return True


def patch_experts(model, path, prefix, staging):
    shard = Shard(path)  # leak: the return for a checkpoint without experts does not close it
    shard.open()
    names = [n for n in shard.names() if n.startswith(prefix)]
    if not names:
        return 0
    params = dict(model.named_parameters())
    patched = sum(patch_expert(params[n], shard, n, staging) for n in names if n in params)
    shard.close()
    return patched


def checksum(folder, staging, wanted):
    """Cheap fingerprint of the first bytes of every wanted tensor."""
    acc = 0
    shards = open_shards(folder)  # clean: closed by the finally
    try:
        for piece in iterate_pieces(shards, wanted, staging):  # leak: empty tensors are passed over with their region
            if piece.nbytes == 0:
                continue
            acc = (acc * 31 + int(piece.region[0])) & 0xFFFFFFFF
            piece.free()
    finally:
        for shard in shards:
            shard.close()
    return acc


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    ap.add_argument("--region-mib", type=int, default=256)
    args = ap.parse_args()
    log.info("%d bytes in all", total_bytes(args.folder))
    staging = Staging(4, args.region_mib << 20)
    with open(os.path.join(args.folder, "config.json")) as fh:  # clean: with statement
        config = json.load(fh)
    print(config.get("architectures"), hex(checksum(args.folder, staging, set(config.get("fingerprint", [])))))


if __name__ == "__main__":
    main()
