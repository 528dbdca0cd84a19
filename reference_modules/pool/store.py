"""The lease store: idle blocks by size and by age, blocks out on lease, blocks that wait for their last
alias.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Protocol

import torch

from reference_modules.pool.blocks import Block, HostMemory, Memory, Signal, lay_over
from reference_modules.pool.errors import NoRoom
from reference_modules.pool.pressure import Pressure
from reference_modules.pool.size_classes import SizeClass, SizeClasses, grain_size
from reference_modules.pool.usefulness import Usefulness

SLACK_SHARE = 0.04
"""Under a limit, blocks that are out may exceed what was asked of them by this share of it: the rest is room
for requests.
"""

NOTHING = memoryview(b"")


class Fences(Protocol):
    """Holds back blocks that a device may still use after their storage has died (pinned memory)."""

    def drawn(self, block: Block) -> None:
        """The block goes out on lease."""

    def hold(self, block: Block) -> bool:
        """Take the block if work on it may still run; False where it is free already."""

    def passed(self) -> list[Block]:
        """Blocks whose work is done, each once."""

    def wait(self) -> None:
        """Block until all work on held blocks is done."""


class BlockStore:
    """Hands out blocks, takes them back when their storage dies. Every method runs under the pool's lock."""

    adds_nothing = False

    def __init__(
        self, memory: Memory | None = None, *, pressure: Pressure | None = None, fences: Fences | None = None
    ) -> None:
        self.memory = memory or HostMemory()
        self.classes = SizeClasses()
        self.usefulness = Usefulness()
        self.died: deque[Signal] = deque()
        """Filled by finalisers, on whatever thread, without a lock; emptied by `settle`."""
        self.reserved = 0
        self.idle_bytes = 0
        self.slack = 0
        """Bytes by which the blocks that are out exceed what was asked of them."""
        self.waiting = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._out: set[Block] = set()
        """Keeps blocks, and with them their signals, alive until their storage has died."""
        self._ages: OrderedDict[Block, None] = OrderedDict()
        self._pressure = pressure or Pressure()
        self._fences = fences

    def draw(
        self, nbytes: int, shape: Sequence[int], dtype: torch.dtype, limit: int | None
    ) -> tuple[torch.Tensor, Signal]:
        """A tensor of exactly `nbytes` over an idle block or a new one.

        NoRoom where `limit` forbids a new one; MemoryError or OSError where the system does; nothing is held
        then.
        """
        slack = nbytes if limit is None else int(limit * SLACK_SHARE) - self.slack
        found = self.classes.fit(nbytes, slack)
        hit = found is not None
        block = self._reuse(found) if found is not None else self._new(nbytes, limit)
        try:
            if self._fences is not None:
                self._fences.drawn(block)
            tensor, signal = lay_over(block, nbytes, shape, dtype, self.died)
        except BaseException:
            self._discard(block)
            raise
        self._out.add(block)
        block.requested = nbytes
        self.slack += block.size - nbytes
        self.hits += hit
        self.misses += not hit
        self.classes.served_by(block.size_class, nbytes, hit=hit)
        return tensor, signal

    def part(self, signal: Signal) -> None:
        """The lease is over: from now on its block waits for that storage to die, unless it has (`set_` and
        the like).
        """
        block = signal.block
        if block.signal is signal and block in self._out:
            block.parted = True
            self.waiting += 1

    def settle(self) -> None:
        """Take in every block whose storage has died since the last call."""
        died = self.died
        while died:
            block = died.popleft().block
            block.signal = None
            self._out.discard(block)
            self.slack -= block.size - block.requested
            if block.parted:
                block.parted = False
                self.waiting -= 1
            if self._fences is None or not self._fences.hold(block):
                self._rest(block)
        if self._fences is not None:
            for block in self._fences.passed():
                self._rest(block)

    def evict(self, nbytes: int) -> int:
        """Give idle blocks back to the system, the longest idle first, until `nbytes` have gone; returns how
        many.
        """
        gone = 0
        while self._ages and gone < nbytes:
            gone += self._evict_oldest()
        return gone

    def evict_older(self, moment: float, most: int) -> int:
        """Give back blocks idle since before `moment`, at most about `most` bytes of them."""
        gone = 0
        while self._ages and gone < most and next(iter(self._ages)).idle_since < moment:
            gone += self._evict_oldest()
        return gone

    def under_pressure(self) -> int:
        """Bytes the machine is short of now."""
        return self._pressure.missing(0)

    def abandon(self) -> None:
        """Forget every block: those still referred to live as long as their aliases do, the rest goes back
        now.
        """
        if self._fences is not None:
            self._fences.wait()
        self.settle()
        self.evict(self.idle_bytes)
        for block in self._out:
            block.memory = NOTHING  # a lease may keep the block known; the memory is its aliases' alone now
        self.reserved = self.slack = self.waiting = 0
        self._out.clear()
        self.died = deque()

    def worth_pooling(self, nbytes: int) -> bool:
        """Whether keeping blocks of this size has paid so far."""
        return self.usefulness.worth_pooling(nbytes)

    def fit(self) -> tuple[int, int]:
        """Bytes requested of blocks and bytes of the blocks that served them, over the store's life."""
        return self.classes.requested, self.classes.served

    def report(self) -> list[dict[str, float]]:
        """What each size class has served."""
        return self.classes.report()

    def reset_after_fork(self) -> None:
        """Blocks of ordinary memory are the child's own copies. Page-locked ones are not: the child forgets
        them, and makes plain ones.
        """
        if self._fences is not None:
            self._fences = None
            self.memory = HostMemory()
            self.abandon()

    def state(self) -> tuple[object, ...]:
        """All that future decisions depend on while no lease is out and the threshold is given (`usefulness`
        unasked).
        """
        return (tuple(block.size for block in self._ages), self.classes.state())

    def _reuse(self, found: SizeClass) -> Block:
        block = found.idle.pop()
        del self._ages[block]
        self.idle_bytes -= block.size
        block.fresh = False
        block.reused = True
        self.usefulness.reused(block.size)
        return block

    def _new(self, nbytes: int, limit: int | None) -> Block:
        size = self.classes.size_for(nbytes)
        if limit is not None and self.reserved + size > limit:
            size = grain_size(nbytes)
            self.evict(self.reserved + size - limit)
            if self.reserved + size > limit:
                raise NoRoom
        short = self._pressure.before(size) if self._ages else 0
        if short > 0:
            self.evict(short)
        memory = self.memory.make(size)
        size_class = self.classes.of(size)
        size_class.blocks += 1
        self.reserved += size
        return Block(memory, size_class, fresh=self.memory.clears)

    def _rest(self, block: Block) -> None:
        block.idle_since = time.monotonic()
        block.size_class.idle.append(block)
        self._ages[block] = None
        self.idle_bytes += block.size

    def _evict_oldest(self) -> int:
        block, _ = self._ages.popitem(last=False)
        block.size_class.idle.popleft()
        self.idle_bytes -= block.size
        self.evictions += 1
        if not block.reused:
            self.usefulness.never_reused(block.size)
        self._discard(block)
        return block.size

    def _discard(self, block: Block) -> None:
        block.signal = None
        block.memory = NOTHING
        self.reserved -= block.size
        self.classes.drop(block)
