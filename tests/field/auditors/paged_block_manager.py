from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Iterable, Optional


class KVBlock:
    __slots__ = ("block_id", "ref_cnt", "block_hash")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: Optional[int] = None


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.free_queue: deque[KVBlock] = deque(self.blocks)
        self.cached: dict[int, KVBlock] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def get_new_blocks(self, n: int) -> Optional[list[KVBlock]]:
        if n > len(self.free_queue):
            return None
        out: list[KVBlock] = []
        for _ in range(n):
            block = self.free_queue.popleft()
            if block.block_hash is not None:
                self.cached.pop(block.block_hash, None)
                block.block_hash = None
            block.ref_cnt = 1
            out.append(block)
        return out

    def touch(self, block: KVBlock) -> None:
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
        block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[KVBlock]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_queue.append(block)


@dataclass
class Request:
    request_id: str
    token_ids: list[int]
    num_computed: int = 0
    image_tokens: int = 0


class PagedKVManager:
    def __init__(self, pool: BlockPool, block_size: int, max_blocks_per_seq: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_blocks_per_seq = max_blocks_per_seq
        self.tables: dict[str, list[KVBlock]] = {}
        self.encoder_blocks: dict[str, list[KVBlock]] = {}
        self.pinned: dict[str, list[KVBlock]] = {}

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _prefix_hit(self, req: Request) -> list[KVBlock]:
        hit: list[KVBlock] = []
        for end in range(self.block_size, len(req.token_ids), self.block_size):
            block = self.pool.cached.get(hash(tuple(req.token_ids[:end])))
            if block is None:
                break
            hit.append(block)
        return hit

    def allocate_prompt(self, req: Request) -> bool:
        hit = self._prefix_hit(req)
        for block in hit:
            self.pool.touch(block)  # leak: references on the prefix hit stay when the fresh allocation below comes back None
        fresh = self.pool.get_new_blocks(self._blocks_for(len(req.token_ids)) - len(hit))  # clean: goes into the table, which free() and preempt() give back
        if fresh is None:
            return False
        self.tables[req.request_id] = hit + fresh
        req.num_computed = len(hit) * self.block_size
        return True

    def attach_encoder(self, req: Request) -> bool:
        blocks = self.pool.get_new_blocks(self._blocks_for(req.image_tokens))  # leak: preempt() keeps the entry and re-admission overwrites it here
        if blocks is None:
            return False
        self.encoder_blocks[req.request_id] = blocks
        return True

    def append_slot(self, req: Request) -> bool:
        table = self.tables[req.request_id]
        if len(req.token_ids) <= len(table) * self.block_size:
            return True
        fresh = self.pool.get_new_blocks(1)  # clean: appended to the sequence's table
        if fresh is None:
            return False
        table.extend(fresh)
        return True

    def reserve_lookahead(self, req: Request, n: int) -> int:
        table = self.tables[req.request_id]
        blocks = self.pool.get_new_blocks(n)  # clean: near miss, what is over the limit is given back and the rest joins the table
        if blocks is None:
            return 0
        room = max(self.max_blocks_per_seq - len(table), 0)
        if room < n:
            self.pool.free_blocks(blocks[room:])
            blocks = blocks[:room]
        table.extend(blocks)
        return len(blocks)

    def trim_lookahead(self, req: Request) -> None:
        table = self.tables[req.request_id]
        keep = self._blocks_for(len(req.token_ids))
        extra = table[keep:]
        del table[keep:]
        self.pool.free_blocks(extra)

    def fork(self, parent: Request, child: Request) -> None:
        src = self.tables[parent.request_id]
        for block in src:
            self.pool.touch(block)  # clean: the child's table carries these references
        self.tables[child.request_id] = list(src)

    def copy_on_write(self, req: Request) -> Optional[tuple[int, int]]:
        table = self.tables[req.request_id]
        last = table[-1]
        if last.ref_cnt == 1:
            return None
        fresh = self.pool.get_new_blocks(1)  # leak: overwrites table[-1] without dropping this sequence's reference on the shared block
        if fresh is None:
            return None
        table[-1] = fresh[0]
        return last.block_id, fresh[0].block_id

    def pin_system_prompt(self, key: str, token_ids: list[int]) -> bool:
        if key in self.pinned:
            return True
        blocks = self.pool.get_new_blocks(self._blocks_for(len(token_ids)))  # clean: near miss, kept on purpose under pinned until unpin_system_prompt
        if blocks is None:
            return False
        self.pinned[key] = blocks
        return True

    def unpin_system_prompt(self, key: str) -> None:
        self.pool.free_blocks(self.pinned.pop(key, []))

    def publish(self, req: Request) -> None:
        for i, block in enumerate(self.tables[req.request_id]):
            end = (i + 1) * self.block_size
            if end > len(req.token_ids):
                break
            if block.block_hash is None:
                block.block_hash = hash(tuple(req.token_ids[:end]))
                self.pool.cached[block.block_hash] = block

    def preempt(self, req: Request) -> None:
        self.pool.free_blocks(self.tables.pop(req.request_id, []))
        req.num_computed = 0

    def free(self, req: Request) -> None:
        self.pool.free_blocks(reversed(self.tables.pop(req.request_id, [])))
        self.pool.free_blocks(self.encoder_blocks.pop(req.request_id, []))


def measure_headroom(pool: BlockPool, step: int) -> int:
    grabbed: list[KVBlock] = []
    while True:
        chunk = pool.get_new_blocks(step)  # clean: near miss, all chunks are collected and freed after the loop
        if chunk is None:
            break
        grabbed.extend(chunk)
    pool.free_blocks(grabbed)
    return len(grabbed)


def admit(manager: PagedKVManager, waiting: deque[Request]) -> list[Request]:
    admitted: list[Request] = []
    while waiting:
        req = waiting[0]
        if not manager.allocate_prompt(req):
            break
        if req.image_tokens and not manager.attach_encoder(req):
            manager.free(req)
            break
        admitted.append(waiting.popleft())
    return admitted
