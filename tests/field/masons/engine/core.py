from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional

from .pages import PageAllocator, PrefixTree
from .request import Req


class Engine:
    def __init__(self, pages: int, page: int = 16) -> None:
        self.alloc = PageAllocator(pages)
        self.tree = PrefixTree(self.alloc, page)
        self.page = page
        self.queue: Deque[Req] = deque()
        self.running: Dict[str, Req] = {}

    def _need(self, n: int) -> int:
        return -(-n // self.page)

    def _alloc(self, n: int) -> Optional[List[int]]:
        pages = self.alloc.alloc(n)  # clean: near miss, None holds nothing and is tried again after eviction
        if pages is None:
            self.tree.evict(n)
            pages = self.alloc.alloc(n)  # clean: returned to the caller
        return pages

    def submit(self, req: Req) -> None:
        self.queue.append(req)

    def prefill(self, req: Req) -> bool:
        node = self.tree.match_and_lock(req.tokens)  # clean: near miss, lowered when pages are short, else by finish or abort
        cached = len(node.key) if node is not None else 0
        pages = self._alloc(self._need(len(req.tokens) - cached))  # clean: owned by the request
        if pages is None:
            if node is not None:
                self.tree.dec_lock(node)
            return False
        req.node, req.pages = node, pages
        self.running[req.rid] = req
        return True

    def cached_len(self, tokens: List[int]) -> int:
        node = self.tree.match_and_lock(tokens)  # leak: the node stays locked after its length is read
        return len(node.key) if node is not None else 0

    def decode(self) -> List[Req]:
        done: List[Req] = []
        for req in list(self.running.values()):
            if len(req.tokens) % self.page == 0:
                pages = self._alloc(1)  # clean: near miss, None retracts the request, otherwise it joins its pages
                if pages is None:
                    self.retract(req)
                    continue
                req.pages.extend(pages)
            req.tokens.append(0)
            req.new_tokens += 1
            if req.new_tokens >= req.limit:
                self.finish(req)
                done.append(req)
        return done

    def draft(self, req: Req, k: int) -> bool:
        pages = self._alloc(self._need(k))  # leak: draft pages of an earlier round are overwritten
        if pages is None:
            return False
        req.draft_pages = pages
        return True

    def verify(self, req: Req, accepted: int) -> None:
        keep = self._need(accepted)
        req.pages.extend(req.draft_pages[:keep])
        self.alloc.release(req.draft_pages[keep:])
        req.draft_pages = []

    def lock_for_reuse(self, req: Req) -> bool:
        node = self.tree.match_and_lock(req.tokens)  # leak: the lock on the request's earlier node is lost with the field
        if node is None:
            return False
        req.node = node
        return True

    def warm(self, tokens: List[int]) -> bool:
        pages = self._alloc(len(tokens) // self.page)  # clean: near miss, insert takes them over or frees them
        if pages is None:
            return False
        self.tree.insert(tokens, pages)
        return True

    def warm_if_new(self, tokens: List[int]) -> bool:
        pages = self._alloc(len(tokens) // self.page)  # leak: a known prefix returns before insert takes the pages
        if pages is None:
            return False
        if self.tree.match(tokens) is not None:
            return False
        self.tree.insert(tokens, pages)
        return True

    def _drop(self, req: Req) -> None:
        if req.node is not None:
            self.tree.dec_lock(req.node)
            req.node = None
        self.alloc.release(req.pages + req.draft_pages)
        req.pages, req.draft_pages = [], []
        self.running.pop(req.rid, None)

    def finish(self, req: Req) -> None:
        self._drop(req)

    def retract(self, req: Req) -> None:
        self._drop(req)
        self.queue.appendleft(req)

    def abort(self, rid: str) -> None:
        req = self.running.get(rid)
        if req is not None:
            self._drop(req)
            return
        self.queue = deque(r for r in self.queue if r.rid != rid)
