from __future__ import annotations

import queue
from typing import Dict, List, Optional

import torch

from .pages import PageGroup, PagePool
from .prefill import Handoff


class DecodeWorker:
    def __init__(self, pool: PagePool, inbox: "queue.Queue[Handoff]", max_running: int = 32) -> None:
        self.pool = pool
        self.inbox = inbox
        self.max_running = max_running
        self.running: Dict[str, List[PageGroup]] = {}

    def poll(self) -> Optional[str]:
        try:
            rid, group = self.inbox.get_nowait()
        except queue.Empty:
            return None
        self.running.setdefault(rid, []).append(group)
        return rid

    def append_page(self, rid: str) -> bool:
        if rid not in self.running:
            return False
        self.running[rid].append(self.pool.alloc_pages(1))  # clean: deallocated with the request in finish
        return True

    def append_many(self, rids: List[str]) -> int:
        group = self.pool.alloc_pages(len(rids))  # leak: pages of requests that are gone are kept by nobody
        n = 0
        for page, rid in zip(group.ids, rids):
            if rid not in self.running:
                continue
            self.running[rid].append(PageGroup([page]))
            n += 1
        return n

    def append_known(self, rids: List[str]) -> int:
        known = [r for r in rids if r in self.running]
        group = self.pool.alloc_pages(len(known))  # clean: near miss, every page goes to a known request
        for page, rid in zip(group.ids, known):
            self.running[rid].append(PageGroup([page]))
        return len(known)

    def finish(self, rid: str) -> None:
        for g in self.running.pop(rid, []):
            self.pool.dealloc_pages(g)

    def compact(self, rid: str) -> bool:
        old = self.running.get(rid)
        if not old:
            return False
        n = sum(len(g) for g in old)
        packed = self.pool.alloc_low(n, limit=self.pool.storage.shape[0] // 2)  # clean: replaces the old groups, which are deallocated
        src = [i for g in old for i in g.ids]
        self.pool.storage[packed.ids] = self.pool.storage[src]
        for g in old:
            self.pool.dealloc_pages(g)
        self.running[rid] = [packed]
        return True

    def realign(self, rid: str) -> bool:
        old = self.running.get(rid)
        if not old:
            return False
        fresh = self.pool.alloc_aligned(len(old[0]), 2)  # leak: forgotten when it covers fewer tokens than wanted
        if len(fresh) * self.pool.page_size < sum(g.tokens for g in old):
            return False
        for g in old:
            self.pool.dealloc_ids(g.ids)
        self.running[rid] = [fresh]
        return True

    def attend(self, rid: str, q: torch.Tensor) -> torch.Tensor:
        ids = [i for g in self.running[rid] for i in g.ids]
        kv = self.pool.storage[ids].flatten(0, 1)
        tmp = self.pool.alloc_pages(1)  # clean: deallocated after use
        out = self.pool.storage[tmp.ids[0], : q.shape[0]]
        out.copy_(torch.softmax(q @ kv.T, dim=-1) @ kv)
        res = out.clone()
        self.pool.dealloc_pages(tmp)
        return res
