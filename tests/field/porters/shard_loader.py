"""Reading sharded checkpoints into a running engine."""
from __future__ import annotations

import collections
import contextlib
import json
import mmap
import os


class ShardHandle:
    def __init__(self, path, raw, view, header):
        self.path = path
        self.raw = raw
        self.view = view
        self.header = header

    def tensor(self, name):
        start, end = self.header[name]["data_offsets"]
        return self.view[start:end]


class HandlePool:
    """Limits how many shards are mapped at a time."""

    def __init__(self, limit):
        self.limit = limit
        self.live = set()

    def open(self, path):
        if len(self.live) >= self.limit:
            raise OSError("too many mapped shards")
        raw = os.open(path, os.O_RDONLY)  # clean: the handle carries it, close ends it
        view = mmap.mmap(raw, 0, prot=mmap.PROT_READ)  # clean: the handle carries it, close ends it
        size = int.from_bytes(view[:8], "little")
        handle = ShardHandle(path, raw, view, json.loads(view[8:8 + size]))
        self.live.add(handle)
        return handle

    def close(self, handle):
        self.live.remove(handle)
        handle.view.close()
        os.close(handle.raw)


class ShardedCheckpoint:
    def __init__(self, pool, index_path):
        self.pool = pool
        self.root = os.path.dirname(index_path)
        with open(index_path) as fh:  # clean: closed by the with
            self.shard_of = json.load(fh)["weight_map"]
        self.handles = {}

    def tensor(self, name):
        shard = self.shard_of[name]
        if shard not in self.handles:
            self.handles[shard] = self.pool.open(os.path.join(self.root, shard))  # clean: near miss, only for a missing key, close ends all
        return self.handles[shard].tensor(name)

    def close(self):
        for handle in self.handles.values():
            self.pool.close(handle)
        self.handles.clear()


class SequentialReader:
    def __init__(self, pool, paths):
        self.pool = pool
        self.paths = paths
        self.handle = None

    def tensors(self):
        for path in self.paths:
            self.handle = self.pool.open(path)  # leak: each further shard replaces the field, close ends the last only
            for name in self.handle.header:
                if name != "__metadata__":
                    yield name, self.handle.tensor(name)

    def close(self):
        if self.handle is not None:
            self.pool.close(self.handle)
            self.handle = None


class ResumableReader:
    def __init__(self, pool, paths):
        self.pool = pool
        self.paths = collections.deque(paths)
        self.handle = None

    def advance(self):
        self.close()
        if not self.paths:
            return False
        self.handle = self.pool.open(self.paths.popleft())  # clean: near miss, close has ended the earlier one first
        return True

    def close(self):
        if self.handle is not None:
            self.pool.close(self.handle)
            self.handle = None


class LazyStateDict:
    def __init__(self, pool):
        self.pool = pool
        self.thunks = {}

    def add_shard(self, path):
        handle = self.pool.open(path)  # leak: only the thunks know the handle, unload drops them
        for name in handle.header:
            self.thunks[name] = lambda name=name: handle.tensor(name)

    def __getitem__(self, name):
        return self.thunks[name]()

    def unload(self):
        self.thunks.clear()


class MappedLru:
    def __init__(self, pool, keep):
        self.pool = pool
        self.keep = keep
        self.recent = collections.OrderedDict()

    def get(self, path):
        handle = self.recent.pop(path, None)
        if handle is None:
            handle = self.pool.open(path)  # clean: near miss, popped and put in again at the end, eviction closes
        self.recent[path] = handle
        while len(self.recent) > self.keep:
            _, oldest = self.recent.popitem(last=False)
            self.pool.close(oldest)
        return handle


class MatchingShards:
    def __init__(self, pool, wanted_dtype):
        self.pool = pool
        self.wanted_dtype = wanted_dtype
        self.matching = []

    def scan(self, paths):
        for path in paths:
            handle = self.pool.open(path)  # leak: a shard of another dtype is skipped while open
            meta = handle.header.get("__metadata__", {})
            if meta.get("dtype") != self.wanted_dtype:
                continue
            self.matching.append(handle)
        return len(self.matching)

    def close(self):
        while self.matching:
            self.pool.close(self.matching.pop())


class VersionWatcher:
    """Polled by the reload thread."""

    def __init__(self, pool, directory):
        self.pool = pool
        self.directory = directory
        self.version = None
        self.handle = None

    def poll(self):
        newest = max(os.listdir(self.directory), default=None)
        if newest is None or newest == self.version:
            return False
        self.handle = self.pool.open(os.path.join(self.directory, newest))  # leak: the next version replaces the handle of the one before
        self.version = newest
        return True

    def close(self):
        if self.handle is not None:
            self.pool.close(self.handle)


class MergedReader:
    def __init__(self, pool, paths):
        with contextlib.ExitStack() as stack:
            self.parts = []
            for path in paths:
                part = pool.open(path)  # clean: near miss, registered on the stack that close unwinds
                stack.callback(pool.close, part)
                self.parts.append(part)
            self.stack = stack.pop_all()

    def close(self):
        self.stack.close()


class ReadLog:
    def __init__(self, path, max_lines):
        self.path = path
        self.max_lines = max_lines
        self.lines = 0
        self.fh = open(path, "a")  # leak: rotate opens the next file over it

    def write(self, line):
        self.fh.write(line + "\n")
        self.lines += 1
        if self.lines >= self.max_lines:
            self.rotate()

    def rotate(self):
        self.fh.flush()
        os.replace(self.path, self.path + ".1")
        self.fh = open(self.path, "a")  # leak: the next rotation opens over it
        self.lines = 0

    def close(self):
        self.fh.close()
