"""SPMC ring over a shared byte region: reserve -> fill -> commit, then
attach -> read -> detach on the reader's side.  Cells are small objects."""
import collections
import contextlib
import struct
import threading
import time

LEN = struct.Struct("<I")


class Cell:
    __slots__ = ("no", "mem", "pins", "seq")

    def __init__(self, no, mem):
        self.no = no
        self.mem = mem
        self.pins = 0
        self.seq = -1


class Ring:
    def __init__(self, cells, cell_bytes):
        region = memoryview(bytearray(cells * cell_bytes))
        self._vacant = collections.deque(
            Cell(i, region[i * cell_bytes:(i + 1) * cell_bytes]) for i in range(cells))
        self._full = collections.deque()
        self._cv = threading.Condition()
        self._seq = 0
        self.cell_bytes = cell_bytes

    # writer side: a reserved cell must be committed or withdrawn
    def reserve(self, wait=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._vacant, timeout=wait):
                return None
            return self._vacant.popleft()  # clean: returned to the writer

    def commit(self, cell):
        with self._cv:
            cell.seq = self._seq
            self._seq += 1
            self._full.append(cell)
            self._cv.notify_all()

    def withdraw(self, cell):
        with self._cv:
            self._vacant.appendleft(cell)
            self._cv.notify_all()

    # reader side: an attached cell must be detached
    def attach(self, wait=None):
        with self._cv:
            if not self._cv.wait_for(lambda: self._full, timeout=wait):
                return None
            return self._full.popleft()  # clean: returned to the reader

    def attach_newest(self):
        """Skip to the newest full cell."""
        with self._cv:
            newest = None
            while self._full:
                newest = self._full.popleft()  # leak: older cells are rebound away and never become vacant
            return newest

    def detach(self, cell):
        with self._cv:
            cell.seq = -1
            self._vacant.append(cell)
            self._cv.notify_all()

    def skip_to(self, seq):
        with self._cv:
            while self._full and self._full[0].seq < seq:
                self._vacant.append(self._full.popleft())  # clean: goes straight to the vacant queue
            self._cv.notify_all()

    @contextlib.contextmanager
    def writing(self, wait=None):
        cell = self.reserve(wait)  # clean: committed or withdrawn on both ways out
        if cell is None:
            raise TimeoutError("ring is full")
        try:
            yield cell
        except BaseException:
            self.withdraw(cell)
            raise
        else:
            self.commit(cell)

    @contextlib.contextmanager
    def reading(self, wait=None):
        cell = self.attach(wait)  # clean: finally detaches it, None is yielded as such
        try:
            yield cell
        finally:
            if cell is not None:
                self.detach(cell)


class Publisher:
    def __init__(self, ring):
        self.ring = ring
        self.half = None
        self.used = 0
        self.dropped = 0

    def publish(self, payload):
        cell = self.ring.reserve(0.1)  # leak: an oversize payload returns before commit or withdraw
        if cell is None:
            self.dropped += 1
            return False
        if len(payload) + LEN.size > self.ring.cell_bytes:
            self.dropped += 1
            return False
        LEN.pack_into(cell.mem, 0, len(payload))
        cell.mem[LEN.size:LEN.size + len(payload)] = payload
        self.ring.commit(cell)
        return True

    def publish_all(self, payloads):
        sent = 0
        for p in payloads:
            if len(p) + LEN.size > self.ring.cell_bytes:
                continue
            cell = self.ring.reserve(0.1)  # clean: near miss, the continue is ahead of it, always committed
            if cell is None:
                break
            LEN.pack_into(cell.mem, 0, len(p))
            cell.mem[LEN.size:LEN.size + len(p)] = p
            self.ring.commit(cell)
            sent += 1
        return sent

    def append(self, record):
        """Batch small records into one cell, committed once it is full."""
        if self.half is not None and self.used + len(record) > self.ring.cell_bytes:
            self.flush()
        if self.half is None:
            self.half = self.ring.reserve(1.0)  # clean: held in self.half until flush() or abandon()
            if self.half is None:
                return False
            self.used = LEN.size
        self.half.mem[self.used:self.used + len(record)] = record
        self.used += len(record)
        return True

    def flush(self):
        if self.half is None:
            return
        LEN.pack_into(self.half.mem, 0, self.used - LEN.size)
        self.ring.commit(self.half)
        self.half = None

    def abandon(self):
        cell, self.half = self.half, None
        if cell is not None:
            self.ring.withdraw(cell)


class BulkPublisher:
    """Opens two cells at once so that a frame and its mask stay adjacent."""

    def __init__(self, ring):
        self.ring = ring

    def send(self, frame, mask):
        a = self.ring.reserve(0.05)  # leak: no withdraw when the second reserve times out
        if a is None:
            return False
        b = self.ring.reserve(0.05)  # clean: committed next to a
        if b is None:
            return False
        for cell, body in ((a, frame), (b, mask)):
            LEN.pack_into(cell.mem, 0, len(body))
            cell.mem[LEN.size:LEN.size + len(body)] = body
        self.ring.commit(a)
        self.ring.commit(b)
        return True

    def send_triplet(self, parts):
        cells = []
        for _ in parts:
            cell = self.ring.reserve(0.05)  # clean: withdrawn as a batch on timeout, else committed
            if cell is None:
                for c in cells:
                    self.ring.withdraw(c)
                return False
            cells.append(cell)
        for cell, body in zip(cells, parts):
            LEN.pack_into(cell.mem, 0, len(body))
            cell.mem[LEN.size:LEN.size + len(body)] = body
            self.ring.commit(cell)
        return True


class Subscriber:
    def __init__(self, ring, on_message):
        self.ring = ring
        self.on_message = on_message
        self.parked = {}

    def pump(self, budget):
        handled = 0
        deadline = time.monotonic() + budget
        while time.monotonic() < deadline:
            cell = self.ring.attach(0.01)  # leak: a zero-length keepalive cell is skipped without detach
            if cell is None:
                break
            n, = LEN.unpack_from(cell.mem)
            if n == 0:
                continue
            self.on_message(bytes(cell.mem[LEN.size:LEN.size + n]))
            self.ring.detach(cell)
            handled += 1
        return handled

    def park(self, token):
        """Keep the next cell attached until unpark(token)."""
        if token in self.parked:
            return False
        cell = self.ring.attach(0.01)  # clean: near miss, parked under a fresh token, unpark()/close() detach
        if cell is None:
            return False
        self.parked[token] = cell
        return True

    def unpark(self, token):
        cell = self.parked.pop(token, None)
        if cell is None:
            return None
        data = bytes(cell.mem)
        self.ring.detach(cell)
        return data

    def close(self):
        for token in list(self.parked):
            self.unpark(token)

    def drain(self):
        while True:
            with self.ring.reading(0) as cell:  # clean: detached by the context manager
                if cell is None:
                    return
                n, = LEN.unpack_from(cell.mem)
                yield bytes(cell.mem[LEN.size:LEN.size + n])


def relay(src, dst, keep):
    """Forward cells from one ring to the other, filtered by keep(bytes)."""
    moved = 0
    while True:
        cell = src.attach(0)  # clean: detached in each branch before the next turn
        if cell is None:
            return moved
        out = dst.reserve(0)  # leak: a filtered-out cell continues with `out` still reserved
        if out is None:
            src.detach(cell)
            return moved
        if not keep(bytes(cell.mem)):
            src.detach(cell)
            continue
        out.mem[:] = cell.mem
        src.detach(cell)
        dst.commit(out)
        moved += 1
