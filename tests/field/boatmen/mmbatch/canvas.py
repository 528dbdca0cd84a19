"""Canvases: preallocated tile stacks that images are decoded into."""
import threading

import numpy as np


class CanvasTimeout(Exception):
    pass


class TooManyTiles(ValueError):
    pass


class Canvas(object):
    def __init__(self, number, cfg):
        self.number = number
        self.tiles = np.zeros((cfg.max_tiles, cfg.tile, cfg.tile, 3), np.uint8)
        self.n = 0
        self.refs = 0
        self.rack = None

    def incref(self):
        self.refs += 1
        return self

    def decref(self):
        self.refs -= 1
        if self.refs == 0 and self.rack is not None:
            self.rack._return(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.decref()

    def place(self, i, pixels):
        if i >= len(self.tiles):
            raise TooManyTiles(i)
        h, w = pixels.shape[:2]
        self.tiles[i, :h, :w] = pixels
        self.n = max(self.n, i + 1)


class Rack(object):
    def __init__(self, cfg):
        self.cfg = cfg
        self.cond = threading.Condition()
        self.hanging = [Canvas(i, cfg) for i in range(cfg.canvases)]

    def fetch(self, timeout=2.0):
        """A canvas with one reference. Raises CanvasTimeout."""
        with self.cond:
            if not self.cond.wait_for(lambda: self.hanging, timeout):
                raise CanvasTimeout(timeout)
            canvas = self.hanging.pop()  # clean: with one reference to the caller
        canvas.refs = 1
        canvas.rack = self
        canvas.n = 0
        return canvas

    def _return(self, canvas):
        with self.cond:
            self.hanging.append(canvas)
            self.cond.notify()

    def retire(self, n):
        """Shrinks the rack while the load is low."""
        gone = 0
        with self.cond:
            while gone < n and len(self.hanging) > 1:
                canvas = self.hanging.pop()  # clean: it is meant to go and is counted out of the rack
                canvas.tiles = None
                gone += 1
        return gone
