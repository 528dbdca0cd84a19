"""KV managers for models with different attention types per layer group."""
from __future__ import annotations

import abc
import logging
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Block:
    index: int


class BlockPool:
    def __init__(self, n: int) -> None:
        self.null_block = Block(-1)
        self._free: List[Block] = [Block(i) for i in range(n)]

    def get_new_blocks(self, n: int) -> List[Block]:
        if n > len(self._free):
            raise ValueError("not enough free blocks")
        out = self._free[-n:] if n else []
        del self._free[len(self._free) - n:]
        return out

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        self._free.extend(b for b in blocks if b is not self.null_block)

    @property
    def num_free(self) -> int:
        return len(self._free)


class StatsMixin:
    def _init_stats(self) -> None:
        self.hits = 0
        self.refused = 0

    def refuse(self, rid: str, want: int) -> bool:
        self.refused += 1
        logger.debug("%s refused, wants %d", rid, want)
        return False


class GroupManager(StatsMixin, abc.ABC):
    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.req_blocks: Dict[str, List[Block]] = {}
        self._init_stats()

    def need(self, rid: str, tokens: int) -> int:
        return max(0, -(-tokens // self.block_size) - len(self.req_blocks.get(rid, ())))

    def allocate_slots(self, rid: str, tokens: int) -> bool:
        n = self.need(rid, tokens)
        if n > self.pool.num_free:
            return self.refuse(rid, n)
        new = self.pool.get_new_blocks(n)  # clean: in the request's list until free_slots
        self.req_blocks.setdefault(rid, []).extend(new)
        return True

    def free_slots(self, rid: str) -> None:
        self.pool.free_blocks(list(reversed(self.req_blocks.pop(rid, []))))

    @abc.abstractmethod
    def trim(self, rid: str, computed: int) -> int:
        ...


class FullAttentionManager(GroupManager):
    def trim(self, rid: str, computed: int) -> int:
        return 0

    def truncate(self, rid: str, tokens: int) -> None:
        keep = -(-tokens // self.block_size)
        blocks = self.req_blocks[rid]
        self.pool.free_blocks(blocks[keep:])
        del blocks[keep:]

    def reallocate(self, rid: str, tokens: int) -> bool:
        n = -(-tokens // self.block_size)
        if n > self.pool.num_free:
            return self.refuse(rid, n)
        fresh = self.pool.get_new_blocks(n)  # clean: near miss, the list replaced is freed beforehand
        self.free_slots(rid)
        self.req_blocks[rid] = fresh
        return True

    def allocate_hinted(self, rid: str, tokens: int, limit: int) -> bool:
        new = self.pool.get_new_blocks(self.need(rid, tokens))  # leak: above the limit the refusal keeps the new blocks
        if len(new) > limit:
            return self.refuse(rid, len(new))
        self.req_blocks.setdefault(rid, []).extend(new)
        return True


class SlidingWindowManager(GroupManager):
    def __init__(self, pool: BlockPool, block_size: int, window: int) -> None:
        super().__init__(pool, block_size)
        self.window = window

    def trim(self, rid: str, computed: int) -> int:
        blocks = self.req_blocks[rid]
        last = max(0, computed - self.window) // self.block_size
        gone = [b for b in blocks[:last] if b is not self.pool.null_block]
        blocks[:last] = [self.pool.null_block] * last
        self.pool.free_blocks(gone)
        return len(gone)

    def rotate(self, rid: str) -> bool:
        """Put one more block at the end and give the oldest back."""
        if rid not in self.req_blocks or self.pool.num_free == 0:
            return False
        (new,) = self.pool.get_new_blocks(1)  # clean: near miss, joins the list whose head is freed
        blocks = self.req_blocks[rid]
        blocks.append(new)
        self.pool.free_blocks([blocks.pop(0)])
        return True


class CrossAttentionManager(GroupManager):
    """Encoder states: a fixed number of blocks, never grown."""

    def __init__(self, pool: BlockPool, block_size: int, encoder_len: int) -> None:
        super().__init__(pool, block_size)
        self.encoder_len = encoder_len
        self.scratch: List[Block] = []

    def trim(self, rid: str, computed: int) -> int:
        return 0

    def begin_encode(self) -> int:
        self.scratch = self.pool.get_new_blocks(self.encoder_len // self.block_size)  # leak: end_encode empties the list without freeing
        return len(self.scratch)

    def end_encode(self) -> None:
        self.scratch.clear()

    def verify(self, rid: str) -> bool:
        tmp = self.pool.get_new_blocks(1)  # leak: an unknown request raises with tmp taken
        if rid not in self.req_blocks:
            raise KeyError(rid)
        ok = tmp[0] not in self.req_blocks[rid]
        self.pool.free_blocks(tmp)
        return ok


class Coordinator:
    def __init__(self, managers: Sequence[GroupManager]) -> None:
        self.managers = list(managers)

    def allocate(self, rid: str, tokens: int) -> bool:
        done: List[GroupManager] = []
        for m in self.managers:
            if not m.allocate_slots(rid, tokens):  # clean: near miss, groups served before are freed on refusal
                for d in done:
                    d.free_slots(rid)
                return False
            done.append(m)
        return True

    def allocate_all(self, rid: str, tokens: Dict[int, int]) -> Optional[int]:
        total = 0
        for i, m in enumerate(self.managers):
            if not m.allocate_slots(rid, tokens[i]):  # clean: near miss, free is what the caller does for a refused request, too
                return None
            total += tokens[i]
        return total

    def free(self, rid: str) -> None:
        for m in self.managers:
            m.free_slots(rid)

    def admit(self, rid: str, tokens: Dict[int, int]) -> bool:
        if self.allocate_all(rid, tokens) is None:  # clean: near miss, partial grants are freed by rid
            self.free(rid)
            return False
        return True
