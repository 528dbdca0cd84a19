"""Key/value blocks, adapters and seats of the text server."""
from __future__ import annotations

import asyncio
import heapq
import threading
from collections import OrderedDict
from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Free block numbers in a heap so that low numbers go first."""

    def __init__(self, nblocks):
        self._heap = list(range(nblocks))
        self._out = set()
        self.peak = 0

    @property
    def n_free(self):
        return len(self._heap)

    def allocate(self, n):
        if n > len(self._heap):
            raise OutOfBlocks(f"{n} wanted, {len(self._heap)} free")
        blocks = [heapq.heappop(self._heap) for _ in range(n)]
        self._out.update(blocks)
        self.peak = max(self.peak, len(self._out))
        return blocks

    def free(self, blocks):
        for b in blocks:
            self._out.remove(b)
            heapq.heappush(self._heap, b)


@dataclass
class Sequence:
    prompt: list
    blocks: list = field(default_factory=list)
    finished: bool = False


def admit(allocator, seq, block_size=16):
    need = -(-len(seq.prompt) // block_size)
    if need > allocator.n_free:
        return False
    seq.blocks.extend(allocator.allocate(need))  # clean: near miss, owned by the sequence that finish frees
    return True


def finish(allocator, seq):
    allocator.free(seq.blocks)
    seq.blocks = []
    seq.finished = True


def swap_in(allocator, seq, host, nblocks):
    fresh = allocator.allocate(nblocks)  # leak: a missing host copy returns False with the blocks out
    for slot, b in enumerate(fresh):
        data = host.get((id(seq), slot))
        if data is None:
            return False
        host.upload(b, data)
    seq.blocks = fresh
    return True


def dry_run(allocator, model, lengths):
    blocks = allocator.allocate(max(lengths))  # leak: only the blocks of the last length are freed
    for n in lengths:
        model.step(blocks[:n])
    allocator.free(blocks[:n])


class SharedBlocks:
    """Blocks shared by prefix; each reader counts one reference."""

    def __init__(self, allocator):
        self._allocator = allocator
        self._refs = {}
        self._by_hash = {}

    def adopt(self, digest):
        block = self._by_hash.get(digest)
        if block is None:
            (block,) = self._allocator.allocate(1)  # clean: freed by disown with the last reference
            self._by_hash[digest] = block
            self._refs[block] = 0
        self._refs[block] += 1
        return block

    def disown(self, block):
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._by_hash = {d: b for d, b in self._by_hash.items() if b != block}
            self._allocator.free([block])


def match_prefix(shared, digests, wanted):
    got = []
    for d in digests:
        block = shared.adopt(d)  # leak: the block that exceeds wanted is neither listed nor disowned
        if len(got) >= wanted:
            break
        got.append(block)
    return got


def score_prefix(shared, model, digests):
    got = [shared.adopt(d) for d in digests]  # clean: all disowned in finally
    try:
        return model.score(got)
    finally:
        for block in got:
            shared.disown(block)


class AdapterSlots:
    """A few device slots for low-rank adapters; idle ones stay warm."""

    def __init__(self, load, nslots=8):
        self._load = load
        self._slot_of = OrderedDict()
        self._riders = {}
        self._empty = list(range(nslots))
        self.loads = 0

    def dock(self, name):
        slot = self._slot_of.get(name)
        if slot is None:
            slot = self._make_room()
            if slot is None:
                return -1
            self._load(name, slot)
            self.loads += 1
            self._slot_of[name] = slot
            self._riders[name] = 0
        self._riders[name] += 1
        self._slot_of.move_to_end(name)
        return slot

    def undock(self, name):
        if self._riders.get(name, 0) < 1:
            raise KeyError(name)
        self._riders[name] -= 1

    def _make_room(self):
        if self._empty:
            return self._empty.pop()
        for name in self._slot_of:
            if self._riders[name] == 0:
                del self._riders[name]
                return self._slot_of.pop(name)
        return None


def run_with_adapter(slots, model, req):
    slot = slots.dock(req.adapter)  # clean: undocked on the empty and on the full way
    if slot < 0:
        return None
    if not req.tokens:
        slots.undock(req.adapter)
        return []
    out = model.generate(req.tokens, slot)
    slots.undock(req.adapter)
    return out


def warm_up(slots, model, names):
    for name in names:
        slot = slots.dock(name)  # leak: an adapter whose probe fails is skipped while docked
        if slot < 0:
            break
        if not model.probe(slot):
            continue
        slots.undock(name)


class Seat:
    __slots__ = ("_room", "session_id", "_left")

    def __init__(self, room, session_id):
        self._room = room
        self.session_id = session_id
        self._left = False

    def leave(self):
        if not self._left:
            self._left = True
            self._room._vacated(self)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.leave()


class SessionRoom:
    def __init__(self, capacity):
        self._capacity = capacity
        self._seated = {}
        self._waiters = []

    async def take_seat(self, session_id):
        while len(self._seated) >= self._capacity:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut
        seat = self._seated[session_id] = Seat(self, session_id)
        return seat

    def _vacated(self, seat):
        self._seated.pop(seat.session_id, None)
        if self._waiters:
            self._waiters.pop(0).set_result(None)


async def chat(room, session_id, stream):
    async with await room.take_seat(session_id):  # clean: async with leaves the seat
        async for token in stream:
            yield token


async def summarize(room, session_id, model, text):
    seat = await room.take_seat(session_id)  # leak: a timeout is caught and answered without leave
    try:
        answer = await asyncio.wait_for(model.summary(text), 10)
    except asyncio.TimeoutError:
        return ""
    seat.leave()
    return answer


class Permit:
    def __init__(self, budget, n):
        self.budget = budget
        self.n = n
        self.closed = False

    def commit(self, used):
        self._close(self.n - used)
        self.budget.spent += used

    def cancel(self):
        self._close(self.n)

    def _close(self, back):
        if self.closed:
            raise RuntimeError("permit is closed")
        self.closed = True
        with self.budget._lock:
            self.budget.pending -= self.n
            self.budget.room += back


class TokenBudget:
    """Tokens a minute. A permit must be committed or cancelled."""

    def __init__(self, room):
        self.room = room
        self.pending = 0
        self.spent = 0
        self._lock = threading.Lock()

    def reserve(self, n):
        with self._lock:
            if n > self.room:
                return None
            self.room -= n
            self.pending += n
        return Permit(self, n)


def complete(budget, model, prompt, limit):
    permit = budget.reserve(len(prompt) + limit)  # clean: committed or cancelled
    if permit is None:
        return None
    text = model.complete(prompt, limit)
    if not text:
        permit.cancel()
    else:
        permit.commit(len(prompt) + len(text))
    return text


def rerank(budget, model, query, docs):
    ranked = []
    for doc in docs:
        permit = budget.reserve(len(query) + len(doc))  # leak: a document without score is skipped with the permit open
        if permit is None:
            break
        score = model.score(query, doc)
        if score is None:
            continue
        permit.commit(len(query) + len(doc))
        ranked.append((score, doc))
    return sorted(ranked)


class PrefixStats:
    """How often prefixes hit; only numbers."""

    def __init__(self):
        self.hits = {}
        self.total = 0

    def enter(self, digest):
        self.total += 1
        self.hits[digest] = self.hits.get(digest, 0) + 1
        return self.hits[digest]

    def leave(self, digest):
        self.hits.pop(digest, None)


def is_hot(stats, digest):
    count = stats.enter(digest)  # clean: a statistic, nothing is held
    return count > 8
