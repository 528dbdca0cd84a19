"""Block-level KV bookkeeping for a small continuous-batching scheduler."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Callable, Deque, Dict, List, Optional


@dataclass
class KVBlock:
    block_id: int
    ref_cnt: int = 0


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue: Deque[KVBlock] = deque(self.blocks)

    def allocate(self, n: int) -> Optional[List[KVBlock]]:
        if n > len(self.free_queue):
            return None
        out: List[KVBlock] = []
        for _ in range(n):
            blk = self.free_queue.popleft()  # clean: pool body, collected in out and returned
            blk.ref_cnt = 1
            out.append(blk)
        return out

    def allocate_aligned(self, n: int, align: int) -> Optional[List[KVBlock]]:
        """Blocks whose first id is a multiple of `align`."""
        out: List[KVBlock] = []
        while self.free_queue and len(out) < n:
            blk = self.free_queue.popleft()  # leak: a block skipped for alignment never goes back to the queue
            if not out and blk.block_id % align:
                continue
            blk.ref_cnt = 1
            out.append(blk)
        if len(out) < n:
            self.free(out)
            return None
        return out

    def free(self, blocks: List[KVBlock]) -> None:
        for blk in reversed(blocks):
            blk.ref_cnt -= 1
            if blk.ref_cnt == 0:
                self.free_queue.append(blk)


@dataclass
class Request:
    req_id: str
    prompt_len: int
    blocks: List[KVBlock] = field(default_factory=list)
    num_computed: int = 0


class Scheduler:
    def __init__(self, pool: BlockPool, host_pool: BlockPool, block_size: int,
                 verifier: Callable[[Request, int], int]) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self.block_size = block_size
        self.verifier = verifier
        self.waiting: Deque[Request] = deque()
        self.running: Dict[str, Request] = {}

    def _cdiv(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def admit(self, req: Request) -> bool:
        blocks = self.pool.allocate(self._cdiv(req.prompt_len))  # clean: None-checked, kept in the running request, freed by finish/preempt
        if blocks is None:
            return False
        req.blocks = blocks
        self.running[req.req_id] = req
        return True

    def grow(self, req: Request, new_tokens: int) -> bool:
        need = self._cdiv(req.num_computed + new_tokens) - len(req.blocks)
        if need <= 0:
            return True
        extra = self.pool.allocate(need)  # clean: near miss, the failing branch holds nothing and the other extends the request
        if extra is None:
            self.preempt(req)
            return False
        req.blocks.extend(extra)
        return True

    def propose(self, req: Request, k: int) -> int:
        draft = self.pool.allocate(self._cdiv(k))  # leak: on partial acceptance the blocks past `keep` are dropped
        if draft is None:
            return 0
        accepted = self.verifier(req, k)
        if accepted == 0:
            self.pool.free(draft)
            return 0
        keep = self._cdiv(accepted)
        req.blocks.extend(draft[:keep])
        return accepted

    def propose_tree(self, req: Request, widths: List[int]) -> int:
        draft = self.pool.allocate(len(widths))  # clean: near miss, the slice not kept is freed
        if draft is None:
            return 0
        best = max(self.verifier(req, w) for w in widths) if widths else 0
        keep = min(self._cdiv(best), len(draft))
        req.blocks.extend(draft[:keep])
        self.pool.free(draft[keep:])
        return best

    def resume(self, req: Request, host_tokens: int) -> bool:
        n = self._cdiv(host_tokens)
        dev = self.pool.allocate(n)  # leak: not freed when no staging blocks are left on the host
        if dev is None:
            return False
        stage = self.host_pool.allocate(n)  # clean: None-checked and freed after the copy
        if stage is None:
            return False
        for src, dst in zip(stage, dev):
            dst.block_id, src.block_id  # device copy goes here
        self.host_pool.free(stage)
        req.blocks = dev
        self.running[req.req_id] = req
        return True

    def recompute(self, req: Request) -> None:
        """Drop the computed tokens of a running request and start over."""
        req.num_computed = 0
        req.blocks = self.pool.allocate(self._cdiv(req.prompt_len)) or []  # leak: overwrites the blocks which the running request still holds

    def warmup(self, sizes: List[int], run: Callable[[List[int]], None]) -> None:
        for size in sizes:
            blocks = self.pool.allocate(size)  # clean: near miss, break only when nothing was allocated
            if not blocks:
                break
            run([b.block_id for b in blocks])
            self.pool.free(blocks)

    def preempt(self, req: Request) -> None:
        self.running.pop(req.req_id, None)
        self.pool.free(req.blocks)
        req.blocks = []
        self.waiting.appendleft(req)

    def finish(self, req_id: str) -> None:
        req = self.running.pop(req_id, None)
        if req is None:
            return
        self.pool.free(req.blocks)
        req.blocks = []

    def step(self) -> int:
        admitted = 0
        while self.waiting and self.admit(self.waiting[0]):
            self.waiting.popleft()
            admitted += 1
        return admitted
