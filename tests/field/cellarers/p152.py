"""Mapped windows over a large data file; windows not in use are kept for a while."""
import mmap
import os


class Window:
    def __init__(self, base, mem):
        self.base = base
        self.mem = mem
        self.users = 0


class WindowMap:
    SIZE = 1 << 20

    def __init__(self, path, keep=8):
        self.fd = os.open(path, os.O_RDWR)
        self.keep = keep
        self.windows = {}

    def map_at(self, offset):
        base = offset - offset % self.SIZE
        win = self.windows.get(base)
        if win is None:
            self._trim()
            win = self.windows[base] = Window(base, mmap.mmap(self.fd, self.SIZE, offset=base))
        win.users += 1
        return win

    def unmap(self, win):
        win.users -= 1
        self._trim()

    def _trim(self):
        idle = [w for w in self.windows.values() if w.users == 0]
        for win in idle[:max(0, len(idle) - self.keep)]:
            del self.windows[win.base]
            win.mem.close()


def read_u32(maps, offset):
    win = maps.map_at(offset)  # clean: unmapped in finally
    try:
        at = offset - win.base
        return int.from_bytes(win.mem[at:at + 4], "little")
    finally:
        maps.unmap(win)


def find_magic(maps, offsets, magic):
    for offset in offsets:
        win = maps.map_at(offset)  # leak: the match is returned with its window mapped
        if win.mem.find(magic) >= 0:
            return offset
        maps.unmap(win)
    return None


def patch(maps, offset, data):
    win = maps.map_at(offset)  # leak: a patch across the end returns with the window mapped
    at = offset - win.base
    if at + len(data) > maps.SIZE:
        return False
    win.mem[at:at + len(data)] = data
    maps.unmap(win)
    return True


def window_for(maps, block):
    return maps.map_at(block * 4096)  # clean: handed to the caller
