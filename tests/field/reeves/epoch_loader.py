"""Training data loader: shard readers, pinned batch slots and a shuffle window."""
import random
import threading
from collections import deque, namedtuple

Sample = namedtuple("Sample", "key length slot")


class SlotStore:
    """Numbered host slots. None when all are out."""

    def __init__(self, n):
        self._mutex = threading.Lock()
        self._free = set(range(n))

    def acquire_slot(self):
        with self._mutex:  # clean: the with statement releases the lock
            return self._free.pop() if self._free else None

    def release_slot(self, slot):
        with self._mutex:  # clean: the with statement releases the lock
            self._free.add(slot)


class ShardCursor:
    def __init__(self, path):
        self.path = path
        self.fh = open(path, "rb")  # clean: near miss, close() closes it and the loader closes every cursor
        self.index_fh = open(path + ".idx", "rb")  # leak: close() closes the data file only
        self.sizes = [int(x) for x in self.index_fh.read().split()]
        self.at = 0

    def read(self):
        if self.at == len(self.sizes):
            return None
        data = self.fh.read(self.sizes[self.at])
        self.at += 1
        return data

    def close(self):
        self.fh.close()


class ShuffleWindow:
    def __init__(self, store: SlotStore, capacity: int, seed: int):
        self.store = store
        self.capacity = capacity
        self.rng = random.Random(seed)
        self.window: list[Sample] = []
        self.ready: deque[Sample] = deque()
        self.held_back: dict[str, Sample] = {}

    def add(self, key, data, copy_in):
        slot = self.store.acquire_slot()  # leak: reset() clears window and ready without releasing the slots
        if slot is None:
            return False
        copy_in(slot, data)
        self.window.append(Sample(key, len(data), slot))
        if len(self.window) > self.capacity:
            i = self.rng.randrange(len(self.window))
            self.ready.append(self.window.pop(i))
        return True

    def hold_back(self, key, data, copy_in):
        """Long samples wait for the end of the epoch."""
        if key in self.held_back:
            return True
        slot = self.store.acquire_slot()  # clean: near miss, reset() and release_held() both release each
        if slot is None:
            return False
        copy_in(slot, data)
        self.held_back[key] = Sample(key, len(data), slot)
        return True

    def batches(self, size):
        while len(self.ready) >= size:
            batch = [self.ready.popleft() for _ in range(size)]
            yield batch
            for sample in batch:
                self.store.release_slot(sample.slot)

    def release_held(self):
        for _, _, slot in self.held_back.values():
            self.store.release_slot(slot)
        self.held_back.clear()

    def reset(self, seed):
        self.rng.seed(seed)
        self.window.clear()
        self.ready = deque()
        self.release_held()


class EvalSet:
    """Fixed evaluation samples; the selection is replaced every few thousand steps."""

    def __init__(self, store: SlotStore):
        self.store = store
        self.chosen = ()
        self.extra = None

    def select(self, items, copy_in):
        picked = []
        for key, data in items:
            if (slot := self.store.acquire_slot()) is None:  # leak: the next select replaces the tuple
                break
            copy_in(slot, data)
            picked.append(Sample(key, len(data), slot))
        self.chosen = tuple(picked)
        return len(picked)

    def set_extra(self, key, data, copy_in):
        previous = self.extra
        slot = self.store.acquire_slot()  # clean: near miss, previous one released, the last by finish
        if slot is None:
            return False
        copy_in(slot, data)
        self.extra = Sample(key, len(data), slot)
        if previous is not None:
            self.store.release_slot(previous.slot)
        return True

    def finish(self):
        for sample in self.chosen:
            self.store.release_slot(sample.slot)
        if self.extra is not None:
            self.store.release_slot(self.extra.slot)
        self.chosen, self.extra = (), None


class Loader:
    def __init__(self, paths, window: ShuffleWindow):
        self.cursors = {p: ShardCursor(p) for p in paths}  # clean: near miss, retire and stop close each
        self.window = window

    def reopen(self, path):
        if (old := self.cursors.get(path)) is not None:
            old.close()
        self.cursors[path] = ShardCursor(path)  # clean: near miss, the old cursor of the path is closed first

    def retire(self, path):
        self.cursors.pop(path).close()

    def fill(self, copy_in):
        for path in list(self.cursors):
            data = self.cursors[path].read()
            if data is None:
                self.retire(path)
                continue
            if not self.window.add(path, data, copy_in):
                return False
        return bool(self.cursors)

    def stop(self):
        for cursor in self.cursors.values():
            cursor.close()
        self.cursors.clear()
