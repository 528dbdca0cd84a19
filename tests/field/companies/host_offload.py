"""Swap KV blocks between GPU and host."""
import enum
import logging
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple

_logger = logging.getLogger("offload")


class Tier(enum.IntEnum):
    GPU = 0
    CPU = 1


class OutOfBlocks(Exception):
    """Raised by `allocate_block` when the tier is full."""


class BlockPool:
    def __init__(self, tier: Tier, n: int) -> None:
        self.tier = tier
        self._free: Set[int] = set(range(n))
        self._used: Set[int] = set()
        self.n = n

    def allocate_block(self) -> int:
        if not self._free:
            raise OutOfBlocks(self.tier.name)
        b = self._free.pop()  # clean: in the used set, and the result
        self._used.add(b)
        return b

    def has_room(self, n: int = 1) -> bool:
        return len(self._free) >= n

    def free_block(self, b: int) -> None:
        self._used.remove(b)
        self._free.add(b)

    def grow(self, k: int) -> None:
        self._free.update(range(self.n, self.n + k))
        self.n += k

    def shrink(self, k: int) -> int:
        gone = 0
        for _ in range(k):
            if not self._free:
                break
            b = self._free.pop()  # leak: a low id is popped, refused and not put back
            if b < self.n - k:
                continue
            gone += 1
        return gone


@dataclass
class Seq:
    sid: int
    table: List[int]
    tier: Tier = Tier.GPU


class SwapManager:
    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self.pools = {Tier.GPU: gpu, Tier.CPU: cpu}
        self.seqs: Dict[int, Seq] = {}

    def create(self, sid: int, n: int) -> Optional[Seq]:
        table: List[int] = []
        try:
            for _ in range(n):
                table.append(self.pools[Tier.GPU].allocate_block())  # clean: near miss, the handler frees the part that was got
        except OutOfBlocks:
            for b in table:
                self.pools[Tier.GPU].free_block(b)
            return None
        seq = Seq(sid, table)
        self.seqs[sid] = seq
        return seq

    def create_or_wait(self, sid: int, n: int) -> Optional[Seq]:
        table: List[int] = []
        try:
            for _ in range(n):
                table.append(self.pools[Tier.GPU].allocate_block())  # leak: the handler returns None and the partial table is gone
        except OutOfBlocks:
            _logger.info("seq %d has to wait for %d blocks", sid, n - len(table))
            return None
        seq = Seq(sid, table)
        self.seqs[sid] = seq
        return seq

    def destroy(self, sid: int) -> None:
        seq = self.seqs.pop(sid)
        for b in seq.table:
            self.pools[seq.tier].free_block(b)

    def _move(self, seq: Seq, dst: Tier) -> List[Tuple[int, int]]:
        src_pool, dst_pool = self.pools[seq.tier], self.pools[dst]
        if not dst_pool.has_room(len(seq.table)):
            raise OutOfBlocks(dst.name)
        fresh = [dst_pool.allocate_block() for _ in seq.table]  # clean: becomes the table of the sequence
        plan = list(zip(seq.table, fresh))
        for b in seq.table:
            src_pool.free_block(b)
        seq.table, seq.tier = fresh, dst
        return plan

    def swap_out(self, sid: int) -> List[Tuple[int, int]]:
        return self._move(self.seqs[sid], Tier.CPU)

    def swap_in(self, sid: int) -> List[Tuple[int, int]]:
        return self._move(self.seqs[sid], Tier.GPU)

    def append_token(self, sid: int, pos: int, block_size: int) -> Optional[Tuple[int, int]]:
        seq = self.seqs[sid]
        if pos % block_size == 0:
            seq.table.append(self.pools[seq.tier].allocate_block())  # clean: in the table, destroy() frees it
        return seq.table[-1], pos % block_size

    def copy_on_write(self, sid: int, i: int) -> Tuple[int, int]:
        seq = self.seqs[sid]
        new = self.pools[seq.tier].allocate_block()  # clean: near miss, the replaced block is freed first
        old = seq.table[i]
        self.pools[seq.tier].free_block(old)
        seq.table[i] = new
        return old, new

    def peek(self, tier: Tier) -> bool:
        try:
            self.pools[tier].allocate_block()  # leak: asked for to see whether it works, and never freed
        except OutOfBlocks:
            return False
        return True

    def truncate(self, sid: int, keep: int) -> int:
        seq = self.seqs[sid]
        tail = seq.table[keep:]
        del seq.table[keep:]
        for b in tail:
            self.pools[seq.tier].free_block(b)
        return len(tail)

    def bounce(self, sid: int, via: Tier) -> bool:
        seq = self.seqs[sid]
        tmp = self.pools[via].allocate_block()  # leak: a sequence already on that tier returns with the bounce block
        if seq.tier == via:
            return False
        for b in seq.table:
            _logger.debug("bounce %d over %d", b, tmp)
        self.pools[via].free_block(tmp)
        return True

    def reserve_tail(self, sids: List[int]) -> Dict[int, int]:
        got: Dict[int, int] = {}
        for sid in sids:
            seq = self.seqs.get(sid)
            if seq is None or not self.pools[seq.tier].has_room():
                continue
            got[sid] = self.pools[seq.tier].allocate_block()  # clean: near miss, the map goes to the caller, who commits it
        return got

    def commit_tail(self, got: Dict[int, int]) -> None:
        for sid, b in got.items():
            self.seqs[sid].table.append(b)

    def step(self, sids: List[int]) -> int:
        got = self.reserve_tail(sids)  # clean: committed to the tables
        self.commit_tail(got)
        return len(got)

    def dry_step(self, sids: List[int]) -> int:
        got = self.reserve_tail(sids)  # leak: counted, neither committed nor freed
        return len(got)
