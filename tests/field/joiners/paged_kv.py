"""Paged KV cache manager for the decode engine."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, List, Optional, Sequence

BLOCK = 16


@dataclass
class KVBlock:
    index: int
    tokens: List[int] = field(default_factory=list)


class BlockAllocator:
    def __init__(self, n: int, watermark: int = 0):
        self._free: Deque[KVBlock] = deque(KVBlock(i) for i in range(n))
        self.watermark = watermark
        self.total = n

    def alloc(self) -> Optional[KVBlock]:
        if len(self._free) <= self.watermark:
            return None
        b = self._free.popleft()
        b.tokens.clear()
        return b

    def free(self, b: KVBlock) -> None:
        self._free.append(b)

    def free_all(self, blocks: Sequence[KVBlock]) -> None:
        for b in blocks:
            self.free(b)

    def alloc_n(self, n: int) -> Optional[List[KVBlock]]:
        got: List[KVBlock] = []
        while len(got) < n:
            b = self.alloc()  # clean: near miss, rolled back when the next is None
            if b is None:
                self.free_all(got)
                return None
            got.append(b)
        return got

    @property
    def available(self) -> int:
        return len(self._free)


@dataclass
class Sequence_:
    sid: int
    prompt: List[int]
    blocks: List[KVBlock] = field(default_factory=list)
    swapped: bool = False

    @property
    def length(self) -> int:
        return sum(len(b.tokens) for b in self.blocks)


class CacheManager:
    """Each running sequence owns the blocks in its list; finish or preempt frees them."""

    def __init__(self, alloc: BlockAllocator, max_len: int = 256):
        self.alloc = alloc
        self.max_len = max_len
        self.running: Dict[int, Sequence_] = {}
        self.waiting: Deque[Sequence_] = deque()
        self.drafts: Dict[int, KVBlock] = {}

    def admit(self, seq: Sequence_) -> bool:
        need = (len(seq.prompt) + BLOCK - 1) // BLOCK
        blocks = self.alloc.alloc_n(need)  # clean: moved into the sequence, finish frees
        if blocks is None:
            self.waiting.append(seq)
            return False
        for i, b in enumerate(blocks):
            b.tokens.extend(seq.prompt[i * BLOCK:(i + 1) * BLOCK])
        seq.blocks = blocks
        self.running[seq.sid] = seq
        return True

    def append(self, sid: int, token: int) -> bool:
        seq = self.running[sid]
        last = seq.blocks[-1] if seq.blocks else None
        if last is None or len(last.tokens) == BLOCK:
            last = self.alloc.alloc()  # clean: None-checked, appended to the sequence
            if last is None:
                self.preempt(sid)
                return False
            seq.blocks.append(last)
        last.tokens.append(token)
        return True

    def append_lookahead(self, sid: int, tokens: Sequence[int]) -> int:
        """Accepts a run of speculative tokens; returns how many were kept."""
        seq = self.running[sid]
        kept = 0
        cur = self.alloc.alloc()  # leak: bound again when full although only the last is stored
        for t in tokens:
            if cur is None:
                return kept
            if len(cur.tokens) == BLOCK:
                cur = self.alloc.alloc()  # leak: bound again in a later turn, only the last is stored
                if cur is None:
                    return kept
            cur.tokens.append(t)
            kept += 1
        if cur is not None:
            seq.blocks.append(cur)
        return kept

    def extend(self, sid: int, tokens: Sequence[int]) -> int:
        seq = self.running[sid]
        kept = 0
        cur: Optional[KVBlock] = None
        for t in tokens:
            if cur is None or len(cur.tokens) == BLOCK:
                cur = self.alloc.alloc()  # clean: near miss, bound again but each was stored first
                if cur is None:
                    break
                seq.blocks.append(cur)
            cur.tokens.append(t)
            kept += 1
        return kept

    def start_draft(self, sid: int) -> bool:
        b = self.alloc.alloc()  # leak: reject_draft pops the block and returns its tokens only
        if b is None:
            return False
        stale = self.drafts.pop(sid, None)
        if stale is not None:
            self.alloc.free(stale)
        self.drafts[sid] = b
        return True

    def accept_draft(self, sid: int) -> None:
        b = self.drafts.pop(sid)
        self.running[sid].blocks.append(b)

    def reject_draft(self, sid: int) -> List[int]:
        b = self.drafts.pop(sid, None)
        if b is None:
            return []
        return list(b.tokens)

    def fork(self, sid: int, child: int) -> Optional[Sequence_]:
        parent = self.running[sid]
        copies: List[KVBlock] = []
        for b in parent.blocks:
            c = self.alloc.alloc()  # leak: None in the middle drops the copies made so far
            if c is None:
                return None
            c.tokens.extend(b.tokens)
            copies.append(c)
        seq = Sequence_(child, list(parent.prompt), copies)
        self.running[child] = seq
        return seq

    def preempt(self, sid: int) -> None:
        seq = self.running.pop(sid)
        seq.prompt = [t for b in seq.blocks for t in b.tokens]
        self.alloc.free_all(seq.blocks)
        seq.blocks = []
        self.waiting.append(seq)

    def swap_in(self, seq: Sequence_, saved: Sequence[Sequence[int]]) -> bool:
        blocks = self.alloc.alloc_n(len(saved))  # clean: near miss, freed on the mismatch, else stored
        if not blocks:
            return False
        if sum(map(len, saved)) != len(seq.prompt):
            self.alloc.free_all(blocks)
            return False
        for b, toks in zip(blocks, saved):
            b.tokens.extend(toks)
        seq.blocks = blocks
        seq.swapped = False
        self.running[seq.sid] = seq
        return True

    def can_grow(self, n: int) -> bool:
        return self.alloc.alloc_n(n) is not None  # leak: only tested, the blocks are dropped

    def finish(self, sid: int) -> int:
        seq = self.running.pop(sid, None)
        if seq is None:
            return 0
        n = seq.length
        self.alloc.free_all(seq.blocks)
        draft = self.drafts.pop(sid, None)
        if draft is not None:
            self.alloc.free(draft)
        return n
