"""Buffer pool of a database: frames with pin counts and a clock hand."""


class Frame:
    __slots__ = ("page", "pins", "ref", "dirty", "data")

    def __init__(self):
        self.page, self.pins, self.ref, self.dirty, self.data = None, 0, False, False, None


class BufferPool:
    def __init__(self, n, disk):
        self.frames = [Frame() for _ in range(n)]
        self.where = {}
        self.hand = 0
        self.disk = disk

    def _victim(self):
        while True:
            frame = self.frames[self.hand]
            self.hand = (self.hand + 1) % len(self.frames)
            if frame.pins == 0 and not frame.ref:
                if frame.dirty:
                    self.disk.write(frame.page, frame.data)
                self.where.pop(frame.page, None)
                return frame
            frame.ref = False

    def fetch_page(self, page):
        frame = self.where.get(page)
        if frame is None:
            frame = self._victim()
            frame.page, frame.data, frame.dirty = page, self.disk.read(page), False
            self.where[page] = frame
        frame.pins += 1
        frame.ref = True
        return frame

    def unpin_page(self, page, dirty=False):
        frame = self.where[page]
        frame.pins -= 1
        frame.dirty = frame.dirty or dirty


def lookup(pool, root, key):
    page = root
    while True:
        frame = pool.fetch_page(page)  # leak: the leaf returns pinned
        if frame.data.is_leaf:
            return frame.data.get(key)
        child = frame.data.child(key)
        pool.unpin_page(page)
        page = child


def update(pool, page, key, value):
    frame = pool.fetch_page(page)  # clean: unpinned at the end
    frame.data.set(key, value)
    pool.unpin_page(page, dirty=True)


def scan(pool, pages, want):
    for page in pages:
        frame = pool.fetch_page(page)  # leak: skipped pages stay pinned
        if not frame.data.may_hold(want):
            continue
        yield from frame.data.rows(want)
        pool.unpin_page(page)
