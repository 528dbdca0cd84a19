"""Block manager for paged attention: fixed KV blocks, copy-on-write forks, prefix sharing."""
from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional

log = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


@dataclass
class Sequence:
    seq_id: int
    tokens: list[int]
    priority: int = 0
    parent: Optional[int] = None
    outputs: list[int] = field(default_factory=list)

    def n_logical(self, block_size: int) -> int:
        return -(-(len(self.tokens) + len(self.outputs)) // block_size)


class BlockPool:
    """Reference-counted block ids. A block is free again when its count is zero."""

    def __init__(self, n_blocks: int, block_size: int, name: str = "gpu"):
        self.name = name
        self.block_size = block_size
        self.free: deque[int] = deque(range(n_blocks))
        self.refs = [0] * n_blocks

    def __len__(self) -> int:
        return len(self.free)

    def grab(self) -> Optional[int]:
        if not self.free:
            return None
        block = self.free.popleft()  # clean: handed to the caller with one reference
        self.refs[block] = 1
        return block

    def grab_many(self, n: int) -> list[int]:
        got: list[int] = []
        for _ in range(n):
            block = self.grab()  # leak: blocks already in got are lost when the pool runs dry half way
            if block is None:
                return []
            got.append(block)
        return got

    def share(self, block: int) -> int:
        assert self.refs[block] > 0
        self.refs[block] += 1
        return block

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free.append(block)


class BlockManager:
    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        send: Callable[[int, Iterable[int]], bool],
        max_prefix: int = 512,
    ):
        self.pool = pool
        self.host = host
        self.send = send
        self.max_prefix = max_prefix
        self.tables: dict[int, list[int]] = {}
        self.swapped: dict[int, list[int]] = {}
        self.prefix: OrderedDict[int, int] = OrderedDict()

    # -- prefix cache ------------------------------------------------------

    def _key(self, tokens: list[int], index: int) -> int:
        return hash(tuple(tokens[: (index + 1) * self.pool.block_size]))

    def _match_prefix(self, seq: Sequence) -> list[int]:
        hits: list[int] = []
        for i in range(len(seq.tokens) // self.pool.block_size):
            key = self._key(seq.tokens, i)
            if key not in self.prefix:
                break
            self.prefix.move_to_end(key)
            hits.append(self.pool.share(self.prefix[key]))  # clean: returned to the caller in hits
        return hits

    def _trim_prefix(self) -> None:
        while len(self.prefix) > self.max_prefix:
            _, block = self.prefix.popitem(last=False)
            self.pool.drop(block)

    def publish(self, seq: Sequence) -> None:
        table = self.tables[seq.seq_id]
        for i in range(len(seq.tokens) // self.pool.block_size):
            key = self._key(seq.tokens, i)
            self.prefix[key] = self.pool.share(table[i])  # leak: an earlier reference under the same key is overwritten, never dropped
        self._trim_prefix()

    def warm_prefix(self, tokens: list[int], fill: Callable[[int, list[int]], None]) -> bool:
        block = self.pool.grab()  # leak: not dropped when the key is cached already
        if block is None:
            return False
        key = self._key(tokens, 0)
        if key in self.prefix:
            self.prefix.move_to_end(key)
            return True
        fill(block, tokens[: self.pool.block_size])
        self.prefix[key] = block
        self._trim_prefix()
        return True

    # -- lifecycle of a sequence -------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        need = seq.n_logical(self.pool.block_size)
        shared = self._match_prefix(seq)  # leak: prefix references are kept when fresh blocks are short
        fresh = self.pool.grab_many(need - len(shared))  # clean: put in the table that free() empties
        if not fresh and need > len(shared):
            log.debug("seq %d: %d blocks wanted, %d free", seq.seq_id, need, len(self.pool))
            return False
        self.tables[seq.seq_id] = shared + fresh
        return True

    def append_slot(self, seq: Sequence) -> Optional[tuple[int, int]]:
        table = self.tables[seq.seq_id]
        if seq.n_logical(self.pool.block_size) <= len(table):
            last = table[-1]
            if self.pool.refs[last] == 1:
                return None
            new = self.pool.grab()  # clean: near miss, takes the place of the shared block in the table
            if new is None:
                raise OutOfBlocks(self.pool.name)
            table[-1] = new
            self.pool.drop(last)
            return last, new
        block = self.pool.grab()  # clean: appended to the table
        if block is None:
            raise OutOfBlocks(self.pool.name)
        table.append(block)
        return None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        child.parent = parent.seq_id
        self.tables[child.seq_id] = [self.pool.share(b) for b in self.tables[parent.seq_id]]  # clean: the child's table holds them

    def free(self, seq: Sequence) -> None:
        for block in self.tables.pop(seq.seq_id, ()):
            self.pool.drop(block)

    def abort(self, seq: Sequence) -> None:
        self.free(seq)
        for block in self.swapped.pop(seq.seq_id, ()):
            self.host.drop(block)

    # -- moving ------------------------------------------------------------

    def swap_out(self, seq: Sequence) -> bool:
        dst: list[int] = []
        for _ in self.tables[seq.seq_id]:
            block = self.host.grab()  # clean: near miss, the partial list is dropped before False is returned
            if block is None:
                for held in dst:
                    self.host.drop(held)
                return False
            dst.append(block)
        self.swapped[seq.seq_id] = dst
        self.free(seq)
        return True

    def swap_in(self, seq: Sequence) -> bool:
        host_blocks = self.swapped[seq.seq_id]
        device = self.pool.grab_many(len(host_blocks))  # clean: becomes the table of the sequence
        if not device:
            return False
        self.tables[seq.seq_id] = device
        for block in self.swapped.pop(seq.seq_id):
            self.host.drop(block)
        return True

    def migrate(self, seq: Sequence, target: "BlockManager") -> bool:
        here = self.tables[seq.seq_id]
        there = target.pool.grab_many(len(here))  # leak: the target's blocks are lost when the transfer is refused
        if not there:
            return False
        if not self.send(seq.seq_id, zip(here, there)):
            log.warning("transfer of seq %d refused", seq.seq_id)
            return False
        target.tables[seq.seq_id] = there
        self.free(seq)
        return True
