from typing import Optional

import torch

from .arena import Arena, CountingArena


class Workspace:
    """Wrapper of the arena which speaks in shapes."""

    def __init__(self, arena: Arena):
        self.arena = arena

    def get_ws(self, *shape) -> Optional["WsTensor"]:
        h = self.arena.malloc(int(torch.Size(shape).numel()))  # clean: wrapped and given to the caller
        if h is None:
            return None
        return WsTensor(h, self.arena.ptr(h).view(*shape))

    def put_ws(self, w: "WsTensor"):
        self.arena.mfree(w.handle)

    def get_ws_aligned(self, *shape, align=64) -> Optional["WsTensor"]:
        n = int(torch.Size(shape).numel())
        h = self.arena.malloc(n + align)  # leak: a misaligned block is refused and not freed
        if h is None:
            return None
        t = self.arena.ptr(h)
        if t.data_ptr() % align:
            return None
        return WsTensor(h, t[:n].view(*shape))


class WsTensor:
    __slots__ = ("handle", "t")

    def __init__(self, handle, t):
        self.handle = handle
        self.t = t


class ScopedWorkspace:
    """Wrapper of the wrapper for with statements."""

    def __init__(self, ws: Workspace, *shape):
        self.ws = ws
        self.shape = shape
        self.w = None

    def __enter__(self):
        self.w = self.ws.get_ws(*self.shape)  # clean: __exit__ puts it
        return self.w

    def __exit__(self, *exc):
        if self.w is not None:
            self.ws.put_ws(self.w)
            self.w = None
        return False


def default_workspace(numel=1 << 20) -> Workspace:
    return Workspace(CountingArena(numel))
