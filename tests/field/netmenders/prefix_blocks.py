"""KV block tables with shared prefixes for the router's decode hosts."""
from __future__ import annotations

import collections
import hashlib
import logging
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence as Seq

import torch

logger = logging.getLogger(__name__)

BLOCK = 16


class OutOfBlocks(Exception):
    pass


class BlockStore:
    """Physical blocks with reference counts; block 0 is the null block."""

    def __init__(self, blocks: int, heads: int, head_dim: int):
        self.k = torch.zeros(blocks, BLOCK, heads, head_dim)
        self.v = torch.zeros_like(self.k)
        self.refs = [0] * blocks
        self._free = collections.deque(range(1, blocks))

    @property
    def available(self) -> int:
        return len(self._free)

    def grab_block(self) -> int:
        if not self._free:
            raise OutOfBlocks
        b = self._free.popleft()
        self.refs[b] = 1
        return b

    def grab_block_or_none(self) -> Optional[int]:
        return self.grab_block() if self._free else None  # clean: returned to the caller

    def retain(self, b: int) -> int:
        self.refs[b] += 1
        return b

    def drop_ref(self, b: int) -> None:
        if b == 0:
            return
        self.refs[b] -= 1
        if self.refs[b] == 0:
            self._free.append(b)

    def grab_zeroed(self) -> int:
        while True:
            b = self._free.popleft()  # leak: a block with NaNs is thrown away instead of being scrubbed and reused
            if torch.isfinite(self.k[b]).all():
                self.refs[b] = 1
                return b
            logger.warning("block %d is not finite", b)

    def grab_aligned(self, parity: int) -> Optional[int]:
        for _ in range(len(self._free)):
            b = self._free.popleft()  # clean: near miss, a block of the other parity goes back to the end of the queue
            if b % 2 == parity:
                self.refs[b] = 1
                return b
            self._free.append(b)
        return None


@dataclass
class Decode:
    rid: str
    tokens: List[int]
    table: List[int] = field(default_factory=list)
    stopped: bool = False
    draft: Optional[int] = None


class PrefixCache:
    """hash of a token block -> block. The cache holds one reference to each."""

    def __init__(self, store: BlockStore):
        self.store = store
        self._map: "collections.OrderedDict[str, int]" = collections.OrderedDict()

    @staticmethod
    def key(tokens: Seq[int]) -> str:
        return hashlib.sha1(",".join(map(str, tokens)).encode()).hexdigest()

    def match(self, tokens: Seq[int]) -> Optional[int]:
        b = self._map.get(self.key(tokens))
        if b is None:
            return None
        return self.store.retain(b)  # clean: the reference goes to the caller

    def remember(self, tokens: Seq[int], b: int) -> None:
        k = self.key(tokens)
        if k in self._map:
            return
        self._map[k] = self.store.retain(b)  # clean: near miss, only where the key is new, trim() drops it

    def trim(self, keep: int) -> None:
        while len(self._map) > keep:
            _, b = self._map.popitem(last=False)
            self.store.drop_ref(b)


