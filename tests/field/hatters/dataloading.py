"""Ring slots, worker desks, sample memory and decoders of the data loader."""
from __future__ import annotations

import collections
import contextlib
import functools
import threading
import weakref


class RingClosed(Exception):
    pass


class SharedRing:
    """Fixed slots; a bit a slot says whether the consumer still reads it."""

    def __init__(self, nslots, slot_bytes):
        self._mem = bytearray(nslots * slot_bytes)
        self._slot_bytes = slot_bytes
        self._nslots = nslots
        self._busy = 0
        self._cursor = 0
        self._cv = threading.Condition()
        self.closed = False

    def claim_slot(self):
        with self._cv:
            while not self.closed:
                for step in range(self._nslots):
                    i = (self._cursor + step) % self._nslots
                    if not self._busy >> i & 1:
                        self._busy |= 1 << i
                        self._cursor = i + 1
                        return i
                self._cv.wait()
            raise RingClosed

    def retire(self, i):
        with self._cv:
            self._busy &= ~(1 << i)
            self._cv.notify()

    def window(self, i):
        at = i * self._slot_bytes
        return memoryview(self._mem)[at : at + self._slot_bytes]


def produce(ring, samples, outbox):
    for sample in samples:
        slot = ring.claim_slot()  # leak: an oversized sample is skipped with its slot busy
        view = ring.window(slot)
        if len(sample) > len(view):
            continue
        view[: len(sample)] = sample
        outbox.put((slot, len(sample)))


def consume(ring, inbox, collate):
    while True:
        item = inbox.get()
        if item is None:
            return
        slot, n = item
        try:
            collate(bytes(ring.window(slot)[:n]))
        finally:
            ring.retire(slot)


def checkerboard(ring, a, b):
    first = ring.claim_slot()  # leak: when both samples are equal only the second is retired
    second = ring.claim_slot()  # clean: retired before the branch
    ring.window(first)[: len(a)] = a
    ring.window(second)[: len(b)] = b
    same = a == b
    ring.retire(second)
    if same:
        return None
    ring.retire(first)
    return len(a) + len(b)


class WorkerDesks:
    """A desk number together with the function that clears the desk."""

    def __init__(self, n):
        self._clear = collections.deque(range(n))
        self._taken = set()

    def sit_down(self):
        if not self._clear:
            return None, None
        desk = self._clear.popleft()
        self._taken.add(desk)
        return desk, functools.partial(self._stand_up, desk)

    def _stand_up(self, desk):
        if desk in self._taken:
            self._taken.remove(desk)
            self._clear.append(desk)


def run_job(desks, job):
    desk, stand_up = desks.sit_down()  # clean: the returned function is called in finally
    if desk is None:
        return False
    try:
        job(desk)
    finally:
        stand_up()
    return True


def run_async(desks, executor, job):
    desk, stand_up = desks.sit_down()  # clean: near miss, the future's callback calls it
    if desk is None:
        return None
    fut = executor.submit(job, desk)
    fut.add_done_callback(lambda _: stand_up())
    return fut


def inspect_desk(desks, probe):
    desk, stand_up = desks.sit_down()  # leak: a healthy desk returns before stand_up
    if desk is None:
        return "full"
    if probe(desk):
        return "ok"
    stand_up()
    return "bad"


