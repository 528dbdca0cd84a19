from collections import OrderedDict


class FrameHandle:
    def __init__(self, pool, index):
        self._pool = pool
        self.index = index
        self.data = memoryview(pool.memory)[index * 64:(index + 1) * 64]

    def close(self):
        self._pool.vacant.append(self.index)


class FramePool:
    def __init__(self, count):
        self.memory = bytearray(count * 64)
        self.vacant = list(range(count))

    def open_frame(self):
        return FrameHandle(self, self.vacant.pop(0))


class PageCache:
    """LRU of pages read from a file, with a second table for dirty pages."""

    def __init__(self, pool, path, capacity):
        self.pool = pool
        self.path = path
        self.capacity = capacity
        self.pages = OrderedDict()
        self.dirty = {}

    def read(self, number):
        frame = self.pages.get(number)
        if frame is not None:
            self.pages.move_to_end(number)
            return bytes(frame.data)
        frame = self.pool.open_frame()  # leak: the eviction below drops the oldest without close
        with open(self.path, "rb") as fh:
            fh.seek(number * 64)
            chunk = fh.read(64)
        frame.data[: len(chunk)] = chunk
        self.pages[number] = frame
        while len(self.pages) > self.capacity:
            self.pages.popitem(last=False)
        return chunk

    def write(self, number, payload):
        frame = self.dirty.get(number)
        if frame is None:
            frame = self.pool.open_frame()  # clean: sync closes every dirty frame
            self.dirty[number] = frame
        frame.data[: len(payload)] = payload

    def sync(self):
        count = 0
        with open(self.path, "r+b") as fh:
            for number, frame in sorted(self.dirty.items()):
                fh.seek(number * 64)
                fh.write(frame.data)
                frame.close()
                count += 1
        self.dirty = {}
        return count

    def checksum(self, number):
        frame = self.pool.open_frame()  # clean: closed below
        with open(self.path, "rb") as fh:
            fh.seek(number * 64)
            frame.data[:] = fh.read(64).ljust(64, b"\0")
        total = sum(frame.data)
        frame.close()
        return total

    def close(self):
        self.sync()
        for frame in self.pages.values():
            frame.close()
        self.pages.clear()