class Tables:
    def __init__(self, store: BlockStore, cache: PrefixCache):
        self.store = store
        self.cache = cache
        self.active: Dict[str, Decode] = {}
        self.swapped: Dict[str, List[torch.Tensor]] = {}

    def admit(self, d: Decode) -> bool:
        table: List[int] = []
        for i in range(0, len(d.tokens), BLOCK):
            chunk = d.tokens[i : i + BLOCK]
            b = self.cache.match(chunk)  # clean: every block of table is dropped on shortage, else it goes to d.table
            if b is None:
                b = self.store.grab_block_or_none()  # clean: near miss, rolled back with the shared ones or kept in d.table
            if b is None:
                for t in table:
                    self.store.drop_ref(t)
                return False
            table.append(b)
        d.table = table
        self.active[d.rid] = d
        return True

    def admit_cold(self, d: Decode) -> bool:
        """No look-up in the prefix cache."""
        need = -(-len(d.tokens) // BLOCK)
        table = []
        for _ in range(need):
            b = self.store.grab_block_or_none()  # leak: no rollback of the blocks before the one that is missing
            if b is None:
                return False
            table.append(b)
        d.table = table
        self.active[d.rid] = d
        return True

    def finish(self, rid: str) -> None:
        d = self.active.pop(rid, None)
        if d is None:
            return
        for b in d.table:
            self.store.drop_ref(b)
        d.table = []
        if d.draft is not None:
            self.store.drop_ref(d.draft)
            d.draft = None

    def append_token(self, d: Decode, token: int) -> bool:
        if len(d.tokens) % BLOCK == 0:
            b = self.store.grab_block_or_none()  # leak: a stopped decode returns with the block in hand
            if b is None:
                return False
            if d.stopped:
                return True
            d.table.append(b)
        d.tokens.append(token)
        return True

    def fork(self, parent: Decode, rid: str) -> Decode:
        child = Decode(rid, list(parent.tokens))
        for b in parent.table:
            child.table.append(self.store.retain(b))  # clean: in the child's table, which finish() drops
        self.active[rid] = child
        return child

    def copy_on_write(self, d: Decode, i: int) -> bool:
        old = d.table[i]
        if self.store.refs[old] == 1:
            return True
        new = self.store.grab_block_or_none()  # clean: near miss, replaces old in the table, whose reference is dropped
        if new is None:
            return False
        self.store.k[new].copy_(self.store.k[old])
        self.store.v[new].copy_(self.store.v[old])
        d.table[i] = new
        self.store.drop_ref(old)
        return True

    def speculate(self, d: Decode) -> bool:
        if d.draft is None:
            d.draft = self.store.grab_block_or_none()  # clean: taken only where there is none, finish() or reject() drops it
        return d.draft is not None

    def accept(self, d: Decode) -> None:
        if d.draft is not None:
            d.table.append(d.draft)
            d.draft = None

    def reject(self, d: Decode) -> None:
        if d.draft is not None:
            self.store.drop_ref(d.draft)
            d.draft = None

    def score_prefix(self, tokens: Seq[int]) -> float:
        b = self.cache.match(tokens)  # leak: the reference of the match is not dropped
        if b is None:
            return 0.0
        return float(self.store.k[b].abs().mean())

    def longest_prefix(self, tokens: Seq[int]) -> int:
        n = 0
        for i in range(0, len(tokens), BLOCK):
            b = self.cache.match(tokens[i : i + BLOCK])  # clean: dropped at once, only the length is wanted
            if b is None:
                break
            self.store.drop_ref(b)
            n += BLOCK
        return n

    def swap_in(self, d: Decode) -> bool:
        saved = self.swapped.get(d.rid)
        if saved is None:
            return False
        fresh: List[int] = []
        try:
            for page in saved:
                b = self.store.grab_block()  # clean: dropped by the handler when blocks run out
                fresh.append(b)
                self.store.k[b].copy_(page)
        except OutOfBlocks:
            for b in fresh:
                self.store.drop_ref(b)
            return False
        d.table = fresh
        del self.swapped[d.rid]
        self.active[d.rid] = d
        return True

    def swap_out(self, rid: str) -> None:
        d = self.active[rid]
        self.swapped[rid] = [self.store.k[b].clone() for b in d.table]
        self.finish(rid)

    def beam_step(self, parents: List[Decode], width: int) -> List[Decode]:
        out: List[Decode] = []
        for n, p in enumerate(parents):
            kid = self.fork(p, f"{p.rid}/{n}")  # clean: active holds it, a pruned one is finished
            if len(out) >= width:
                self.finish(kid.rid)
                continue
            out.append(kid)
        return out

    def warm(self, prompts: List[List[int]]) -> int:
        warmed = 0
        for tokens in prompts:
            try:
                b = self.store.grab_block()  # leak: remember() takes its own reference, this one is never dropped
            except OutOfBlocks:
                break
            self.store.k[b].zero_()
            self.cache.remember(tokens[:BLOCK], b)
            warmed += 1
        return warmed
