"""Pages with states in one array: empty, held, filled."""
import numpy as np

EMPTY, HELD, FILLED = range(3)


class PageBoard:
    def __init__(self, count):
        self.state = np.full(count, EMPTY, dtype=np.int8)

    def hold(self):
        found = np.flatnonzero(self.state == EMPTY)
        if not found.size:
            return None
        self.state[found[0]] = HELD
        return int(found[0])

    def fill(self, page):
        assert self.state[page] == HELD
        self.state[page] = FILLED

    def clear(self, page):
        self.state[page] = EMPTY


class PageReceiver:
    def __init__(self, board: PageBoard, nic):
        self.board = board
        self.nic = nic

    def receive(self, src):
        page = self.board.hold()  # clean: filled and handed to the caller, or cleared
        if page is None:
            return None
        if not self.nic.read(src, page):
            self.board.clear(page)
            return None
        self.board.fill(page)
        return page

    def receive_many(self, srcs):
        pages = []
        for src in srcs:
            page = self.board.hold()  # leak: a failed read continues with the page held
            if page is None:
                break
            if not self.nic.read(src, page):
                continue
            self.board.fill(page)
            pages.append(page)
        return pages

    def bounce(self, src, dst):
        page = self.receive(src)  # leak: a closed destination returns with the page filled
        if page is None:
            return False
        if dst.closed:
            return False
        self.nic.write(dst, page)
        self.board.clear(page)
        return True

    def loopback(self):
        page = self.board.hold()  # clean: cleared in finally
        if page is None:
            return None
        try:
            return self.nic.selftest(page)
        finally:
            self.board.clear(page)
