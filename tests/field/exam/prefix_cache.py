# Prefix cache: token-hash -> block with a reference count.
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Tuple


@dataclass
class Block:
    block_id: int
    ref: int = 0
    hash: Optional[str] = None


def hash_tokens(parent: str, tokens: Tuple[int, ...]) -> str:
    h = hashlib.sha1(parent.encode())
    h.update(repr(tokens).encode())
    return h.hexdigest()


class PrefixCache:
    def __init__(self, n: int, block_size: int):
        self.block_size = block_size
        self.free_ids: List[int] = list(range(n))
        self.by_hash: "OrderedDict[str, Block]" = OrderedDict()

    def inc_ref(self, blk: Block) -> Block:
        blk.ref += 1
        return blk

    def dec_ref(self, blk: Block) -> None:
        assert blk.ref > 0
        blk.ref -= 1

    def lookup(self, key: str) -> Optional[Block]:
        """Returns a referenced block or None."""
        blk = self.by_hash.get(key)
        if blk is None:
            return None
        self.by_hash.move_to_end(key)
        return self.inc_ref(blk)  # clean: reference goes to the caller

    def insert(self, key: str) -> Optional[Block]:
        """Returns a new referenced block or None when nothing can be evicted."""
        if not self.free_ids and not self._evict_one():
            return None
        blk = Block(self.free_ids.pop(), hash=key)  # clean: kept by the hash table
        self.by_hash[key] = blk
        return self.inc_ref(blk)  # clean: reference goes to the caller

    def _evict_one(self) -> bool:
        for key, blk in self.by_hash.items():
            if blk.ref == 0:
                del self.by_hash[key]
                self.free_ids.append(blk.block_id)
                return True
        return False


class Matcher:
    def __init__(self, cache: PrefixCache):
        self.cache = cache
        self.held: Dict[str, List[Block]] = {}

    def _keys(self, tokens: List[int]) -> Iterable[str]:
        parent = ""
        bs = self.cache.block_size
        for i in range(0, len(tokens) - bs + 1, bs):
            parent = hash_tokens(parent, tuple(tokens[i:i + bs]))
            yield parent

    def count_hits(self, tokens: List[int]) -> int:
        n = 0
        for key in self._keys(tokens):
            if self.cache.lookup(key) is None:  # leak: lookup takes a reference that nobody drops
                break
            n += 1
        return n

    def hit_blocks(self, tokens: List[int]) -> int:
        n = 0
        for key in self._keys(tokens):
            blk = self.cache.lookup(key)  # clean: dropped again each turn
            if blk is None:
                break
            n += 1
            self.cache.dec_ref(blk)
        return n

    def match(self, rid: str, tokens: List[int]) -> int:
        hits: List[Block] = []
        for key in self._keys(tokens):
            blk = self.cache.lookup(key)  # clean: held per request, finish() drops it
            if blk is None:
                break
            hits.append(blk)
        self.held.setdefault(rid, []).extend(hits)
        return len(hits) * self.cache.block_size

    def extend(self, rid: str, tokens: List[int]) -> bool:
        blocks = self.held.setdefault(rid, [])
        for i, key in enumerate(self._keys(tokens)):
            if i < len(blocks):
                continue
            blk = self.cache.lookup(key) or self.cache.insert(key)  # clean: appended to held
            if blk is None:
                return False
            blocks.append(blk)
        return True

    def finish(self, rid: str) -> None:
        for blk in reversed(self.held.pop(rid, [])):
            self.cache.dec_ref(blk)

    def longest_of(self, candidates: List[List[int]]) -> int:
        best: List[Block] = []
        for tokens in candidates:
            run: List[Block] = []
            for key in self._keys(tokens):
                blk = self.cache.lookup(key)  # leak: a run that is not the best is dropped with its references
                if blk is None:
                    break
                run.append(blk)
            if len(run) > len(best):
                for b in best:
                    self.cache.dec_ref(b)
                best = run
        n = len(best)
        for b in best:
            self.cache.dec_ref(b)
        return n

    def longest_run(self, candidates: List[List[int]]) -> int:
        best: List[Block] = []
        for tokens in candidates:
            run: List[Block] = []
            for key in self._keys(tokens):
                blk = self.cache.lookup(key)  # clean: near miss, the loser of each comparison is dropped
                if blk is None:
                    break
                run.append(blk)
            loser = run
            if len(run) > len(best):
                loser, best = best, run
            for b in loser:
                self.cache.dec_ref(b)
        n = len(best)
        for b in best:
            self.cache.dec_ref(b)
        return n

    def preload(self, tokens: List[int]) -> None:
        for key in self._keys(tokens):
            blk = self.cache.insert(key)  # leak: the continue for odd ids keeps the reference, nothing remembers the block
            if blk is None:
                return
            if blk.block_id % 2:
                continue
            self.cache.dec_ref(blk)
