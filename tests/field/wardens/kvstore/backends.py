from __future__ import annotations

import os
from collections import OrderedDict, deque
from typing import Optional

import torch

from .arena import MemoryObj, PinnedArena


class LocalCPUBackend:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hot: OrderedDict[str, MemoryObj] = OrderedDict()

    def contains(self, key: str) -> bool:
        return key in self.hot

    def put(self, key: str, obj: MemoryObj) -> None:
        if key in self.hot:
            return
        while len(self.hot) >= self.capacity:
            _, victim = self.hot.popitem(last=False)
            victim.ref_count_down()
        obj.ref_count_up()  # clean: near miss, only for new keys, eviction and remove count down
        self.hot[key] = obj

    def overwrite(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # leak: the object stored under the key before keeps its count
        self.hot[key] = obj

    def get(self, key: str) -> Optional[MemoryObj]:
        obj = self.hot.get(key)
        if obj is None:
            return None
        obj.ref_count_up()  # clean: the count belongs to the caller
        self.hot.move_to_end(key)
        return obj

    def remove(self, key: str) -> bool:
        obj = self.hot.pop(key, None)
        if obj is None:
            return False
        obj.ref_count_down()
        return True


class DiskBackend:
    def __init__(self, folder: str, arena: PinnedArena) -> None:
        self.folder = folder
        self.arena = arena
        self.pending: deque[tuple[str, MemoryObj]] = deque()

    def path(self, key: str) -> str:
        return os.path.join(self.folder, f"{key}.kv")

    def submit_put(self, key: str, obj: MemoryObj) -> None:
        obj.ref_count_up()  # leak: flush() drops entries whose file exists without counting down
        self.pending.append((key, obj))

    def flush(self) -> int:
        written = 0
        while self.pending:
            key, obj = self.pending.popleft()
            if os.path.exists(self.path(key)):
                continue
            torch.save(obj.tensor.clone(), self.path(key))
            obj.ref_count_down()
            written += 1
        return written

    def load(self, key: str, nbytes: int) -> Optional[MemoryObj]:
        obj = self.arena.allocate(nbytes)  # clean: near miss, the missing file and the short file count it down
        if obj is None:
            return None
        try:
            data = torch.load(self.path(key))
        except FileNotFoundError:
            obj.ref_count_down()
            return None
        if data.numel() != nbytes:
            obj.ref_count_down()
            return None
        obj.tensor.copy_(data)
        return obj
