"""LoRA adapters: device slots, leases, and the batch-side bookkeeping."""
import collections
import threading
import warnings

import torch


class NoSlot(Exception): ...
class BadAdapter(Exception): ...


class Slots:
    def __init__(self, n, rank, hidden, device="cuda"):
        self.a = torch.zeros(n, rank, hidden, device=device)
        self.b = torch.zeros(n, hidden, rank, device=device)
        self.rank = rank
        self._free = set(range(n))

    def grab(self):
        if not self._free: raise NoSlot
        return self._free.pop()  # clean: handed out

    def drop(self, i):
        self.a[i].zero_(); self.b[i].zero_()
        self._free.add(i)

    def fill(self, i, a, b):
        if a.shape[0] > self.rank:
            raise BadAdapter(f"rank {a.shape[0]} > {self.rank}")
        self.a[i, : a.shape[0]].copy_(a)
        self.b[i, :, : b.shape[1]].copy_(b)


class HostRing:
    """Cells of host memory that hold adapters about to be loaded."""
    def __init__(self, n): self._cells = [None] * n; self._used = [False] * n

    def cell(self):
        for i, used in enumerate(self._used):
            if not used:
                self._used[i] = True
                return i
        return -1

    def uncell(self, i):
        self._used[i] = False
        self._cells[i] = None

    def __setitem__(self, i, v): self._cells[i] = v
    def __getitem__(self, i): return self._cells[i]


class Loaded:
    def __init__(self, name, slot, cell=-1):
        self.name, self.slot, self.cell = name, slot, cell
        self.users = 0

    def close(self, slots, ring):
        slots.drop(self.slot)


class Lease:
    def __init__(self, table, loaded):
        self.table, self.loaded = table, loaded
        self._open = True

    @property
    def slot(self): return self.loaded.slot

    def end(self):
        if self._open:
            self._open = False
            self.table._unuse(self.loaded)

    def __enter__(self): return self
    def __exit__(self, *exc): self.end()


class AdapterTable:
    def __init__(self, slots, ring, store):
        self.slots, self.ring, self.store = slots, ring, store
        self.byname = collections.OrderedDict()
        self.lock = threading.RLock()

    def lease(self, name):
        with self.lock:
            got = self.byname.get(name)
            if got is None:
                got = self._load(name)
            self.byname.move_to_end(name)
            got.users += 1
            return Lease(self, got)

    def _unuse(self, loaded):
        with self.lock:
            loaded.users -= 1

    def _load(self, name):
        cell = self.ring.cell()  # leak: Loaded.close() gives the slot back but not the cell
        if cell < 0:
            raise NoSlot("host ring")
        try:
            self.ring[cell] = self.store.read(name)
            slot = self._slot()  # leak: the handler of BadAdapter frees the cell and forgets the slot
            self.slots.fill(slot, *self.ring[cell])
        except (NoSlot, BadAdapter):
            self.ring.uncell(cell)
            raise
        got = self.byname[name] = Loaded(name, slot, cell)
        return got

    def _slot(self):
        try:
            return self.slots.grab()  # clean: returned
        except NoSlot:
            self._evict()
        return self.slots.grab()  # clean: returned, after room was made

    def _evict(self):
        for name, got in self.byname.items():
            if got.users == 0:
                del self.byname[name]
                got.close(self.slots, self.ring)
                return
        raise NoSlot("all in use")

    def unload(self, name):
        with self.lock:
            got = self.byname.get(name)
            if got is None or got.users: return False
            del self.byname[name]
            got.close(self.slots, self.ring)
            return True

    def merge(self, name, parts, weights):
        """A weighted sum of adapters in a slot of its own."""
        with self.lock:
            leases = []
            try:
                for p in parts:
                    leases.append(self.lease(p))  # clean: near miss, a failure half way ends those that are in the list
                slot = self._slot()  # clean: near miss, moves into Loaded, whose close() drops it
                self.slots.a[slot].copy_(sum(w * self.slots.a[l.slot] for w, l in zip(weights, leases)))
                self.slots.b[slot].copy_(sum(w * self.slots.b[l.slot] for w, l in zip(weights, leases)))
                old = self.byname.pop(name, None)
                if old: old.close(self.slots, self.ring)
                self.byname[name] = Loaded(name, slot)
            finally:
                for l in leases: l.end()


class Row:
    def __init__(self, rid, adapter, tokens):
        self.rid, self.adapter, self.tokens = rid, adapter, tokens
        self.lease = None
        self.dead = False


class Batch:
    def __init__(self, table, size):
        self.table, self.size = table, size
        self.rows = {}
        self.todo = collections.deque()

    def put(self, row): self.todo.append(row)

    def fill(self):
        skipped = []
        while self.todo and len(self.rows) < self.size:
            row = self.todo.popleft()
            if row.adapter:
                try:
                    row.lease = self.table.lease(row.adapter)  # clean: near miss, lives in the row and ends in retire, also for rows that are dead
                except NoSlot:
                    skipped.append(row)
                    continue
                except BadAdapter as e:
                    warnings.warn(str(e))
                    continue
            self.rows[row.rid] = row
        self.todo.extendleft(reversed(skipped))

    def indices(self):
        return torch.tensor([r.lease.slot if r.lease else -1 for r in self.rows.values()])

    def retire(self, rid):
        row = self.rows.pop(rid)
        if row.lease is not None:
            row.lease.end()
            row.lease = None

    def sweep(self):
        for rid in [r.rid for r in self.rows.values() if r.dead]:
            self.retire(rid)

    def swap_adapter(self, rid, name):
        """Goes on with another adapter from the next token on."""
        row = self.rows[rid]
        new = self.table.lease(name)  # clean: near miss, the old lease is ended before the rebinding
        if row.lease is not None:
            row.lease.end()
        row.lease = new

    def split(self, rid, new_rid):
        """Two continuations of one row."""
        src = self.rows[rid]
        twin = Row(new_rid, src.adapter, list(src.tokens))
        if src.lease is not None:
            twin.lease = self.table.lease(src.adapter)  # leak: without room the twin goes to todo, where fill() rebinds its lease
        if len(self.rows) < self.size:
            self.rows[new_rid] = twin
        else:
            self.todo.append(twin)
        return twin


def delta(table, name, x):
    with table.lease(name) as l:  # clean: ends with the block
        return x @ table.slots.a[l.slot].T @ table.slots.b[l.slot].T


def norms(table, names):
    out = {}
    for n in names:
        l = table.lease(n)  # leak: a norm of zero continues before end()
        v = float(table.slots.a[l.slot].norm() * table.slots.b[l.slot].norm())
        if not v:
            continue
        out[n] = v
        l.end()
    return out


def preload(table, names):
    """Holds all of them at once so that none evicts another, then lets go."""
    held = []
    for n in names:
        try:
            held.append(table.lease(n))  # leak: NoSlot returns False with the earlier leases in hand
        except NoSlot:
            return False
        except BadAdapter:
            names = [m for m in names if m != n]
    for l in held: l.end()
    return True
