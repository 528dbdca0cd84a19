"""Tensor reads on top of the handle table."""
import torch

from .handles import HandleTable
from .manifest import Manifest

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


class ShardReader:
    def __init__(self, table: HandleTable, manifest: Manifest) -> None:
        self.table = table
        self.manifest = manifest
        self.kept = {}

    def _decode(self, h, e):
        raw = bytearray(h.bytes_at(e.offset, e.nbytes))
        return torch.frombuffer(raw, dtype=DTYPES[e.dtype]).view(e.shape)

    def tensor(self, key):
        e = self.manifest.entries[key]
        h = self.table.open_shard(e.shard)  # leak: not closed for a dtype that is not known
        if h is None:
            raise OSError("handle table is full")
        if e.dtype not in DTYPES:
            raise ValueError(f"{key}: dtype {e.dtype}")
        t = self._decode(h, e)
        self.table.close_shard(h)
        return t

    def tensor_mapped(self, key):
        e = self.manifest.entries[key]
        h = self.table.open_mapped(e.shard)  # clean: closed in finally
        if h is None:
            return None
        try:
            if e.dtype not in DTYPES:
                return None
            return self._decode(h, e)
        finally:
            self.table.close_shard(h)

    def keep(self, shard):
        if shard in self.kept:
            return True
        h = self.table.open_mapped(shard)  # clean: near miss, kept by name, release_kept() closes all
        if h is None:
            return False
        self.kept[shard] = h
        return True

    def release_kept(self):
        while self.kept:
            _, h = self.kept.popitem()
            self.table.close_shard(h)

    def stream(self, shard):
        h = self.table.open_shard(shard)  # clean: closed in finally when the generator ends or is closed
        if h is None:
            return
        try:
            for key, e in self.manifest.entries.items():
                if e.shard == shard:
                    yield key, self._decode(h, e)
        finally:
            self.table.close_shard(h)

    def compare(self, a, b):
        ea, eb = self.manifest.entries[a], self.manifest.entries[b]
        group = self.table.open_group([ea.shard, eb.shard])  # leak: not closed when the shapes differ
        if group is None:
            return None
        if ea.shape != eb.shape:
            return False
        same = torch.equal(self._decode(group[0], ea), self._decode(group[1], eb))
        for h in group:
            self.table.close_shard(h)
        return same
