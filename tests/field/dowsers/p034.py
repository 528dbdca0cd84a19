"""Windows of a memory-mapped checkpoint, each kept by a count of its users."""
from dataclasses import dataclass


@dataclass
class Window:
    offset: int
    view: memoryview
    users: int = 0


class MappedCheckpoint:
    PAGE = 1 << 21

    def __init__(self, mm):
        self._mm = mm
        self._windows = {}

    def map_region(self, offset):
        base = offset - offset % self.PAGE
        win = self._windows.get(base)
        if win is None:
            win = Window(base, memoryview(self._mm)[base:base + self.PAGE])
            self._windows[base] = win
        win.users += 1
        return win

    def unmap_region(self, win):
        win.users -= 1
        if win.users == 0:
            win.view.release()
            del self._windows[win.offset]


class TensorReader:
    def __init__(self, ckpt: MappedCheckpoint, index):
        self.ckpt = ckpt
        self.index = index
        self.open_windows = []

    def read(self, name):
        off, n = self.index[name]
        win = self.ckpt.map_region(off)  # clean: unmapped in finally
        try:
            return bytes(win.view[off - win.offset:off - win.offset + n])
        finally:
            self.ckpt.unmap_region(win)

    def header(self):
        win = self.ckpt.map_region(0)  # leak: a bad magic returns with the window mapped
        if win.view[:4] != b"CKPT":
            return None
        head = bytes(win.view[4:64])
        self.ckpt.unmap_region(win)
        return head

    def prefault(self, names):
        for name in names:
            self.ckpt.map_region(self.index[name][0])  # leak: result dropped, never unmapped
        return len(names)

    def keep(self, name):
        self.open_windows.append(self.ckpt.map_region(self.index[name][0]))  # clean: let_go() unmaps it

    def let_go(self):
        while self.open_windows:
            self.ckpt.unmap_region(self.open_windows.pop())
