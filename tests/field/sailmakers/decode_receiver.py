# Decode side of P/D disaggregation: preallocation, transfer polling, admission to the running batch.
import collections
import enum
import logging
import time

import numpy as np

log = logging.getLogger(__name__)


class Poll(enum.IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    SUCCESS = 4


class PageBitmap:
    """Contiguity does not matter to the attention kernel, so first fit on a bitmap is fine."""

    def __init__(self, npages):
        self.used = np.zeros(npages, dtype=bool)

    def grab(self, n):
        idx = np.flatnonzero(~self.used)[:n]
        if len(idx) < n:
            return None
        self.used[idx] = True
        return idx

    def drop(self, idx):
        self.used[idx] = False

    def headroom(self):
        return int((~self.used).sum())


class RowTable:
    def __init__(self, size):
        self._free = collections.deque(range(size))
        self.owner = [None] * size

    def seat(self, req):
        if not self._free:
            return -1
        row = self._free.popleft()  # clean: returned, owner recorded
        self.owner[row] = req.rid
        return row

    def unseat(self, row):
        self.owner[row] = None
        self._free.append(row)


class MetadataSlots:
    """Small fixed records that the prefill writes first token, logprobs and hidden states into."""

    def __init__(self, n):
        self._ids = set(range(n))
        self.buf = np.zeros((n, 64), dtype=np.float32)

    def claim(self):
        return self._ids.pop() if self._ids else None  # clean: returned to the caller

    def unclaim(self, i):
        self._ids.add(i)


class DecodeRequest:
    def __init__(self, req, receiver):
        self.req = req
        self.receiver = receiver
        self.row = -1
        self.pages = None
        self.meta = None
        self.started = 0.0


class PreallocQueue:
    def __init__(self, pages, rows, meta, page_size, reserve):
        self.pages, self.rows, self.meta = pages, rows, meta
        self.page_size = page_size
        self.reserve = reserve
        self.queue = []
        self.retracted = []

    def add(self, req, receiver):
        self.queue.append(DecodeRequest(req, receiver))

    def pop_preallocated(self):
        ready, rest = [], []
        for dr in self.queue:
            if dr.receiver.poll() != Poll.WAITING:
                rest.append(dr)
                continue
            need = -(-len(dr.req.input_ids) // self.page_size)
            if self.pages.headroom() - need < self.reserve:
                rest.append(dr)
                continue
            row = self.rows.seat(dr.req)  # clean: unseated when the rest is short, else kept in dr.row
            if row < 0:
                rest.append(dr)
                continue
            meta = self.meta.claim()  # leak: not unclaimed when no pages are left
            if meta is None:
                self.rows.unseat(row)
                rest.append(dr)
                continue
            pages = self.pages.grab(need)  # clean: kept in dr.pages, dropped by TransferQueue
            if pages is None:
                self.rows.unseat(row)
                rest.append(dr)
                continue
            dr.row, dr.meta, dr.pages = row, meta, pages
            dr.started = time.monotonic()
            dr.receiver.init(pages.tolist(), meta)
            ready.append(dr)
        self.queue = rest
        return ready

    def resume_retracted(self):
        back = []
        while self.retracted:
            req = self.retracted[0]
            pages = self.pages.grab(req.num_pages)  # leak: dropped when there is no row to seat the request
            if pages is None:
                break
            row = self.rows.seat(req)  # clean: near miss, -1 means nothing was taken, else kept in req.row
            if row < 0:
                break
            self.retracted.pop(0)
            req.pages, req.row = pages, row
            back.append(req)
        return back


class TransferQueue:
    def __init__(self, prealloc, timeout=30.0):
        self.prealloc = prealloc
        self.timeout = timeout
        self.waiting = []

    def extend(self, drs):
        self.waiting.extend(drs)

    def _discard(self, dr):
        p = self.prealloc
        p.pages.drop(dr.pages)
        p.rows.unseat(dr.row)
        p.meta.unclaim(dr.meta)

    def pop_transferred(self):
        done, keep = [], []
        for dr in self.waiting:
            state = dr.receiver.poll()
            if state == Poll.FAILED or time.monotonic() - dr.started > self.timeout:
                self._discard(dr)
                dr.req.set_error("kv transfer failed")
                continue
            if state != Poll.SUCCESS:
                keep.append(dr)
                continue
            dr.req.first_token = int(self.prealloc.meta.buf[dr.meta][0])
            self.prealloc.meta.unclaim(dr.meta)
            dr.req.pages, dr.req.row = dr.pages, dr.row
            done.append(dr.req)
        self.waiting = keep
        return done


class DecodeLoop:
    def __init__(self, prealloc, transfer, runner, max_running):
        self.prealloc, self.transfer, self.runner = prealloc, transfer, runner
        self.max_running = max_running
        self.running = {}
        self.backlog = collections.deque()

    def step(self):
        self.transfer.extend(self.prealloc.pop_preallocated())
        self.backlog.extend(self.transfer.pop_transferred())
        self.backlog.extend(self.prealloc.resume_retracted())
        while self.backlog and len(self.running) < self.max_running:
            req = self.backlog.popleft()
            self.running[req.rid] = req
        for req in list(self.running.values()):
            if not self._grow(req):
                self._retract(req)
        if not self.running:
            return
        for rid, tok in self.runner.decode(list(self.running.values())).items():
            req = self.running[rid]
            req.append(tok)
            if req.finished():
                self._release(self.running.pop(rid))

    def _grow(self, req):
        if len(req) % self.prealloc.page_size:
            return True
        page = self.prealloc.pages.grab(1)  # clean: concatenated into req.pages
        if page is None:
            return False
        req.pages = np.concatenate([req.pages, page])
        return True

    def _release(self, req):
        self.prealloc.pages.drop(req.pages)
        self.prealloc.rows.unseat(req.row)

    def _retract(self, req):
        del self.running[req.rid]
        req.num_pages = len(req.pages)
        self._release(req)
        self.prealloc.retracted.append(req)

    def abort(self, rid):
        req = self.running.pop(rid, None)
        if req is not None:
            self._release(req)
            return True
        for req in self.backlog:
            if req.rid == rid:
                self._release(req)
                self.backlog.remove(req)
                return True
        return False

    def migrate(self, rid, peer):
        """Moves one running request to another decode instance and keeps a fresh row in case it is bounced."""
        req = self.running.get(rid)
        if req is None:
            return False
        spare = self.prealloc.rows.seat(req)  # leak: the early return on an accepted migration skips unseat
        if spare < 0:
            return False
        if peer.offer(req, req.pages):
            self._release(self.running.pop(rid))
            return True
        self.prealloc.rows.unseat(spare)
        return False

    def replay(self, reqs):
        held = []
        for req in reqs:
            pages = self.prealloc.pages.grab(req.num_pages)  # leak: a short replay returns with held still taken
            if pages is None:
                log.warning("replay needs %d more pages", req.num_pages)
                return None
            held.append(pages)
        outs = [self.runner.replay(r, p) for r, p in zip(reqs, held)]
        for p in held:
            self.prealloc.pages.drop(p)
        return outs

    def shutdown(self):
        for rid in list(self.running):
            self.abort(rid)
        while self.backlog:
            self._release(self.backlog.popleft())
        for dr in self.transfer.waiting:
            self.transfer._discard(dr)
        self.transfer.waiting = []
