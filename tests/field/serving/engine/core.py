from __future__ import annotations

import logging
import typing as t

from .request import EngineRequest
from .resources import AdapterTable, BlockStore, EngineConfig, SeqIdPool

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, cfg: EngineConfig) -> None:
        self.cfg = cfg
        self.ids = SeqIdPool(cfg.max_seqs)
        self.store = BlockStore(cfg.num_blocks)
        self.adapters = AdapterTable() if cfg.enable_lora else None
        self.live: t.Dict[str, EngineRequest] = {}

    def _n_blocks(self, req: EngineRequest) -> int:
        return -(-len(req.prompt) // self.cfg.block_size)

    def _admit_blocks(self, req: EngineRequest) -> bool:
        need = self._n_blocks(req)
        got = self.store.alloc_blocks(need)  # clean: near miss, a short answer is given back, a full one stays with the request
        if len(got) < need:
            self.store.dealloc_blocks(got)
            return False
        req.blocks.extend(got)
        return True

    def add(self, req: EngineRequest) -> bool:
        if req.rid in self.live:
            return False
        req.seq_id = self.ids.reserve_id()  # clean: unreserved without blocks, else retire does it
        if req.seq_id is None:
            return False
        if not self._admit_blocks(req):
            self.ids.unreserve_id(req.seq_id)
            req.seq_id = None
            return False
        if self.adapters is not None and req.adapter:
            req.lease = self.adapters.acquire_adapter(req.adapter)  # clean: released in retire when there is one
        self.live[req.rid] = req
        return True

    def add_with_adapter(self, req: EngineRequest) -> bool:
        self.retire(req.rid)
        lease = self.adapters.acquire_adapter(req.adapter or "base")  # leak: without a sequence id the lease is dropped
        sid = self.ids.reserve_id()  # leak: when the blocks do not suffice the id is dropped with the lease
        if sid is None:
            return False
        if not self._admit_blocks(req):
            return False
        req.lease, req.seq_id = lease, sid
        self.live[req.rid] = req
        return True

    def fork(self, req: EngineRequest, i: int) -> t.Optional[EngineRequest]:
        sid = self.ids.reserve_id()  # clean: moved into the child
        if sid is None:
            return None
        child = EngineRequest(f"{req.rid}/{i}", req.prompt, seq_id=sid)
        child.blocks = self.store.share(req.blocks)  # clean: moved into the child
        return child

    def fan_out(self, req: EngineRequest) -> int:
        for i in range(1, req.n):
            child = self.fork(req, i)  # clean: hangs on the parent, retired with it
            if child is None:
                break
            req.children.append(child)
        return len(req.children)

    def fan_out_exact(self, req: EngineRequest) -> bool:
        kids: t.List[EngineRequest] = []
        for i in range(1, req.n):
            child = self.fork(req, i)  # leak: children forked so far are lost when the ids run out
            if child is None:
                logger.info("cannot fork %s %d times", req.rid, req.n)
                return False
            kids.append(child)
        req.children.extend(kids)
        return True

    def _drop(self, req: EngineRequest) -> None:
        self.store.dealloc_blocks(req.blocks)
        req.blocks = []
        if req.seq_id is not None:
            self.ids.unreserve_id(req.seq_id)
            req.seq_id = None
        if req.lease is not None:
            req.lease.release()
            req.lease = None

    def retire(self, rid: str) -> None:
        req = self.live.pop(rid, None)
        if req is None:
            return
        for c in req.children:
            self._drop(c)
        req.children.clear()
        self._drop(req)

    def speculate(self, req: EngineRequest, k: int) -> t.List[int]:
        extra = self.store.alloc_blocks(k)  # clean: near miss, used ones join the request, unused ones go back
        used, unused = extra[: k // 2], extra[k // 2 :]
        req.blocks += used
        self.store.dealloc_blocks(unused)
        return used

    def speculate_once(self, req: EngineRequest, k: int) -> int:
        extra = self.store.alloc_blocks(k)  # leak: the slice given back leaves the first block out
        n = len(extra) + len(req.blocks)
        self.store.dealloc_blocks(extra[1:])
        return n

    def headroom(self) -> int:
        blocks = self.store.alloc_blocks(self.cfg.num_blocks)  # clean: all are given back
        self.store.dealloc_blocks(blocks)
        return len(blocks)

    def borrow_prefix(self, rid: str, n: int) -> t.Optional[t.List[int]]:
        req = self.live.get(rid)
        if req is None:
            return None
        pre = self.store.share(req.blocks[:n])  # leak: a prefix shorter than n returns with the references counted up
        if len(pre) < n:
            return None
        return pre

    def score(self, rid: str, n: int) -> int:
        pre = self.borrow_prefix(rid, n)  # clean: given back when there is one
        if pre is None:
            return 0
        s = sum(pre)
        self.store.dealloc_blocks(pre)
        return s
