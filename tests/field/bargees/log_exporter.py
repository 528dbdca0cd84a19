"""Writes per-tenant usage logs; keeps a bounded number of files open."""
import json
import os
import time
from collections import OrderedDict


class HandleCache:
    """Least recently used handles go first."""

    def __init__(self, root, limit):
        self.root = root
        self.limit = limit
        self._open = OrderedDict()

    def _path(self, tenant):
        return os.path.join(self.root, f"{tenant}.jsonl")

    def write(self, tenant, row):
        handle = self._open.get(tenant)
        if handle is None:
            if len(self._open) >= self.limit:
                _, old = self._open.popitem(last=False)
                old.flush()
            handle = open(self._path(tenant), "a")  # leak: the entry popped as oldest is flushed, not closed
            self._open[tenant] = handle
        self._open.move_to_end(tenant)
        handle.write(json.dumps(row) + "\n")

    def close(self):
        while self._open:
            _, handle = self._open.popitem()
            handle.close()


class AuditCache(HandleCache):
    def __init__(self, root, limit):
        super().__init__(root, limit)
        self._since = {}

    def write(self, tenant, row):
        handle = self._open.get(tenant)
        if handle is None:
            while len(self._open) >= self.limit:
                evicted, old = self._open.popitem(last=False)
                self._since.pop(evicted, None)
                old.flush()
                os.fsync(old.fileno())
                old.close()
            handle = open(self._path(tenant), "a")  # clean: near miss, evicted handles are synced and closed
            self._open[tenant] = handle
            self._since[tenant] = time.time()
        self._open.move_to_end(tenant)
        row["audited"] = True
        handle.write(json.dumps(row) + "\n")


class Rotator:
    """Hourly files: the current and the one before stay open for late rows."""

    def __init__(self, root):
        self.root = root
        self.files = {}
        self.indexes = {}

    def _name(self, hour, suffix):
        return os.path.join(self.root, f"{hour}.{suffix}")

    def append(self, hour, row):
        if hour not in self.files:
            self.files[hour] = open(self._name(hour, "log"), "a")  # leak: rotate filters old hours out
            self.indexes[hour] = open(self._name(hour, "idx"), "a")  # clean: near miss, rotate closes them
        self.indexes[hour].write(f"{self.files[hour].tell()}\n")
        self.files[hour].write(json.dumps(row) + "\n")

    def rotate(self, hour):
        self.files = {h: f for h, f in self.files.items() if h >= hour - 1}
        for h in [h for h in self.indexes if h < hour - 1]:
            self.indexes.pop(h).close()

    def close(self):
        for f in (*self.files.values(), *self.indexes.values()):
            f.close()
        self.files.clear()
        self.indexes.clear()


class Shipper:
    """Uploads closed segments; a segment is a (path, handle) pair in the order of closing."""

    def __init__(self, client, batch):
        self.client = client
        self.batch = batch
        self.pending = []
        self.urgent = []

    def add(self, path):
        self.pending.append((path, open(path, "rb")))  # leak: refused ones of a batch are dropped

    def ship(self):
        now, self.pending = self.pending[: self.batch], self.pending[self.batch:]
        sent = 0
        for path, handle in now:
            if not self.client.offer(path, os.path.getsize(path)):
                continue
            self.client.upload(path, handle)
            handle.close()
            sent += 1
        return sent

    def add_urgent(self, path):
        self.urgent.append((path, open(path, "rb")))  # clean: near miss, refused segments return to the list

    def ship_urgent(self):
        now, self.urgent = self.urgent[: self.batch], self.urgent[self.batch:]
        for path, handle in now:
            if not self.client.offer(path, os.path.getsize(path)):
                self.urgent.append((path, handle))
                continue
            self.client.upload(path, handle)
            handle.close()
        return len(now)

    def abandon(self):
        for _, handle in self.pending + self.urgent:
            handle.close()
        self.pending, self.urgent = [], []


def merge(paths, target):
    sources = [open(p) for p in paths]  # clean: near miss, closed when it leaves the list
    rows = 0
    with open(target, "w") as out:  # clean: with closes it
        while sources:
            alive = []
            for source in sources:
                line = source.readline()
                if line:
                    out.write(line)
                    rows += 1
                    alive.append(source)
                else:
                    source.close()
            sources = alive
    return rows


def newest_rows(paths):
    heads = {p: open(p) for p in paths}  # leak: only the newest is taken out and closed
    newest = max(heads, key=os.path.getmtime)
    handle = heads.pop(newest)
    rows = [json.loads(line) for line in handle]
    handle.close()
    return newest, rows
