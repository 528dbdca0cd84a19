"""Page latches: many readers or one writer."""
import threading


class LatchTable:
    def __init__(self):
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._state = {}

    def latch_shared(self, page):
        with self._changed:
            while self._state.get(page, 0) < 0:
                self._changed.wait()
            self._state[page] = self._state.get(page, 0) + 1

    def latch_exclusive(self, page):
        with self._changed:
            while self._state.get(page, 0) != 0:
                self._changed.wait()
            self._state[page] = -1

    def unlatch(self, page):
        with self._changed:
            held = self._state.pop(page)
            if held > 1:
                self._state[page] = held - 1
            self._changed.notify_all()


class BTree:
    def __init__(self, latches, nodes, root):
        self.latches = latches
        self.nodes = nodes
        self.root = root

    def lookup(self, key):
        page = self.root
        self.latches.latch_shared(page)  # leak: a key missing in the node returns with the node latched
        node = self.nodes[page]
        if key not in node:
            return None
        value = node[key]
        self.latches.unlatch(page)
        return value

    def set_value(self, page, key, value):
        self.latches.latch_exclusive(page)  # clean: unlatched in finally
        try:
            self.nodes[page][key] = value
        finally:
            self.latches.unlatch(page)

    def drop_empty(self, pages):
        removed = 0
        for page in pages:
            self.latches.latch_exclusive(page)  # leak: continue on a page that has keys
            if self.nodes[page]:
                continue
            del self.nodes[page]
            self.latches.unlatch(page)
            removed += 1
        return removed

    def count(self, page):
        self.latches.latch_shared(page)  # clean: unlatched before the return
        n = len(self.nodes[page])
        self.latches.unlatch(page)
        return n
