"""Paged KV cache: block allocator with reference counts, block tables, prefix sharing, copy on write."""
from __future__ import annotations

import enum
import logging
from collections import OrderedDict
from typing import Dict, Iterable, List, Optional, Sequence

logger = logging.getLogger(__name__)


class AllocStatus(enum.Enum):
    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Block:
    __slots__ = ("block_id", "ref", "token_ids", "hash_key")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref = 0
        self.token_ids: List[int] = []
        self.hash_key: Optional[int] = None


class BlockAllocator:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free: List[Block] = [Block(i) for i in reversed(range(num_blocks))]

    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> Optional[Block]:
        if not self._free:
            return None
        blk = self._free.pop()
        blk.ref = 1
        blk.token_ids = []
        blk.hash_key = None
        return blk

    def incref(self, blk: Block) -> Block:
        blk.ref += 1
        return blk

    def free(self, blk: Block) -> None:
        """Drop one reference; the last one puts the block back."""
        assert blk.ref > 0
        blk.ref -= 1
        if blk.ref == 0:
            self._free.append(blk)


class PrefixCache:
    """hash of a full block -> block. The cache holds one reference to each entry."""

    def __init__(self, allocator: BlockAllocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self._entries: "OrderedDict[int, Block]" = OrderedDict()

    def insert(self, key: int, blk: Block) -> None:
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        blk.hash_key = key
        self._entries[key] = self.allocator.incref(blk)  # clean: reference held by the entry, dropped on eviction
        while len(self._entries) > self.capacity:
            _, victim = self._entries.popitem(last=False)
            self.allocator.free(victim)

    def match(self, keys: Sequence[int]) -> List[Block]:
        """Longest cached prefix; the caller gets a reference to each block of it."""
        hit: List[Block] = []
        for key in keys:
            blk = self._entries.get(key)
            if blk is None:
                break
            self._entries.move_to_end(key)
            hit.append(self.allocator.incref(blk))  # clean: references are returned to the caller
        return hit

    def hit_rate_of(self, keys: Sequence[int]) -> float:
        if not keys:
            return 0.0
        return len(self.match(keys)) / len(keys)  # leak: the matched references are only counted

    def clear(self) -> None:
        for blk in self._entries.values():
            self.allocator.free(blk)
        self._entries.clear()


class BlockTable:
    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.blocks: List[Block] = []

    def append_token(self, token: int) -> bool:
        if not self.blocks or len(self.blocks[-1].token_ids) == self.allocator.block_size:
            blk = self.allocator.alloc()  # clean: None-checked, goes into the table
            if blk is None:
                return False
            self.blocks.append(blk)
        last = self.blocks[-1]
        if last.ref > 1:
            last = self._copy_on_write(len(self.blocks) - 1)
            if last is None:
                return False
        last.token_ids.append(token)
        return True

    def _copy_on_write(self, idx: int) -> Optional[Block]:
        src = self.blocks[idx]
        dst = self.allocator.alloc()  # clean: near miss, replaces src in the table and src's reference is dropped
        if dst is None:
            return None
        dst.token_ids = list(src.token_ids)
        self.blocks[idx] = dst
        self.allocator.free(src)
        return dst

    def fork(self) -> "BlockTable":
        child = BlockTable(self.allocator)
        for blk in self.blocks:
            child.blocks.append(self.allocator.incref(blk))  # clean: the child's table owns the reference
        return child

    def truncate(self, num_blocks: int) -> None:
        """Rejected draft tokens: give the tail back."""
        while len(self.blocks) > num_blocks:
            self.allocator.free(self.blocks.pop())

    def release(self) -> None:
        for blk in reversed(self.blocks):
            self.allocator.free(blk)
        self.blocks = []


class BlockSpaceManager:
    def __init__(self, num_blocks: int, block_size: int, watermark: int = 1) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.prefix = PrefixCache(self.allocator, capacity=num_blocks // 2)
        self.watermark = watermark
        self.tables: Dict[str, BlockTable] = {}

    def _keys(self, tokens: Sequence[int]) -> List[int]:
        bs = self.allocator.block_size
        keys, h = [], 0
        for i in range(0, len(tokens) - bs + 1, bs):
            h = hash((h, tuple(tokens[i : i + bs])))
            keys.append(h)
        return keys

    def can_allocate(self, tokens: Sequence[int]) -> AllocStatus:
        need = -(-len(tokens) // self.allocator.block_size)
        if need > self.allocator.num_blocks:
            return AllocStatus.NEVER
        return AllocStatus.OK if need + self.watermark <= self.allocator.num_free() else AllocStatus.LATER

    def allocate(self, req_id: str, tokens: Sequence[int]) -> bool:
        if req_id in self.tables:
            raise KeyError(f"{req_id} has a table")
        table = BlockTable(self.allocator)
        table.blocks.extend(self.prefix.match(self._keys(tokens)))  # clean: near miss, table.release() on the failing way, else kept in tables
        done = len(table.blocks) * self.allocator.block_size
        for tok in tokens[done:]:
            if not table.append_token(tok):
                table.release()
                return False
        self.tables[req_id] = table
        return True

    def allocate_encoder(self, req_id: str, num_image_blocks: int) -> bool:
        """Blocks for the cross-attention KV of the images; sized once, never grows."""
        table = BlockTable(self.allocator)
        for _ in range(num_image_blocks):
            blk = self.allocator.alloc()  # leak: blocks taken before the failing one are dropped with the local table
            if blk is None:
                logger.info("%s: no room for %d image blocks", req_id, num_image_blocks)
                return False
            table.blocks.append(blk)
        self.tables[f"{req_id}/enc"] = table
        return True

    def allocate_exact(self, n: int) -> Optional[List[Block]]:
        """All or nothing, for the migration of a sequence from another instance."""
        got: List[Block] = []
        while len(got) < n:
            blk = self.allocator.alloc()  # clean: near miss, the failing way rolls the list back
            if blk is None:
                for b in got:
                    self.allocator.free(b)
                return None
            got.append(blk)
        return got

    def migrate_in(self, req_id: str, chunks: List[List[int]]) -> bool:
        blocks = self.allocate_exact(len(chunks))  # leak: forgotten when a chunk is oversized
        if blocks is None:
            return False
        for blk, chunk in zip(blocks, chunks):
            if len(chunk) > self.allocator.block_size:
                logger.error("%s: chunk of %d tokens from peer", req_id, len(chunk))
                return False
            blk.token_ids.extend(chunk)
        table = BlockTable(self.allocator)
        table.blocks = blocks
        self.tables[req_id] = table
        return True

    def fork(self, parent: str, child: str) -> None:
        if child in self.tables:
            raise KeyError(f"{child} has a table")
        self.tables[child] = self.tables[parent].fork()  # clean: kept in tables until free()

    def best_of(self, parent: str, n: int, scores: Iterable[float]) -> str:
        """Fork n ways and keep the best child under the parent's id."""
        children = [self.tables[parent].fork() for _ in range(n)]  # leak: the losing children are dropped, their references stay
        best = max(zip(scores, range(n)))[1]
        self.tables[parent].release()
        self.tables[parent] = children[best]
        return parent

    def free(self, req_id: str) -> None:
        for key in (req_id, f"{req_id}/enc"):
            table = self.tables.pop(key, None)
            if table is not None:
                table.release()

    def publish(self, req_id: str) -> None:
        table = self.tables[req_id]
        tokens = [t for b in table.blocks for t in b.token_ids]
        for key, blk in zip(self._keys(tokens), table.blocks):
            self.prefix.insert(key, blk)

    def swap_table(self, req_id: str, tokens: Sequence[int]) -> bool:
        """Recompute after preemption: build the table anew."""
        fresh = BlockTable(self.allocator)
        fresh.blocks = self.prefix.match(self._keys(tokens))  # clean: near miss, released in the else-branch of the for or stored
        for tok in tokens[len(fresh.blocks) * self.allocator.block_size :]:
            if not fresh.append_token(tok):
                break
        else:
            old = self.tables.get(req_id)
            self.tables[req_id] = fresh
            if old is not None:
                old.release()
            return True
        fresh.release()
        return False
