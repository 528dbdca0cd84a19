"""Two-level offload of KV pages: host chunks first, then disk."""
from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from typing import Optional

import torch

from .arena import Chunk, ChunkArena
from .disk import DiskStore


class OffloadTier:
    def __init__(self, arena: ChunkArena, disk: DiskStore) -> None:
        self.arena = arena
        self.disk = disk
        self.hot: OrderedDict[str, Chunk] = OrderedDict()
        self._spill: queue.Queue[Optional[tuple[str, Chunk]]] = queue.Queue()
        self._thread = threading.Thread(target=self._spiller, daemon=True)
        self._thread.start()

    def put(self, key: str, page: torch.Tensor) -> bool:
        if key in self.hot:
            self.hot.move_to_end(key)
            return True
        chunk = self.arena.alloc()  # clean: near miss, stored in hot, where evict() and close() let it go
        if chunk is None:
            return False
        flat = page.contiguous().view(torch.uint8).flatten()
        chunk.data[: flat.numel()].copy_(flat)
        self.hot[key] = chunk
        return True

    def put_exclusive(self, key: str, page: torch.Tensor) -> bool:
        chunk = self.arena.alloc_clean()  # leak: a page bigger than the chunk returns False with the chunk allocated
        if chunk is None:
            return False
        flat = page.contiguous().view(torch.uint8).flatten()
        if flat.numel() > chunk.data.numel():
            return False
        chunk.data[: flat.numel()].copy_(flat)
        old = self.hot.pop(key, None)
        if old is not None:
            self.arena.ref_down(old)
        self.hot[key] = chunk
        return True

    def get(self, key: str) -> Optional[Chunk]:
        """The caller has to ref_down() what it gets."""
        chunk = self.hot.get(key)
        if chunk is not None:
            self.arena.ref_up(chunk)  # clean: near miss, the reference belongs to the caller
            return chunk
        chunk = self.arena.alloc()  # clean: near miss, a missing file lets it go, otherwise the caller owns it
        if chunk is None:
            return None
        if not self.disk.read(key, chunk):
            self.arena.ref_down(chunk)
            return None
        return chunk

    def load(self, key: str, dst: torch.Tensor) -> bool:
        chunk = self.get(key)  # clean: let go after the copy
        if chunk is None:
            return False
        flat = dst.view(torch.uint8).flatten()
        flat.copy_(chunk.data[: flat.numel()])
        self.arena.ref_down(chunk)
        return True

    def load_run(self, keys: list[str], dst: list[torch.Tensor]) -> int:
        held: list[Chunk] = []
        for key in keys:
            chunk = self.get(key)  # leak: a missing page returns 0 and the chunks collected in held stay referenced
            if chunk is None:
                return 0
            held.append(chunk)
        for chunk, out in zip(held, dst):
            flat = out.view(torch.uint8).flatten()
            flat.copy_(chunk.data[: flat.numel()])
        for chunk in held:
            self.arena.ref_down(chunk)
        return len(held)

    def contains_all(self, keys: list[str]) -> bool:
        return all(self.get(key) is not None for key in keys)  # leak: every chunk found is compared to None and dropped with its reference

    def evict(self) -> bool:
        if not self.hot:
            return False
        self._spill.put(self.hot.popitem(last=False))
        return True

    def mirror(self, key: str) -> bool:
        chunk = self.hot.get(key)
        if chunk is None:
            return False
        self.arena.ref_up(chunk)  # clean: near miss, the spiller lets go whatever comes through the queue
        self._spill.put((key, chunk))
        return True

    def _spiller(self) -> None:
        while True:
            item = self._spill.get()
            if item is None:
                return
            key, chunk = item
            try:
                self.disk.write(key, chunk)
            except OSError:
                continue
            finally:
                self.arena.ref_down(chunk)

    def close(self) -> None:
        while self.evict():
            pass
        self._spill.put(None)
        self._thread.join()
