"""Prefix cache with reference-counted blocks."""

import hashlib
import logging
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


class KVBlock:
    __slots__ = ("block_id", "ref_cnt", "digest")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.digest: Optional[bytes] = None

    def inc_ref(self) -> "KVBlock":
        self.ref_cnt += 1
        return self

    def dec_ref(self) -> int:
        assert self.ref_cnt > 0, "dec_ref on free block"
        self.ref_cnt -= 1
        return self.ref_cnt


class PrefixCache:
    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = [KVBlock(i) for i in range(num_blocks)]
        self.by_digest: Dict[bytes, KVBlock] = {}
        self.tables: Dict[str, List[KVBlock]] = {}

    def _digest(self, parent: Optional[bytes], tokens: Sequence[int]) -> bytes:
        h = hashlib.blake2b(parent or b"", digest_size=16)
        h.update(",".join(map(str, tokens)).encode())
        return h.digest()

    def _chunks(self, tokens: Sequence[int]) -> Iterable[Tuple[bytes, Sequence[int]]]:
        parent: Optional[bytes] = None
        for i in range(0, len(tokens) - self.block_size + 1, self.block_size):
            part = tokens[i : i + self.block_size]
            parent = self._digest(parent, part)
            yield parent, part

    def _find_idle(self) -> Optional[KVBlock]:
        return next((b for b in self.blocks if b.ref_cnt == 0), None)

    def match(self, tokens: Sequence[int]) -> List[KVBlock]:
        """Longest cached prefix; the caller owns one reference to each block."""
        hit: List[KVBlock] = []
        for digest, _ in self._chunks(tokens):
            block = self.by_digest.get(digest)
            if block is None:
                break
            block.inc_ref()  # clean: near miss, the break leaves the blocks found so far in the result
            hit.append(block)
        return hit

    def match_len(self, tokens: Sequence[int]) -> int:
        hit = self.match(tokens)  # leak: only the length is used, the references stay
        return len(hit) * self.block_size

    def hit_rate(self, batch: Sequence[Sequence[int]]) -> float:
        found = total = 0
        for tokens in batch:
            hit = self.match(tokens)  # clean: dereferenced after counting
            found += len(hit)
            total += len(tokens) // self.block_size
            self.release_blocks(hit)
        return found / total if total else 0.0

    def release_blocks(self, blocks: Iterable[KVBlock]) -> None:
        for b in blocks:
            b.dec_ref()

    def attach(self, req_id: str, tokens: Sequence[int]) -> bool:
        """Table for a new request: cached prefix plus fresh blocks."""
        if req_id in self.tables:
            raise KeyError(req_id)
        table = self.match(tokens)  # clean: near miss, released on failure, else kept in tables
        for digest, _ in list(self._chunks(tokens))[len(table):]:
            block = self._find_idle()
            if block is None:
                self.release_blocks(table)
                return False
            if block.digest is not None:
                self.by_digest.pop(block.digest, None)
            block.inc_ref()  # clean: appended to the table
            block.digest = digest
            self.by_digest[digest] = block
            table.append(block)
        self.tables[req_id] = table
        return True

    def fork(self, src: str, dst: str) -> None:
        table = self.tables[src]
        for b in table:
            b.inc_ref()  # leak: forking onto an existing request overwrites its table
        self.tables[dst] = list(table)

    def attach_exact(self, req_id: str, tokens: Sequence[int]) -> bool:
        hit = self.match(tokens)  # leak: a partial hit returns False with its references held
        wanted = len(tokens) // self.block_size
        if len(hit) < wanted:
            logger.debug("%s: %d of %d blocks cached", req_id, len(hit), wanted)
            return False
        self.detach(req_id)
        self.tables[req_id] = hit
        return True

    def share_last(self, src: str, dst: str) -> bool:
        src_table, dst_table = self.tables[src], self.tables[dst]
        if not src_table:
            return False
        last = src_table[-1].inc_ref()  # clean: near miss, taken back when already there, else appended
        if last in dst_table:
            last.dec_ref()
            return False
        dst_table.append(last)
        return True

    def truncate(self, req_id: str, num_tokens: int) -> None:
        keep = -(-num_tokens // self.block_size)
        table = self.tables[req_id]
        self.release_blocks(table[keep:])
        del table[keep:]

    def pin_prefix(self, tokens: Sequence[int]) -> "PinnedPrefix":
        return PinnedPrefix(self, self.match(tokens))  # clean: owned by the PinnedPrefix, which unpins

    def detach(self, req_id: str) -> None:
        self.release_blocks(self.tables.pop(req_id, ()))


class PinnedPrefix:
    def __init__(self, cache: PrefixCache, blocks: List[KVBlock]):
        self.cache = cache
        self.blocks = blocks

    def __enter__(self) -> "PinnedPrefix":
        return self

    def __exit__(self, *exc) -> None:
        blocks, self.blocks = self.blocks, []
        self.cache.release_blocks(blocks)


def warm_up(cache: PrefixCache, system_prompt: Sequence[int], probes: int) -> int:
    hits = 0
    with cache.pin_prefix(system_prompt) as pinned:  # clean: with statement
        for _ in range(probes):
            hits += len(pinned.blocks)
    return hits


def preload(cache: PrefixCache, prompts: Sequence[Sequence[int]]) -> int:
    count = 0
    for p in prompts:
        pinned = cache.pin_prefix(p)  # leak: never exited, only the count survives
        count += len(pinned.blocks)
    return count
