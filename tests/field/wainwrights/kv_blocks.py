"""Paged KV cache bookkeeping for a continuous-batching server.

A block is an integer index in the cache tensor.  Blocks are reference counted: beams and sequences with a common
prefix share them.  There are two allocators, one for the device cache and one for the host swap space.
"""
import itertools
import logging
from collections import OrderedDict, deque
from enum import Enum

logger = logging.getLogger("kv")

BLOCK = 16


class OutOfBlocks(Exception):
    pass


class State(Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3


class BlockAllocator:
    def __init__(self, name, n):
        self.name = name
        self.n = n
        self._free = list(range(n))
        self._refs = [0] * n

    @property
    def num_free(self):
        return len(self._free)

    def allocate(self):
        if not self._free:
            raise OutOfBlocks(self.name)
        bid = self._free.pop()  # clean: returned to the caller with one reference
        self._refs[bid] = 1
        return bid

    def allocate_many(self, n):
        """n blocks, or None when there are not so many."""
        out = []
        for _ in range(n):
            if not self._free:
                return None
            bid = self._free.pop()  # leak: running dry halfway returns None and drops the blocks in out
            self._refs[bid] = 1
            out.append(bid)
        return out

    def share(self, bid):
        assert self._refs[bid] > 0, bid
        self._refs[bid] += 1
        return bid

    def refcount(self, bid):
        return self._refs[bid]

    def free(self, bid):
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)
        elif self._refs[bid] < 0:
            raise RuntimeError("double free of %s block %d" % (self.name, bid))


class Sequence:
    _ids = itertools.count()

    def __init__(self, tokens):
        self.id = next(self._ids)
        self.tokens = list(tokens)
        self.state = State.WAITING
        self.table = []          # device blocks
        self.host_table = []     # host blocks while swapped

    def blocks_needed(self):
        return -(-len(self.tokens) // BLOCK)

    def __repr__(self):
        return "<seq %d %s %d tok %d blk>" % (self.id, self.state.name, len(self.tokens), len(self.table))


class PrefixCache:
    """Maps the hash of a full block's tokens (and all before) to the block. Holds one reference for itself."""

    def __init__(self, alloc, capacity):
        self.alloc = alloc
        self.capacity = capacity
        self._by_hash = OrderedDict()

    def match(self, tokens):
        """References on the longest cached run of blocks; they belong to the caller."""
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            key = hash(tuple(tokens[:end]))
            if key not in self._by_hash:
                break
            self._by_hash.move_to_end(key)
            found.append(self.alloc.share(self._by_hash[key]))  # clean: the break still returns what was found
        return found

    def remember(self, tokens, table):
        for i, bid in enumerate(table):
            end = (i + 1) * BLOCK
            if end > len(tokens):
                break
            key = hash(tuple(tokens[:end]))
            if key in self._by_hash:
                continue
            self._by_hash[key] = self.alloc.share(bid)  # clean: near miss, the entry owns it until shrink() or clear()
        self.shrink(self.capacity)

    def shrink(self, to):
        while len(self._by_hash) > to:
            _, bid = self._by_hash.popitem(last=False)
            self.alloc.free(bid)

    def clear(self):
        self.shrink(0)


class Scheduler:
    def __init__(self, device_blocks, host_blocks, max_tokens=4096, spec_k=2):
        self.dev = BlockAllocator("device", device_blocks)
        self.host = BlockAllocator("host", host_blocks)
        self.prefix = PrefixCache(self.dev, device_blocks // 4)
        self.waiting = deque()
        self.running = []
        self.swapped = []
        self.lookahead = {}
        self.max_tokens = max_tokens
        self.spec_k = spec_k

    def add(self, seq):
        self.waiting.append(seq)

    def _admit(self, seq):
        if sum(len(s.tokens) for s in self.running) + len(seq.tokens) > self.max_tokens:
            return False
        hits = self.prefix.match(seq.tokens)  # leak: the refusal below returns while the references on the prefix are held
        tail = self.dev.allocate_many(seq.blocks_needed() - len(hits))  # clean: becomes part of seq.table
        if tail is None:
            logger.debug("no room for %r, %d free", seq, self.dev.num_free)
            return False
        seq.table = hits + tail
        seq.state = State.RUNNING
        return True

    def schedule(self):
        while self.waiting and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for seq in list(self.running):
            if seq.state is not State.RUNNING:
                continue
            while True:
                try:
                    self._grow(seq)
                    break
                except OutOfBlocks:
                    victim = self.running[-1]
                    self._preempt(victim)
                    if victim is seq:
                        break
        return list(self.running)

    def _grow(self, seq):
        if seq.blocks_needed() > len(seq.table):
            seq.table.append(self.dev.allocate())  # clean: _release and _preempt walk the table
            return
        last = seq.table[-1]
        if self.dev.refcount(last) > 1:
            mine = self.dev.allocate()  # clean: near miss, it replaces a shared entry whose reference is dropped
            seq.table[-1] = mine
            self.dev.free(last)

    def fork(self, parent, width, group):
        child = Sequence(parent.tokens)
        child.table = [self.dev.share(b) for b in parent.table]  # leak: a full group returns None and the child's references go with it
        if len(group) >= width:
            return None
        child.state = State.RUNNING
        group.append(child)
        self.running.append(child)
        return child

    def reserve_lookahead(self, seq):
        if seq.id in self.lookahead:
            return True
        got = self.dev.allocate_many(self.spec_k)  # leak: verify() pops the entry on a rejected draft and forgets the blocks
        if got is None:
            return False
        self.lookahead[seq.id] = got
        return True

    def verify(self, seq, accepted):
        extra = self.lookahead.pop(seq.id, [])
        if not accepted:
            logger.debug("draft of %r rejected", seq)
            return
        seq.tokens.extend(accepted)
        seq.table.extend(extra)

    def _preempt(self, seq):
        self.running.remove(seq)
        if self.host.num_free >= len(seq.table):
            self._swap_out(seq)
        else:
            self._release(seq)
            seq.state = State.WAITING
            self.waiting.appendleft(seq)

    def _swap_out(self, seq):
        for bid in seq.table:
            seq.host_table.append(self.host.allocate())  # leak: abort() of a swapped sequence only walks the device table
            self.dev.free(bid)
        seq.table = []
        seq.state = State.SWAPPED
        self.swapped.append(seq)

    def _swap_in(self, seq):
        if self.dev.num_free < len(seq.host_table):
            return False
        for bid in seq.host_table:
            seq.table.append(self.dev.allocate())  # clean: near miss, the number of free blocks was checked above
            self.host.free(bid)
        seq.host_table = []
        seq.state = State.RUNNING
        self.swapped.remove(seq)
        self.running.append(seq)
        return True

    def _release(self, seq):
        for bid in seq.table:
            self.dev.free(bid)
        for bid in self.lookahead.pop(seq.id, ()):
            self.dev.free(bid)
        seq.table = []

    def finish(self, seq):
        self.prefix.remember(seq.tokens, seq.table)
        self._release(seq)
        seq.state = State.DONE
        self.running.remove(seq)

    def abort(self, seq):
        for place in (self.waiting, self.running, self.swapped):
            if seq in place:
                place.remove(seq)
        self._release(seq)
        seq.state = State.DONE

    def rebalance(self):
        while self.swapped and self._swap_in(self.swapped[0]):
            pass
