# Hardware decode -> resize -> tensor, with a fixed number of surfaces. Threads and queues, no asyncio.
import contextlib
import itertools
import queue
import threading
from collections import defaultdict

import numpy as np
import torch

N_SURFACES = 24
STOP = object()

class DecodeError(Exception): ...
class Starved(Exception): ...

class Surface:
    def __init__(self, idx, h, w):
        self.idx = idx
        self.nv12 = torch.empty((h * 3 // 2, w), dtype=torch.uint8, device="cuda")
        self.pts = -1
        self.refs = 0


class SurfacePool:
    def __init__(self, n=N_SURFACES, h=1088, w=1920):
        self.q = queue.Queue()
        self.n = n
        for i in range(n):
            self.q.put(Surface(i, h, w))
        self.lock = threading.Lock()

    def get(self, timeout=0.5):
        try:
            s = self.q.get(timeout=timeout)  # clean: returned with one reference
        except queue.Empty:
            raise Starved(f"no surface in {timeout}s") from None
        s.refs = 1
        return s

    def ref(self, s):
        with self.lock:
            s.refs += 1
        return s

    def unref(self, s):
        with self.lock:
            s.refs -= 1
            dead = s.refs == 0
        if dead:
            s.pts = -1
            self.q.put(s)

    def drain_to(self, n):
        """Take surfaces out of circulation until only n are left (thermal throttling)."""
        parked = []
        while self.n - len(parked) > n:
            try:
                parked.append(self.q.get_nowait())  # clean: the list is the answer, restore() takes it
            except queue.Empty:
                break
        self.n -= len(parked)
        return parked

    def restore(self, parked):
        for s in parked:
            self.q.put(s)
        self.n += len(parked)

    @contextlib.contextmanager
    def lent(self, timeout=0.5):
        s = self.get(timeout)  # clean: finally of the context manager
        try:
            yield s
        finally:
            self.unref(s)


class Decoder(threading.Thread):
    """One per input. Emits (stream id, surface); whoever receives the surface owns the reference."""

    def __init__(self, sid, packets, pool, out, hw):
        super().__init__(name=f"dec-{sid}", daemon=True)
        self.sid, self.packets, self.pool, self.out, self.hw = sid, packets, pool, out, hw
        self.last_key = None
        self.dropped = self.corrupt = 0

    def run(self):
        for pkt in self.packets:
            try:
                s = self.pool.get()  # leak: a corrupt packet is counted and skipped, the surface meant for it is not given back
            except Starved:
                self.dropped += 1
                continue
            try:
                self.hw.decode_into(pkt, s.nv12)
                if self.hw.status() != 0:
                    raise DecodeError(self.hw.status())
            except DecodeError:
                self.corrupt += 1
                continue
            s.pts = pkt.pts
            if pkt.key:
                self._remember(s)
            self.out.put((self.sid, s))
        self._forget()
        self.out.put((self.sid, STOP))

    def _remember(self, s):
        self._forget()
        self.last_key = self.pool.ref(s)  # clean: near miss, the former key frame was forgotten on the line before, the last one when the input ends

    def _forget(self):
        old, self.last_key = self.last_key, None
        if old is not None:
            self.pool.unref(old)


class Thumbnails:
    """Keeps the newest surface of every stream so that a preview can be rendered at any time."""

    def __init__(self, pool):
        self.pool = pool
        self.latest = {}
        self.hold = defaultdict(list)
        self.mu = threading.Lock()

    def offer(self, sid, s):
        with self.mu:
            if sid in self.latest and self.latest[sid].pts >= s.pts:
                return
            self.latest[sid] = self.pool.ref(s)  # leak: the older surface of this stream is overwritten, its reference stays

    def render(self, sid, size=(90, 160)):
        with self.mu:
            s = self.latest.get(sid)
            if s is None:
                return None
            self.pool.ref(s)  # clean: taken under the lock, dropped in the finally below
        try:
            return s.nv12[: size[0] * 4 : 4, : size[1] * 4 : 4].cpu().numpy()
        finally:
            self.pool.unref(s)

    def bookmark(self, sid, s):
        self.hold[sid].append(self.pool.ref(s))  # leak: close() of a stream drops the list of bookmarks without walking it

    def close(self, sid):
        with self.mu:
            s = self.latest.pop(sid, None)
        if s is not None:
            self.pool.unref(s)
        self.hold.pop(sid, None)


class Batch:
    def __init__(self, pool):
        self.pool = pool
        self.items = []

    def add(self, sid, s):
        self.items.append((sid, s))

    def tensor(self):
        ys = [s.nv12[:1080:4, ::4].float().div_(255) for _, s in self.items]
        return torch.stack(ys)

    def done(self, _result=None):
        for _, s in self.items:
            self.pool.unref(s)
        self.items = []


class Assembler(threading.Thread):
    def __init__(self, inbox, pool, model, sink, thumbs, streams, size=8, wait=0.04):
        super().__init__(name="assembler", daemon=True)
        self.live = streams
        self.inbox, self.pool, self.model, self.sink, self.thumbs = inbox, pool, model, sink, thumbs
        self.size, self.wait = size, wait

    def run(self):
        batch = Batch(self.pool)
        while self.live:
            try:
                sid, s = self.inbox.get(timeout=self.wait)
            except queue.Empty:
                self.flush(batch)
                continue
            if s is STOP:
                self.thumbs.close(sid)
                self.live -= 1
                continue
            self.thumbs.offer(sid, s)
            batch.add(sid, s)
            if len(batch.items) >= self.size:
                self.flush(batch)
        self.flush(batch)

    def flush(self, batch):
        if not batch.items:
            return
        out = self.model(batch.tensor())
        for (sid, s), row in zip(batch.items, out):
            self.sink(sid, s.pts, row)
        batch.done()


def still(pool, hw, pkt):
    with pool.lent() as s:  # clean: with
        hw.decode_into(pkt, s.nv12)
        return s.nv12[:1080].cpu()


def cross_fade(pool, hw, a, b, alpha):
    sa = pool.get()  # leak: the second get() may be Starved, which goes up to the caller with the first surface out
    sb = pool.get()  # clean: both are given back in the finally
    try:
        hw.decode_into(a, sa.nv12)
        hw.decode_into(b, sb.nv12)
        return torch.lerp(sa.nv12.float(), sb.nv12.float(), alpha).byte()
    finally:
        pool.unref(sa)
        pool.unref(sb)


def scrub(pool, hw, packets, step):
    """Every step-th frame, for the scrubbing bar. The caller gives back what it receives."""
    for pkt in itertools.islice(packets, 0, None, step):
        s = pool.get(timeout=2.0)  # clean: yielded, the consumer gives it back
        hw.decode_into(pkt, s.nv12)
        s.pts = pkt.pts
        yield s


def contact_sheet(pool, hw, packets, cols=5, rows=4):
    tiles = []
    for s in scrub(pool, hw, packets, 25):  # leak: the frame at hand when the sheet is full is not given back before the break
        if len(tiles) == cols * rows:
            break
        tiles.append(s.nv12[:1080:8, ::8].cpu().numpy())
        pool.unref(s)
    while len(tiles) < cols * rows:
        tiles.append(np.zeros_like(tiles[0]))
    return np.vstack([np.hstack(tiles[r * cols:(r + 1) * cols]) for r in range(rows)])


def longest_gap(pool, hw, packets):
    """Largest mean difference between neighbours; holds two surfaces at a time."""
    prev, best = None, 0.0
    try:
        for s in scrub(pool, hw, packets, 1):  # clean: near miss, each becomes prev, which is given back when replaced and in the finally
            if prev is not None:
                d = (s.nv12.float() - prev.nv12.float()).abs().mean().item()
                best = max(best, d)
                pool.unref(prev)
            prev = s
    finally:
        if prev is not None:
            pool.unref(prev)
    return best
