from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch

from .index import TierIndex
from .memory import HostArena, MemoryObj, PageAllocator


@dataclass
class LoadSpec:
    request_id: str
    chunks: list[int]
    objs: list[MemoryObj] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class TieredEngine:
    def __init__(self, kv: torch.Tensor, pages: PageAllocator, arena: HostArena, index: TierIndex) -> None:
        self.kv = kv
        self.pages = pages
        self.arena = arena
        self.index = index
        self.page_nbytes = kv[0].nbytes
        self._loads: dict[str, LoadSpec] = {}

    def _allocate_evicting(self) -> Optional[MemoryObj]:
        while (obj := self.arena.allocate(self.page_nbytes)) is None:  # clean: near miss, the loop ends with the first object and returns it
            if not self.index.evict_one():
                return None
        return obj

    def store(self, chunks: list[int], pages: list[int]) -> int:
        stored = 0
        for chunk, page in zip(chunks, pages):
            obj = self._allocate_evicting()  # leak: a chunk that the index knows already continues without dropping the engine's reference
            if obj is None:
                break
            obj.view.copy_(self.kv[page].view(torch.uint8).flatten())
            if not self.index.insert(chunk, obj):
                continue
            self.arena.ref_count_down(obj)
            stored += 1
        return stored

    def refresh(self, chunk: int, page: int) -> bool:
        obj = self._allocate_evicting()  # clean: near miss, the engine's own reference is dropped once the index has its own
        if obj is None:
            return False
        obj.view.copy_(self.kv[page].view(torch.uint8).flatten())
        self.index.replace(chunk, obj)
        self.arena.ref_count_down(obj)
        return True

    def lookup(self, chunks: list[int]) -> int:
        run = self.index.get_run(chunks)  # leak: only the length is used, the references of the run are not dropped
        return len(run)

    def lookup_bytes(self, chunks: list[int]) -> int:
        run = self.index.get_run(chunks)  # clean: near miss, summed and dropped
        total = sum(obj.nbytes for obj in run)
        for obj in run:
            self.arena.ref_count_down(obj)
        return total

    def start_load(self, request_id: str, chunks: list[int]) -> bool:
        if request_id in self._loads:
            return False
        objs = self.index.get_run(chunks)  # clean: near miss, dropped where no pages are left, else with the load
        if not objs:
            return False
        pages = self.pages.alloc(len(objs))  # leak: cancel_load drops the objects and forgets the pages
        if pages is None:
            for obj in objs:
                self.arena.ref_count_down(obj)
            return False
        self._loads[request_id] = LoadSpec(request_id, chunks[:len(objs)], objs, pages)
        return True

    def finish_load(self, request_id: str) -> list[int]:
        spec = self._loads.pop(request_id)
        for obj, page in zip(spec.objs, spec.pages):
            self.kv[page].view(torch.uint8).view(-1).copy_(obj.view)
            self.arena.ref_count_down(obj)
        return spec.pages

    def cancel_load(self, request_id: str) -> None:
        spec = self._loads.pop(request_id, None)
        if spec is None:
            return
        for obj in spec.objs:
            self.arena.ref_count_down(obj)

    def scratch_copy(self, pages: list[int]) -> Optional[torch.Tensor]:
        objs = self.arena.batched_allocate(self.page_nbytes, len(pages))  # clean: near miss, the concatenation copies, and all are dropped after it
        if objs is None:
            return None
        for obj, page in zip(objs, pages):
            obj.view.copy_(self.kv[page].view(torch.uint8).flatten())
        out = torch.cat([obj.view for obj in objs])
        for obj in objs:
            self.arena.ref_count_down(obj)
        return out
