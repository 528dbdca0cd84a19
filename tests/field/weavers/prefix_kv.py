"""Paged KV blocks shared between sequences through a prefix tree."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Optional, Sequence

BLOCK_TOKENS = 16


@dataclass
class KVBlock:
    index: int
    refs: int = 0
    filled: int = 0


@dataclass
class SeqState:
    rid: str
    tokens: list[int]
    blocks: list[KVBlock] = field(default_factory=list)
    cached_tokens: int = 0


class BlockPool:
    """Fixed set of blocks. `take` yields a block with one reference, `share` adds one, `drop` removes one."""

    def __init__(self, num_blocks: int) -> None:
        self._free: deque[KVBlock] = deque(KVBlock(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Optional[KVBlock]:
        if not self._free:
            return None
        blk = self._free.popleft()
        blk.refs, blk.filled = 1, 0
        return blk

    def share(self, blk: KVBlock) -> KVBlock:
        blk.refs += 1
        return blk

    def drop(self, blk: KVBlock) -> None:
        blk.refs -= 1
        if blk.refs == 0:
            self._free.append(blk)

    def take_many(self, n: int) -> Optional[list[KVBlock]]:
        if n > self.num_free:
            return None
        return [self.take() for _ in range(n)]  # clean: near miss, the count was checked, so no partial list can be abandoned

    def take_up_to_budget(self, n: int, budget: int) -> Optional[list[KVBlock]]:
        got: list[KVBlock] = []
        while len(got) < n:
            blk = self.take()  # leak: the list is dropped when the budget is exceeded or the pool runs dry midway
            if blk is None:
                return None
            got.append(blk)
            if len(got) * BLOCK_TOKENS > budget:
                return None
        return got


def digests_of(tokens: Sequence[int]) -> list[int]:
    out, h = [], 0
    for i in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        h = hash((h, tuple(tokens[i:i + BLOCK_TOKENS])))
        out.append(h)
    return out


def blocks_for(n_tokens: int) -> int:
    return -(-n_tokens // BLOCK_TOKENS)


class PrefixNode:
    __slots__ = ("block", "children", "stamp")

    def __init__(self, block: Optional[KVBlock]) -> None:
        self.block = block
        self.children: dict[int, PrefixNode] = {}
        self.stamp = 0


class PrefixTree:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.root = PrefixNode(None)
        self._clock = 0

    def match(self, digests: Iterable[int]) -> list[KVBlock]:
        """Longest cached run. Each block carries a reference that belongs to the caller."""
        node, run = self.root, []
        self._clock += 1
        for d in digests:
            nxt = node.children.get(d)
            if nxt is None:
                break
            nxt.stamp = self._clock
            run.append(self.pool.share(nxt.block))  # clean: returned to the caller with the run
            node = nxt
        return run

    def insert(self, digests: Iterable[int], blocks: Iterable[KVBlock]) -> None:
        node = self.root
        for d, blk in zip(digests, blocks):
            nxt = node.children.get(d)
            if nxt is None:
                nxt = PrefixNode(self.pool.share(blk))  # clean: the node keeps it until eviction
                node.children[d] = nxt
            node = nxt

    def graft(self, digests: Iterable[int], blocks: Iterable[KVBlock]) -> None:
        """Insert a run coming from a remote prefill worker."""
        node = self.root
        for d, blk in zip(digests, blocks):
            held = self.pool.share(blk)  # leak: setdefault keeps the older node and the new reference is forgotten
            node = node.children.setdefault(d, PrefixNode(held))

    def evict(self, want: int) -> int:
        freed = 0
        while freed < want:
            victim = self._oldest_leaf()
            if victim is None:
                break
            parent, key = victim
            gone = parent.children.pop(key)
            self.pool.drop(gone.block)
            freed += 1
        return freed

    def _oldest_leaf(self) -> Optional[tuple[PrefixNode, int]]:
        best, best_stamp = None, None
        stack = [self.root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                if child.children:
                    stack.append(child)
                elif best_stamp is None or child.stamp < best_stamp:
                    best, best_stamp = (node, key), child.stamp
        return best


class PrefixKVManager:
    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool)

    def _drop_all(self, blocks: list[KVBlock]) -> None:
        for blk in reversed(blocks):
            self.pool.drop(blk)
        blocks.clear()

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """How much of a prompt is warm; the router ranks replicas by it."""
        return len(self.tree.match(digests_of(tokens))) * BLOCK_TOKENS  # leak: only the length of the referenced run is used

    def admit(self, seq: SeqState) -> bool:
        hit = self.tree.match(digests_of(seq.tokens))  # clean: dropped on refusal, moved into the sequence otherwise
        need = blocks_for(len(seq.tokens)) - len(hit)
        fresh = self.pool.take_many(need)  # clean: moved into the sequence
        if fresh is None:
            self.tree.evict(need)
            fresh = self.pool.take_many(need)  # clean: near miss, rebinds only a None
        if fresh is None:
            self._drop_all(hit)
            return False
        seq.cached_tokens = len(hit) * BLOCK_TOKENS
        seq.blocks = hit + fresh
        return True

    def admit_chunk(self, seq: SeqState, chunk: int) -> bool:
        hit = self.tree.match(digests_of(seq.tokens[:chunk]))  # leak: refused chunk returns without dropping the hit
        fresh = self.pool.take_many(blocks_for(chunk) - len(hit))  # clean: moved into the sequence
        if fresh is None:
            return False
        seq.blocks.extend(hit)
        seq.blocks.extend(fresh)
        return True

    def append_slot(self, seq: SeqState) -> bool:
        tail = seq.blocks[-1]
        if tail.filled < BLOCK_TOKENS:
            if tail.refs == 1:
                tail.filled += 1
                return True
            mine = self.pool.take()  # clean: replaces the shared tail, whose reference is dropped
            if mine is None:
                return False
            mine.filled = tail.filled + 1
            seq.blocks[-1] = mine
            self.pool.drop(tail)
            return True
        blk = self.pool.take()  # clean: appended to the sequence
        if blk is None:
            return False
        blk.filled = 1
        seq.blocks.append(blk)
        return True

    def fork(self, parent: SeqState, rid: str) -> SeqState:
        child = SeqState(rid, list(parent.tokens))
        child.blocks = [self.pool.share(b) for b in parent.blocks]  # clean: owned by the child until finish
        return child

    def finish(self, seq: SeqState, keep: bool) -> None:
        if keep:
            self.tree.insert(digests_of(seq.tokens), seq.blocks)
        self._drop_all(seq.blocks)
