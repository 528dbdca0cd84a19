"""Moves a module's parameters to the device shard by shard."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional

import torch

from .copier import CopyEngine
from .pool import PinnedPool, StagingBuffer, TieredPool


@dataclass
class ShardUpload:
    name: str
    buf: Optional[StagingBuffer]
    target: torch.Tensor
    owned: bool = True


class ParameterUploader:
    def __init__(self, pool: TieredPool, engine: CopyEngine):
        self.pool = pool
        self.engine = engine
        self.uploads: Dict[str, ShardUpload] = {}

    def begin(self, name: str, nbytes: int, target: torch.Tensor) -> bool:
        if name in self.uploads:
            return True
        buf = self.pool.lend(nbytes)  # clean: near miss, the table entry is ended by commit or cancel
        if buf is None:
            return False
        self.uploads[name] = ShardUpload(name, buf, target)
        return True

    def commit(self, name: str) -> None:
        upload = self.uploads.pop(name)
        self.engine.submit(upload.buf, upload.target)

    def cancel(self, name: str) -> None:
        upload = self.uploads.pop(name, None)
        if upload is not None and upload.owned:
            self.pool.restore(upload.buf)

    def _enter_borrowed(self, name: str, buf: StagingBuffer, target: torch.Tensor) -> None:
        """Enter a buffer that stays with the caller."""
        self.uploads[name] = ShardUpload(name, buf, target, owned=False)

    def mirror(self, name: str, source: torch.Tensor, target: torch.Tensor) -> bool:
        if name in self.uploads:
            return False
        buf = self.pool.lend(source.numel())  # leak: entered as borrowed, cancel restores owned
        if buf is None:
            return False
        buf.data[:source.numel()].copy_(source)
        self._enter_borrowed(name, buf, target)
        if not torch.equal(buf.data[:source.numel()], source):
            self.cancel(name)
            return False
        self.commit(name)
        return True

    def grow(self, name: str, nbytes: int) -> bool:
        upload = self.uploads[name]
        bigger = self.pool.upgrade(upload.buf, nbytes)  # clean: near miss, upgrade restored the old one
        if bigger is None:
            return False
        upload.buf = bigger
        return True


def upload_shards(pool: PinnedPool, engine: CopyEngine, shards: Iterable[torch.Tensor], device) -> List:
    out = []
    for shard in shards:
        raw = shard.contiguous().view(torch.uint8).view(-1)
        buf = pool.lend(raw.numel())  # leak: an empty shard goes on without restore
        if buf is None:
            out.append(shard.to(device))
            continue
        dst = torch.empty(raw.numel(), dtype=torch.uint8, device=device)
        if raw.numel() == 0:
            out.append(dst)
            continue
        buf.data[:raw.numel()].copy_(raw)
        engine.submit(buf, dst)
        out.append(dst.view(shard.dtype).view(shard.shape))
    return out
