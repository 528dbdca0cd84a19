"""Block-level bookkeeping for the paged KV cache.

The manager owns two pools: one for device blocks, one for host blocks used
by swap-based preemption.  Block ids are plain integers; a per-block count
makes prefix sharing and copy-on-write possible.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Optional

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16


class NoFreeBlocks(RuntimeError):
    """The pool has not enough blocks for the request."""


class BlockPool:
    """Free list plus a reference count for each block."""

    def __init__(self, num_blocks: int, name: str = "gpu") -> None:
        self.name = name
        self._free: deque[int] = deque(range(num_blocks))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        if not self._free:
            raise NoFreeBlocks(f"{self.name}: exhausted")
        block = self._free.popleft()  # clean: handed to the caller with a count of one
        self._refs[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        if count > len(self._free):
            raise NoFreeBlocks(f"{self.name}: want {count}, have {len(self._free)}")
        blocks = [self._free.popleft() for _ in range(count)]  # clean: room is checked first, all are returned
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def take_run(self, count: int) -> Optional[list[int]]:
        """Return ``count`` adjacent blocks, or None when no run is found."""
        run: list[int] = []
        budget = len(self._free)
        while budget and len(run) < count:
            block = self._free.popleft()  # leak: a run that is still too short when the scan ends is not put back
            budget -= 1
            if run and block != run[-1] + 1:
                self._free.extend(run)
                run = []
            run.append(block)
        if len(run) < count:
            logger.debug("%s: no run of %d", self.name, count)
            return None
        for block in run:
            self._refs[block] = 1
        return run

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def drop_all(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.drop(block)


@dataclass
class Sequence:
    seq_id: int
    token_ids: list[int]
    table: list[int] = field(default_factory=list)
    cross_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return -(-len(self.token_ids) // BLOCK_SIZE)


class BlockManager:
    def __init__(self, num_gpu: int, num_host: int, watermark: float = 0.01) -> None:
        self.gpu = BlockPool(num_gpu, "gpu")
        self.host = BlockPool(num_host, "host")
        self.watermark = int(num_gpu * watermark)
        self._by_hash: dict[int, int] = {}
        self._copies: list[tuple[int, int]] = []

    # -- prefill ---------------------------------------------------------

    def _match_prefix(self, seq: Sequence) -> list[int]:
        hits: list[int] = []
        for start in range(0, len(seq.token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = hash(tuple(seq.token_ids[: start + BLOCK_SIZE]))
            block = self._by_hash.get(key)
            if block is None:
                break
            hits.append(self.gpu.share(block))  # clean: collected in the list that is returned
        return hits

    def allocate(self, seq: Sequence) -> bool:
        """Give ``seq`` its prompt blocks; False means: try again later."""
        if seq.table:
            return True
        prefix = self._match_prefix(seq)  # leak: when take_many raises, False is returned and the shared counts stay up
        try:
            fresh = self.gpu.take_many(seq.num_blocks - len(prefix))  # clean: stored in the table, dropped by free
        except NoFreeBlocks:
            logger.info("seq %d: waiting for blocks", seq.seq_id)
            return False
        seq.table = prefix + fresh
        return True

    def allocate_for_resume(self, seq: Sequence) -> bool:
        if seq.table:
            return True
        prefix = self._match_prefix(seq)  # clean: dropped when there is too little room, stored otherwise
        missing = seq.num_blocks - len(prefix)
        if self.gpu.num_free - missing < self.watermark:
            self.gpu.drop_all(prefix)
            return False
        prefix += self.gpu.take_many(missing)  # clean: cannot raise after the watermark check, joins the table
        seq.table = prefix
        return True

    def allocate_encoder(self, seq: Sequence, num_tokens: int) -> None:
        count = -(-num_tokens // BLOCK_SIZE)
        run = self.gpu.take_run(count)  # clean: None or stored in cross_table, which free drops
        if run is None:
            run = [self.gpu.take() for _ in range(count)]  # leak: take raises midway and the half-built list is gone
        seq.cross_table = run

    # -- decode ----------------------------------------------------------

    def append_slot(self, seq: Sequence) -> None:
        last = seq.table[-1]
        if self.gpu.refs(last) > 1:
            fresh = self.gpu.take()  # clean: replaces the shared block in the table
            self._copies.append((last, fresh))
            seq.table[-1] = fresh
            self.gpu.drop(last)
            return
        if len(seq.token_ids) % BLOCK_SIZE == 0:
            seq.table.append(self.gpu.take())  # clean: lives in the table until free

    def fork(self, parent: Sequence, child_id: int, private_cross: bool = False) -> Sequence:
        child = Sequence(child_id, list(parent.token_ids))
        child.table = [self.gpu.share(b) for b in parent.table]  # clean: the child table drops them in free
        child.cross_table = [self.gpu.share(b) for b in parent.cross_table]  # leak: private_cross overwrites the shared ids and their counts stay up
        if private_cross and self.gpu.num_free >= len(child.cross_table):
            # The caller is going to edit encoder states of the child only.
            for i, block in enumerate(child.cross_table):
                own = self.gpu.take()  # clean: room was checked, written to the table right away
                self._copies.append((block, own))
                child.cross_table[i] = own
        return child

    def drain_copies(self) -> list[tuple[int, int]]:
        copies, self._copies = self._copies, []
        return copies

    # -- preemption ------------------------------------------------------

    def swap_out(self, seq: Sequence) -> dict[int, int]:
        if seq.host_table:
            raise ValueError(f"seq {seq.seq_id} is swapped out already")
        host: list[int] = []
        try:
            for _ in seq.table:
                host.append(self.host.take())  # clean: rolled back on exhaustion, else kept in host_table
        except NoFreeBlocks:
            self.host.drop_all(host)
            raise
        mapping = dict(zip(seq.table, host))
        self.gpu.drop_all(seq.table)
        seq.table = []
        seq.host_table = host
        return mapping

    def swap_in(self, seq: Sequence) -> Optional[dict[int, int]]:
        if not seq.host_table or self.gpu.num_free < len(seq.host_table) + self.watermark:
            return None
        blocks = self.gpu.take_many(len(seq.host_table))  # clean: becomes the table
        mapping = dict(zip(seq.host_table, blocks))
        self.host.drop_all(seq.host_table)
        seq.host_table = []
        seq.table = blocks
        return mapping

    def reserve_lookahead(self, seq: Sequence, count: int) -> int:
        """Extend the table by up to ``count`` blocks for speculative tokens."""
        got = 0
        for _ in range(count):
            try:
                block = self.gpu.take()  # leak: a block taken below the watermark is not recorded before the break
            except NoFreeBlocks:
                break
            if self.gpu.num_free < self.watermark:
                break
            seq.table.append(block)
            got += 1
        return got

    def publish(self, seq: Sequence, upto: int) -> None:
        """Make full blocks visible for prefix sharing; the cache keeps a count."""
        for i in range(upto):
            key = hash(tuple(seq.token_ids[: (i + 1) * BLOCK_SIZE]))
            if key in self._by_hash:
                continue
            self._by_hash[key] = self.gpu.share(seq.table[i])  # clean: evict drops every cached block

    def evict(self) -> None:
        while self._by_hash:
            _, block = self._by_hash.popitem()
            self.gpu.drop(block)

    def free(self, seq: Sequence) -> None:
        self.gpu.drop_all(seq.table)
        self.gpu.drop_all(seq.cross_table)
        self.host.drop_all(seq.host_table)
        seq.table, seq.cross_table, seq.host_table = [], [], []
