"""Quantised KV cache rows addressed by slots of an integer bitmap."""

import contextlib
import threading

import torch


class SlotMap:
    """Bit i of the mask is set while slot i is free."""

    def __init__(self, n):
        self.n = n
        self._mask = (1 << n) - 1
        self._mutex = threading.Lock()

    def grab(self):
        with self._mutex:
            if self._mask == 0:
                return -1
            low = self._mask & -self._mask
            self._mask ^= low
            return low.bit_length() - 1

    def grab_run(self, count):
        """First slot of `count` adjacent free ones, or -1."""
        want = (1 << count) - 1
        with self._mutex:
            for start in range(self.n - count + 1):
                if (self._mask >> start) & want == want:
                    self._mask &= ~(want << start)
                    return start
        return -1

    def drop(self, slot, count=1):
        with self._mutex:
            self._mask |= ((1 << count) - 1) << slot

    def free_count(self):
        return bin(self._mask).count("1")


class QuantRow:
    def __init__(self, slot, scale):
        self.slot = slot
        self.scale = scale


class QuantCache:
    """int8 rows with one scale each; rows are keyed by (layer, position)."""

    def __init__(self, rows, width):
        self.slots = SlotMap(rows)
        self.store = torch.zeros(rows, width, dtype=torch.int8)
        self.index = {}
        self.hot = {}
        self.pending = []

    def put(self, key, vec):
        if key in self.index:
            self.evict(key)
        slot = self.slots.grab()  # clean: kept in the index, which evict() empties
        if slot < 0:
            return False
        scale = float(vec.abs().max()) / 127.0 or 1.0
        self.store[slot].copy_((vec / scale).round())
        self.index[key] = QuantRow(slot, scale)
        return True

    def put_if_finite(self, key, vec):
        if key in self.index:
            return False
        slot = self.slots.grab()  # leak: not dropped when the vector is not finite
        if slot < 0:
            return False
        peak = vec.abs().max()
        if not torch.isfinite(peak):
            return False
        scale = float(peak) / 127.0 or 1.0
        self.store[slot].copy_((vec / scale).round())
        self.index[key] = QuantRow(slot, scale)
        return True

    def overwrite(self, key, vec):
        slot = self.slots.grab()  # clean: near miss, the row it takes the place of is dropped
        if slot < 0:
            return False
        scale = float(vec.abs().max()) / 127.0 or 1.0
        self.store[slot].copy_((vec / scale).round())
        previous = self.index.get(key)
        self.index[key] = QuantRow(slot, scale)
        if previous is not None:
            self.slots.drop(previous.slot)
        return True

    def refresh(self, key, vec):
        slot = self.slots.grab()  # leak: a row refreshed twice loses the slot the first refresh stored
        if slot < 0:
            return False
        scale = float(vec.abs().max()) / 127.0 or 1.0
        self.store[slot].copy_((vec / scale).round())
        self.hot[key] = QuantRow(slot, scale)
        return True

    def get(self, key):
        row = self.hot.get(key) or self.index.get(key)
        if row is None:
            return None
        return self.store[row.slot].float() * row.scale

    def evict(self, key):
        row = self.index.pop(key, None)
        if row is not None:
            self.slots.drop(row.slot)

    def clear(self):
        for key in list(self.index):
            self.evict(key)
        while self.hot:
            self.slots.drop(self.hot.popitem()[1].slot)

    def put_pair(self, layer, pos, k, v):
        ks = self.slots.grab()  # leak: not dropped when there is no slot for v
        if ks < 0:
            return False
        vs = self.slots.grab()  # clean: kept in the index
        if vs < 0:
            return False
        for kind, slot, vec in (("k", ks, k), ("v", vs, v)):
            self.evict((layer, pos, kind))
            scale = float(vec.abs().max()) / 127.0 or 1.0
            self.store[slot].copy_((vec / scale).round())
            self.index[(layer, pos, kind)] = QuantRow(slot, scale)
        return True

    # -- deferred writes ----------------------------------------------------

    def stage(self, key, vec):
        slot = self.slots.grab()  # clean: moved into pending, which flush() and discard() empty
        if slot < 0:
            self.flush()
            return False
        self.store[slot].copy_(vec.clamp(-127, 127))
        self.pending.append((key, slot))
        return True

    def flush(self):
        while self.pending:
            key, slot = self.pending.pop()
            self.evict(key)
            self.index[key] = QuantRow(slot, 1.0)

    def discard(self):
        for _, slot in self.pending:
            self.slots.drop(slot)
        self.pending = []


@contextlib.contextmanager
def scratch_rows(cache, count):
    base = cache.slots.grab_run(count)  # clean: dropped in finally
    if base < 0:
        raise MemoryError(f"no run of {count} rows")
    try:
        yield cache.store[base:base + count]
    finally:
        cache.slots.drop(base, count)


@contextlib.contextmanager
def scratch_row(cache):
    slot = cache.slots.grab()  # leak: no finally, a body that raises skips the drop
    if slot < 0:
        raise MemoryError("no free row")
    yield cache.store[slot]
    cache.slots.drop(slot)


def dot_int8(cache, q, rows):
    total = []
    with scratch_rows(cache, len(rows)) as tmp:  # clean: with block
        for i, r in enumerate(rows):
            tmp[i].copy_(r)
        total = (tmp.int() * q.int()).sum(-1).tolist()
    return total


def compact(cache):
    """Move rows to the lowest slots; returns how many moved."""
    moved = 0
    for key, row in sorted(cache.index.items(), key=lambda kv: -kv[1].slot):
        low = cache.slots.grab()  # clean: near miss, dropped again when it is not lower, else the old slot is
        if low < 0:
            break
        if low >= row.slot:
            cache.slots.drop(low)
            continue
        cache.store[low].copy_(cache.store[row.slot])
        cache.slots.drop(row.slot)
        row.slot = low
        moved += 1
    return moved


def requantise(cache, keys, bits):
    limit = 2 ** (bits - 1) - 1
    for key in keys:
        spare = cache.slots.grab()  # leak: a key that is not cached goes on to the next with spare held
        if spare < 0:
            return False
        vec = cache.get(key)
        if vec is None:
            continue
        scale = float(vec.abs().max()) / limit or 1.0
        cache.store[spare].copy_((vec / scale).round())
        cache.evict(key)
        cache.index[key] = QuantRow(spare, scale)
    return True


def import_rows(cache, items):
    """All the rows or none of them."""
    taken = {}
    for key, vec in items:
        slot = cache.slots.grab()  # clean: near miss, all of taken is dropped when one is missing
        if slot < 0:
            for s in taken.values():
                cache.slots.drop(s)
            return False
        if key in taken:
            cache.slots.drop(taken[key])
        taken[key] = slot
        cache.store[slot].copy_(vec.clamp(-127, 127))
    for key, slot in taken.items():
        cache.evict(key)
        cache.index[key] = QuantRow(slot, 1.0)
    return True


def slot_for_probe(cache):
    slot = cache.slots.grab()  # clean: returned to the caller
    return slot


def probe(cache):
    """How long a round trip through one row takes, in elements read."""
    slot = slot_for_probe(cache)  # clean: dropped before the return
    if slot < 0:
        return 0
    n = cache.store[slot].numel()
    cache.slots.drop(slot)
    return n


def is_full(cache):
    return slot_for_probe(cache) < 0  # leak: the slot that was found free is compared and dropped
