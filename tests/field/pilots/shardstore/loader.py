from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Iterator, Optional

import torch
from torch import Tensor

from .staging import StagingRing
from .tickets import TicketBooth


class ShardLoader:
    def __init__(self, root: str, ring: StagingRing, booth: TicketBooth, workers: int = 4):
        self.root = root
        self.ring = ring
        self.booth = booth
        self._pool = ThreadPoolExecutor(workers)
        self._files: dict[str, BinaryIO] = {}

    def _file(self, shard: str) -> BinaryIO:
        fh = self._files.get(shard)
        if fh is None:
            fh = open(os.path.join(self.root, shard), "rb")  # clean: near miss, cached in _files, which close() walks
            self._files[shard] = fh
        fh.seek(0)
        return fh

    def size(self, shard: str) -> int:
        fh = open(os.path.join(self.root, shard), "rb")  # leak: the shard without a trailer returns before the close
        end = fh.seek(0, os.SEEK_END)
        if end < 8:
            return 0
        fh.seek(-8, os.SEEK_END)
        n = int.from_bytes(fh.read(8), "little")
        fh.close()
        return n

    def read(self, shard: str, device: torch.device) -> Optional[Tensor]:
        with self.booth.ticket():  # clean: the with block hands it back
            buf = self.ring.pick(timeout=5.0)  # clean: near miss, an unreadable shard lays it back in the handler
            if buf is None:
                return None
            try:
                n = self._file(shard).readinto(memoryview(buf.numpy()))
            except OSError:
                self.ring.lay_back(buf)
                return None
            out = buf[:n].to(device, copy=True)
            self.ring.lay_back(buf)
            return out

    def read_fast(self, shard: str, device: torch.device) -> Optional[Tensor]:
        self.booth.draw()  # leak: without a staging buffer it returns and the ticket is not handed back
        buf = self.ring.pick(timeout=0.1)  # clean: laid back after the copy
        if buf is None:
            return None
        n = self._file(shard).readinto(memoryview(buf.numpy()))
        out = buf[:n].to(device, copy=True)
        self.ring.lay_back(buf)
        self.booth.hand_back()
        return out

    def _fill(self, shard: str, buf: Tensor) -> tuple[Tensor, int]:
        return buf, self._file(shard).readinto(memoryview(buf.numpy()))

    def prefetch(self, shards: list[str], device: torch.device) -> Iterator[Tensor]:
        futures: list[Future[tuple[Tensor, int]]] = []
        for shard in shards:
            buf = self.ring.pick()  # leak: an empty shard is passed over by continue and its buffer not laid back
            futures.append(self._pool.submit(self._fill, shard, buf))
            if len(futures) < 2:
                continue
            got, n = futures.pop(0).result()
            if n == 0:
                continue
            yield got[:n].to(device, copy=True)
            self.ring.lay_back(got)
        for fut in futures:
            got, n = fut.result()
            out = got[:n].to(device, copy=True)
            self.ring.lay_back(got)
            yield out

    def compare(self, a: str, b: str) -> Optional[bool]:
        pair = self.ring.pick_pair(1.0)  # leak: shards of unequal length return False with both buffers out
        if pair is None:
            return None
        left, right = pair
        n, m = self._file(a).readinto(memoryview(left.numpy())), self._file(b).readinto(memoryview(right.numpy()))
        if n != m:
            return False
        same = bool(torch.equal(left[:n], right[:m]))
        for buf in pair:
            self.ring.lay_back(buf)
        return same

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for fh in self._files.values():
            fh.close()
        self._files.clear()
