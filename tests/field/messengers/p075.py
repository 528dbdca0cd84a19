"""Byte-range views of a shared ring for a log shipper."""


class RingStore:
    def __init__(self, size):
        self.ring = bytearray(size)
        self.head = 0
        self.readers = 0

    def open_view(self, start, length):
        self.readers += 1
        return memoryview(self.ring)[start:start + length]

    def close_view(self, view):
        view.release()
        self.readers -= 1

    def can_resize(self):
        return self.readers == 0


def collect(store, ranges, out):
    """Fills the list that the caller gave."""
    for start, length in ranges:
        out.append(store.open_view(start, length))  # clean: the caller's list holds it


def newest(store, length):
    start = max(store.head - length, 0)
    return store.open_view(start, store.head - start)  # clean: handed to the caller


class Shipper:
    def __init__(self, store, upstream):
        self.store = store
        self.upstream = upstream
        self.shipped = 0

    def ship(self, ranges):
        views = []
        collect(self.store, ranges, views)  # clean: each is closed after the send
        for view in views:
            self.upstream.send(view)
            self.shipped += len(view)
            self.store.close_view(view)

    def digest(self, ranges):
        views = []
        collect(self.store, ranges, views)  # leak: joined to bytes, the views stay open
        return hash(b"".join(views))

    def tail(self, length):
        view = newest(self.store, length)  # clean: copied, then closed
        text = bytes(view).decode("utf-8", "replace")
        self.store.close_view(view)
        return text

    def tail_lines(self, length):
        view = newest(self.store, length)  # leak: the memory is released, the reader is not counted down
        lines = bytes(view).split(b"\n")
        view.release()
        return lines

    def grow(self, size):
        if not self.store.can_resize():
            return False
        self.store.ring.extend(bytes(size))
        return True

    def preview(self, start):
        view = self.store.open_view(start, 64)  # clean: closed in finally
        try:
            if not any(view):
                return ""
            return view.tobytes().hex()
        finally:
            self.store.close_view(view)
