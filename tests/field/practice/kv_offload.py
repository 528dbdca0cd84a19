"""Two-tier KV offload: GPU blocks go to host slabs, cold slabs go to disk."""
from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadConfig:
    num_slabs: int = 512
    slab_shape: tuple[int, ...] = (2, 16, 8, 128)
    spill_dir: Path = Path("spill")
    low_watermark: int = 8


class SlabPool:
    def __init__(self, cfg: OffloadConfig) -> None:
        self._store = torch.empty((cfg.num_slabs, *cfg.slab_shape), dtype=torch.float16)
        self._free = list(range(cfg.num_slabs))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        return [self._free.pop() for _ in range(n)]

    def free(self, slabs: list[int]) -> None:
        self._free.extend(slabs)

    def view(self, slab: int) -> torch.Tensor:
        return self._store[slab]


class OffloadManager:
    def __init__(self, cfg: OffloadConfig) -> None:
        self.cfg = cfg
        self.pool = SlabPool(cfg)
        self.resident: OrderedDict[str, list[int]] = OrderedDict()
        self.on_disk: dict[str, int] = {}
        self.slab_bytes = self.pool.view(0).numel() * 2

    def _path(self, key: str) -> Path:
        return self.cfg.spill_dir / f"{key}.kv"

    def offload(self, key: str, gpu_blocks: list[torch.Tensor]) -> bool:
        if key in self.resident:
            self.resident.move_to_end(key)
            return True
        slabs = self.pool.allocate(len(gpu_blocks))  # clean: kept in the resident table, drop() and spill_oldest() free it
        if slabs is None:
            return False
        for slab, block in zip(slabs, gpu_blocks):
            self.pool.view(slab).copy_(block, non_blocking=True)
        self.resident[key] = slabs
        return True

    def drop(self, key: str) -> None:
        slabs = self.resident.pop(key, None)
        if slabs is not None:
            self.pool.free(slabs)
        self.on_disk.pop(key, None)

    def spill_oldest(self) -> str | None:
        if not self.resident:
            return None
        key, slabs = self.resident.popitem(last=False)
        with open(self._path(key), "wb") as fh:  # clean: with block
            for slab in slabs:
                fh.write(self.pool.view(slab).numpy().tobytes())
        self.on_disk[key] = len(slabs)
        self.pool.free(slabs)
        return key

    def prefetch(self, key: str) -> bool:
        if key in self.resident or key not in self.on_disk:
            return key in self.resident
        slabs = self.pool.allocate(self.on_disk[key])  # leak: a truncated file returns without freeing
        if slabs is None:
            return False
        with open(self._path(key), "rb") as fh:  # clean: near miss, early return inside with
            for slab in slabs:
                raw = fh.read(self.slab_bytes)
                if len(raw) < self.slab_bytes:
                    logger.warning("truncated spill file for %s", key)
                    return False
                flat = torch.frombuffer(bytearray(raw), dtype=torch.float16)
                self.pool.view(slab).copy_(flat.view(self.cfg.slab_shape))
        self.resident[key] = slabs
        return True

    def peek_from_disk(self, key: str, device: str = "cuda") -> torch.Tensor | None:
        n = self.on_disk.get(key, 0)
        if n == 0:
            return None
        slabs = self.pool.allocate(n)  # clean: near miss, the short read breaks to the common free
        if slabs is None:
            return None
        ok = True
        fh = open(self._path(key), "rb")  # clean: closed after the loop on every path
        for slab in slabs:
            raw = fh.read(self.slab_bytes)
            if len(raw) < self.slab_bytes:
                ok = False
                break
            self.pool.view(slab).copy_(torch.frombuffer(bytearray(raw), dtype=torch.float16).view(self.cfg.slab_shape))
        fh.close()
        out = torch.stack([self.pool.view(s) for s in slabs]).to(device) if ok else None
        self.pool.free(slabs)
        return out

    def replicate(self, src: str, dst: str) -> bool:
        """Make a private copy of `src` under another key."""
        source = self.resident.get(src)
        if source is None:
            return False
        while self.pool.num_free < len(source) + self.cfg.low_watermark:
            if self.spill_oldest() is None:
                return False
        slabs = self.pool.allocate(len(source))  # leak: given up without a free when dst turns out to be resident already
        if slabs is None or dst in self.resident:
            return False
        for a, b in zip(source, slabs):
            self.pool.view(b).copy_(self.pool.view(a))
        self.resident[dst] = slabs
        return True

    def checksum(self, key: str) -> int:
        if key not in self.on_disk:
            return 0
        fh = open(self._path(key), "rb")  # leak: empty file returns before close
        head = fh.read(8)
        if not head:
            return 0
        total = sum(head)
        for chunk in iter(lambda: fh.read(1 << 16), b""):
            total = (total + sum(chunk)) & 0xFFFFFFFF
        fh.close()
        return total

    def warmup(self, n: int) -> None:
        """Touch the slabs once so that the pages are mapped."""
        slabs = self.pool.allocate(min(n, self.pool.num_free))  # leak: only the first half goes back
        if not slabs:
            return
        for slab in slabs:
            self.pool.view(slab).zero_()
        self.pool.free(slabs[: len(slabs) // 2])

    def shutdown(self) -> None:
        for key in list(self.resident):
            self.drop(key)
