import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .canvas import CanvasTimeout, Rack, TooManyTiles
from .fetcher import FetchError, Fetcher

logger = logging.getLogger(__name__)


class Item(object):
    def __init__(self, rid, source):
        self.rid = rid
        self.source = source
        self.canvas = None
        self.error = None

    def settle(self, canvas=None, error=None):
        self.canvas, self.error = canvas, error
        return self

    def close(self):
        if self.canvas is not None:
            self.canvas.decref()
            self.canvas = None


class Pipeline(object):
    def __init__(self, cfg, decode, encoder):
        self.cfg = cfg
        self.decode = decode
        self.encoder = encoder
        self.rack = Rack(cfg)
        self.fetcher = Fetcher(cfg)
        self.pool = ThreadPoolExecutor(cfg.workers)
        self.memo = {}
        self.memo_lock = threading.Lock()

    def prepare(self, item):
        """Runs in a worker; the outcome is in the item in any case."""
        known = self.memo_get(item.source)  # clean: near miss, moves into the item, whose close() counts down
        if known is not None:
            return item.settle(canvas=known)
        try:
            body = self.fetcher.get(item.source)
            canvas = self.rack.fetch()  # leak: TooManyTiles is handled by settling with the error and without the canvas
            for i, pixels in enumerate(self.decode(body, self.cfg.tile)):
                canvas.place(i, pixels)
        except (FetchError, CanvasTimeout, TooManyTiles) as exc:
            logger.info("%s: %r", item.rid, exc)
            return item.settle(error=exc)
        self.memo_put(item.source, canvas)
        return item.settle(canvas=canvas)

    def memo_get(self, source):
        with self.memo_lock:
            canvas = self.memo.get(source)
            return canvas.incref() if canvas is not None else None  # clean: the caller has the reference

    def memo_put(self, source, canvas):
        with self.memo_lock:
            old = self.memo.get(source)
            self.memo[source] = canvas.incref()  # clean: near miss, the entry before it is counted down, the last by memo_clear
        if old is not None:
            old.decref()

    def memo_clear(self):
        with self.memo_lock:
            canvases, self.memo = list(self.memo.values()), {}
        for canvas in canvases:
            canvas.decref()

    def run(self, items):
        """Encodes a batch. Items with errors are left out of it."""
        ready = list(self.pool.map(self.prepare, items))
        good = [it for it in ready if it.error is None]
        try:
            if not good:
                return {}
            feats = self.encoder(np.concatenate([it.canvas.tiles[: it.canvas.n] for it in good]))
            out, at = {}, 0
            for it in good:
                out[it.rid] = feats[at : at + it.canvas.n]
                at += it.canvas.n
            return out
        finally:
            for it in good:
                it.close()

    def grid(self, sources):
        """Pastes the first tiles of known images side by side, for debugging."""
        with self.rack.fetch() as sheet:  # clean: counted down at the end of the with
            for i, source in enumerate(sources):
                canvas = self.memo_get(source)  # leak: an image without tiles continues ahead of decref
                if canvas is None:
                    continue
                if canvas.n == 0:
                    continue
                sheet.place(i % self.cfg.max_tiles, canvas.tiles[0])
                canvas.decref()
            return sheet.tiles[: sheet.n].copy()

    def blank(self, rid):
        """An item that stands for a missing image."""
        try:
            canvas = self.rack.fetch(timeout=0.1)  # clean: in the item that is returned
        except CanvasTimeout:
            return None
        canvas.tiles[0] = 127
        canvas.n = 1
        return Item(rid, "").settle(canvas=canvas)

    def calibrate(self, rounds):
        """Encodes a blank image a number of times; a rack that is empty ends it."""
        item = None
        for i in range(rounds):
            item = self.blank(str(i))  # leak: only the item of the last round is closed
            if item is None:
                return i
            self.encoder(item.canvas.tiles[:1])
        if item is not None:
            item.close()
        return rounds

    def close(self):
        self.pool.shutdown()
        self.memo_clear()
        self.fetcher.close()
