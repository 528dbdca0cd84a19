"""Cache of vision and audio encoder outputs for a multimodal engine.

Rows of one big embedding buffer are handed out as extents.  An extent belongs to an entry of the
cache, entries are pinned by the requests that still have to read them.
"""
import collections
import heapq
import logging
import threading
import typing as t

import torch

_log = logging.getLogger("engine.mm")

Extent = t.Tuple[int, ...]


class CacheFull(Exception):
    pass


class BadMedia(Exception):
    pass


class RowPool:
    def __init__(self, rows):
        self._heap = list(range(rows))
        heapq.heapify(self._heap)
        self.low_water = rows

    def __len__(self):
        return len(self._heap)

    def grab(self, n) -> t.Optional[Extent]:
        if n > len(self._heap):
            return None
        rows = tuple(heapq.heappop(self._heap) for _ in range(n))  # clean: near miss, the length was looked at before the first pop
        self.low_water = min(self.low_water, len(self._heap))
        return rows

    def grab_run(self, n) -> t.Optional[Extent]:
        """n consecutive rows, for kernels that cannot gather."""
        aside, run = [], []
        while self._heap and len(run) < n:
            row = heapq.heappop(self._heap)  # leak: rows of runs that were too short go to aside, a run that ends the heap is dropped
            if run and row != run[-1] + 1:
                aside.extend(run)
                run = []
            run.append(row)
        for row in aside:
            heapq.heappush(self._heap, row)
        return tuple(run) if len(run) == n else None

    def give(self, rows):
        for r in rows:
            heapq.heappush(self._heap, r)


class Entry:
    __slots__ = ("key", "rows", "pins", "ready")

    def __init__(self, key, rows):
        self.key = key
        self.rows = rows
        self.pins = 0
        self.ready = False


class EncoderCache:
    def __init__(self, buffer: torch.Tensor):
        self.buffer = buffer
        self.rows = RowPool(buffer.shape[0])
        self.entries: "collections.OrderedDict[str, Entry]" = collections.OrderedDict()
        self.lock = threading.RLock()

    # pins

    def pin(self, key) -> t.Optional[Entry]:
        with self.lock:
            e = self.entries.get(key)
            if e is None or not e.ready:
                return None
            e.pins += 1
            self.entries.move_to_end(key)
            return e

    def unpin(self, e):
        with self.lock:
            e.pins -= 1
            assert e.pins >= 0

    # rows

    def _shrink(self, n):
        for key in [k for k, e in self.entries.items() if not e.pins and e.ready]:
            if len(self.rows) >= n:
                return
            self.rows.give(self.entries.pop(key).rows)

    def allocate(self, key, n) -> Entry:
        with self.lock:
            self._shrink(n)
            rows = self.rows.grab(n)  # leak: two requests with the same picture allocate it twice, the entry of the first is overwritten
            if rows is None:
                raise CacheFull(f"{n} rows for {key}")
            e = self.entries[key] = Entry(key, rows)
            return e

    def discard(self, key):
        with self.lock:
            e = self.entries.pop(key, None)
            if e is not None:
                self.rows.give(e.rows)

    def replace(self, key, embedding):
        """The picture was resized, its embedding has another length now."""
        with self.lock:
            e = self.entries.get(key)
            if e is None or e.pins or not e.ready:
                return False
            rows = self.rows.grab(len(embedding))  # clean: near miss, they become the rows of the entry, the old ones are given
            if rows is None:
                return False
            self.buffer[list(rows)] = embedding
            old, e.rows = e.rows, rows
            self.rows.give(old)
            return True

    def defragment(self, key):
        with self.lock:
            e = self.entries.get(key)
            if e is None or e.pins or not e.ready:
                return False
            run = self.rows.grab_run(len(e.rows))  # clean: it becomes the rows of the entry
            if run is None:
                return False
            self.buffer[list(run)] = self.buffer[list(e.rows)]
            self.rows.give(e.rows)
            e.rows = run
            return True


class MediaRequest:
    def __init__(self, rid, items):
        self.rid = rid
        self.items = items
        self.pinned: t.List[Entry] = []
        self.prefix: t.Optional[Entry] = None
        self.cancelled = False
        self.finished = False

    def close(self, cache):
        for e in self.pinned:
            cache.unpin(e)
        self.pinned = []
        self.prefix = None


class Encoder:
    def __init__(self, cache, models, max_rows_per_step=4096):
        self.cache = cache
        self.models = models
        self.max_rows_per_step = max_rows_per_step
        self.stats = collections.Counter()

    def _run(self, entry, item):
        model = self.models[item.modality]
        try:
            out = model(item.data)
        except (ValueError, OSError) as exc:
            raise BadMedia(f"{item.key}: {exc}") from exc
        self.cache.buffer[list(entry.rows)] = out.to(self.cache.buffer.dtype)
        entry.ready = True

    def ensure(self, item):
        """Encodes an item unless it is cached and pins it."""
        e = self.cache.pin(item.key)  # clean: a wrapper, None is replaced below and the pin goes to the caller
        if e is None:
            e = self.cache.allocate(item.key, item.num_rows)  # leak: after BadMedia the entry is never ready, so neither shrunk nor discarded
            self._run(e, item)
            self.stats["encoded"] += 1
            e.pins += 1
        else:
            self.stats["hits"] += 1
        return e

    def prepare(self, req):
        """Pins all media of a request.  False when the request has to wait."""
        for item in req.items:
            try:
                e = self.ensure(item)  # clean: near miss, listed by the request before the next one, close() unpins
            except CacheFull:
                req.close(self.cache)
                return False
            req.pinned.append(e)
        return True

    def prepare_prefix(self, req, item):
        entry = self.ensure(item)  # leak: kept in req.prefix, close() of the request sets it to None and unpins only the list
        req.prefix = entry
        return entry.rows

    def encode_ahead(self, items):
        """Fills the cache while the device has nothing better to do."""
        budget = self.max_rows_per_step
        done = 0
        for item in items:
            try:
                e = self.ensure(item)  # leak: the item that goes over the budget breaks out of the loop with its pin
            except CacheFull:
                return done
            budget -= len(e.rows)
            if budget < 0:
                break
            self.cache.unpin(e)
            done += 1
        return done

    def gather(self, req, out):
        pos = 0
        for item in req.items:
            e = self.cache.pin(item.key)  # clean: unpinned at the end of the turn, nothing was pinned when it is None
            if e is None:
                continue
            n = len(e.rows)
            out[pos : pos + n] = self.cache.buffer[list(e.rows)]
            pos += n
            self.cache.unpin(e)
        return pos

    def stitch(self, items):
        """One tensor of several frames of a video, through a temporary extent."""
        total = sum(i.num_rows for i in items)
        rows = self.cache.rows.grab(total)  # clean: given in finally when it is not None
        try:
            if rows is None:
                return None
            pos = 0
            for item in items:
                out = self.models["video"](item.data)
                self.cache.buffer[list(rows[pos : pos + len(out)])] = out
                pos += len(out)
            return self.cache.buffer[list(rows)].clone()
        finally:
            if rows is not None:
                self.cache.rows.give(rows)


def run_step(encoder, waiting, running):
    for req in list(waiting):
        if req.cancelled:
            waiting.remove(req)
            continue
        try:
            if not encoder.prepare(req):
                break
        except BadMedia as exc:
            _log.warning("request %s: %s", req.rid, exc)
            req.close(encoder.cache)
            waiting.remove(req)
            continue
        waiting.remove(req)
        running.append(req)
    for req in list(running):
        if req.cancelled or req.finished:
            req.close(encoder.cache)
            running.remove(req)
