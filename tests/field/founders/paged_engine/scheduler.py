from __future__ import annotations

from typing import Dict, List, Optional

from .blocks import BlockManager
from .prefix import PrefixCache
from .request import ReadView, Request

BLOCK = 4


class Scheduler:
    def __init__(self, mgr: BlockManager, cache: PrefixCache) -> None:
        self.mgr = mgr
        self.cache = cache
        self.running: Dict[str, Request] = {}
        self.waiting: List[Request] = []

    def admit(self, req: Request) -> bool:
        hashes = [hash(tuple(req.tokens[:i + BLOCK])) for i in range(0, len(req.tokens), BLOCK)]
        shared = self.cache.match(hashes)  # leak: when fresh blocks are missing the shared references stay up
        fresh = self.mgr.alloc_n(len(hashes) - len(shared))  # clean: moved into the request, finish drops them
        if fresh is None:
            self.waiting.append(req)
            return False
        req.blocks = shared + fresh
        self.running[req.rid] = req
        return True

    def admit_plain(self, req: Request) -> bool:
        need = -(-len(req.tokens) // BLOCK)
        blocks = self.mgr.alloc_n(need)  # clean: moved into the request
        if blocks is None:
            return False
        req.blocks.extend(blocks)
        self.running[req.rid] = req
        return True

    def fork(self, parent: Request, rid: str) -> Request:
        child = Request(rid, list(parent.tokens))
        for b in parent.blocks:
            child.blocks.append(self.mgr.incref(b))  # clean: the child owns the references
        self.running[rid] = child
        return child

    def view(self, parent: Request, rid: str) -> ReadView:
        v = ReadView(rid, owns_blocks=False)
        for b in parent.blocks:
            v.blocks.append(self.mgr.incref(b))  # leak: owns_blocks is False, so close_view never drops these
        return v

    def snapshot(self, parent: Request, rid: str) -> ReadView:
        v = ReadView(rid)
        for b in parent.blocks:
            v.blocks.append(self.mgr.incref(b))  # clean: near miss, owns_blocks is True by default, close_view drops them
        return v

    def close_view(self, v: ReadView) -> None:
        if v.owns_blocks:
            for b in v.blocks:
                self.mgr.decref(b)
        v.blocks = []

    def grow(self, req: Request) -> bool:
        if len(req.tokens) % BLOCK:
            return True
        b = self.mgr.alloc()  # clean: appended to the request's table
        if b is None:
            return False
        req.blocks.append(b)
        return True

    def draft(self, req: Request) -> bool:
        b = self.mgr.alloc()  # clean: near miss, finish and accept both see draft_block
        if b is None:
            return False
        if req.draft_block is not None:
            self.mgr.decref(req.draft_block)
        req.draft_block = b
        return True

    def accept(self, req: Request, ok: bool) -> None:
        b, req.draft_block = req.draft_block, None
        if b is None:
            return
        if ok:
            req.blocks.append(b)
        else:
            self.mgr.decref(b)

    def copy_on_write(self, req: Request, idx: int) -> bool:
        new = self.mgr.alloc()  # clean: takes the place of the old block, which is dropped
        if new is None:
            return False
        old = req.blocks[idx]
        req.blocks[idx] = new
        self.mgr.decref(old)
        return True

    def warm(self, hashes: List[int]) -> Optional[int]:
        hit = self.cache.hottest(hashes)  # leak: the hash is kept, the block's reference is not dropped
        if hit is None:
            return None
        h, _ = hit
        return h

    def finish(self, req: Request) -> None:
        self.running.pop(req.rid, None)
        req.finished = True
        if req.draft_block is not None:
            self.mgr.decref(req.draft_block)
            req.draft_block = None
        while req.blocks:
            self.mgr.decref(req.blocks.pop())


def main() -> None:
    mgr = BlockManager(16)
    s = Scheduler(mgr, PrefixCache(mgr))
    r = Request("a", list(range(8)))
    assert s.admit(r) and s.grow(r) and s.draft(r)
    s.accept(r, True)
    c = s.fork(r, "b")
    s.copy_on_write(c, 0)
    s.close_view(s.snapshot(c, "v"))  # clean: closed at once
    s.finish(r)
    s.finish(c)
    assert mgr.available() == 16


if __name__ == "__main__":
    main()