class SampleArena:
    """Lends views of one bytearray; a reclaimed view is known by its offset."""

    def __init__(self, size, grain=256):
        self._mem = bytearray(size)
        self._grain = grain
        self._map = bytearray(size // grain)
        self._lent = {}

    def slice_out(self, n):
        k = -(-n // self._grain)
        at = self._map.find(bytes(k))
        if at < 0:
            return None
        self._map[at : at + k] = b"\x01" * k
        view = memoryview(self._mem)[at * self._grain : at * self._grain + n]
        self._lent[id(view)] = (at, k, view)
        return view

    def reclaim(self, view):
        at, k, _ = self._lent.pop(id(view))
        self._map[at : at + k] = bytes(k)


def pack(arena, parts):
    view = arena.slice_out(sum(map(len, parts)))  # leak: rebound to narrower views while it is filled, never reclaimed
    if view is None:
        return None
    total = len(view)
    for p in parts:
        view[: len(p)] = p
        view = view[len(p) :]
    return total


def digest(arena, source, n):
    view = arena.slice_out(n)  # clean: near miss, body is another name, view is reclaimed
    if view is None:
        return 0
    got = source.readinto(view)
    body = view[:got]
    h = sum(body)
    arena.reclaim(view)
    return h


class Prefetcher:
    def __init__(self, arena, source, depth):
        self.arena = arena
        self.source = source
        self.depth = depth
        self.ready = collections.deque()

    def top_up(self, n):
        while len(self.ready) < self.depth:
            view = self.arena.slice_out(n)  # leak: at the end of the source it breaks with an empty view out
            if view is None or not self.source.readinto(view):
                break
            self.ready.append(view)

    def pop(self):
        view = self.ready.popleft()
        data = bytes(view)
        self.arena.reclaim(view)
        return data

    def reset(self):
        while self.ready:
            self.arena.reclaim(self.ready.pop())


class DecoderPark:
    """Decoders by codec. A strong list of idle ones, weak memory of all."""

    def __init__(self, factory, per_codec=4):
        self._factory = factory
        self._idle = collections.defaultdict(list)
        self._all = weakref.WeakSet()
        self._count = collections.Counter()
        self._per_codec = per_codec

    def unpark(self, codec):
        if self._idle[codec]:
            return self._idle[codec].pop()
        if self._count[codec] >= self._per_codec:
            raise LookupError(f"no {codec} decoder free")
        self._count[codec] += 1
        dec = self._factory(codec)
        self._all.add(dec)
        return dec

    def park(self, codec, dec):
        dec.reset()
        self._idle[codec].append(dec)


def decode_all(park, packets):
    frames = []
    for codec, payload in packets:
        dec = park.unpark(codec)  # leak: a broken packet is caught and skipped, the decoder stays out
        try:
            frames.append(dec.decode(payload))
        except ValueError:
            continue
        park.park(codec, dec)
    return frames


def probe_stream(park, codec, payload):
    try:
        dec = park.unpark(codec)  # clean: parked on every way that has one
    except LookupError:
        return None
    info = None
    try:
        info = dec.probe(payload)
    except ValueError:
        pass
    park.park(codec, dec)
    return info


class TrackReader:
    def __init__(self, park, codec):
        self._park = park
        self._codec = codec
        self._dec = park.unpark(codec)  # clean: near miss, switch and close park it

    def switch(self, codec):
        self._park.park(self._codec, self._dec)
        self._codec = codec
        self._dec = self._park.unpark(codec)  # clean: close parks it

    def close(self):
        self._park.park(self._codec, self._dec)


class LoanOffice:
    """Worker-local datasets lent by generator: send ends a loan."""

    def __init__(self, datasets):
        self._shelf = list(datasets)
        self.on_loan = 0

    def loan(self):
        if not self._shelf:
            raise IndexError("shelf is empty")
        ds = self._shelf.pop()
        self.on_loan += 1
        return ds

    def redeem(self, ds):
        self.on_loan -= 1
        self._shelf.append(ds)

    @contextlib.contextmanager
    def loaned(self):
        ds = self.loan()
        try:
            yield ds
        finally:
            self.redeem(ds)


def iterate(office, start):
    ds = office.loan()  # clean: the generator's finally redeems it
    try:
        yield from ds.rows(start)
    finally:
        office.redeem(ds)


def head(office, n):
    ds = office.loan()  # leak: the return from the loop skips redeem
    rows = []
    for row in ds.rows(0):
        rows.append(row)
        if len(rows) == n:
            return rows
    office.redeem(ds)
    return rows


def sizes(office, k):
    with contextlib.ExitStack() as stack:
        lent = [stack.enter_context(office.loaned()) for _ in range(k)]  # clean: the exit stack ends every loan
        return [len(ds) for ds in lent]
