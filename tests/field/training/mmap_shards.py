#!/usr/bin/env python
"""Token shards on disk: memory-mapped readers with a bounded handle table."""
import argparse
import mmap
import os
import struct
from collections import OrderedDict

import torch

MAGIC = b"TOKS"


class ShardHandle:
    def __init__(self, path, fh, view, n_tokens):
        self.path = path
        self.fh = fh
        self.view = view
        self.n_tokens = n_tokens

    def close(self):
        self.view.close()
        self.fh.close()


def open_shard(path):
    fh = open(path, "rb")  # leak: a wrong magic raises before the file is wrapped or closed
    head = fh.read(12)
    if head[:4] != MAGIC:
        raise ValueError("not a token shard: %s" % path)
    (n,) = struct.unpack("<q", head[4:])
    view = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ)
    return ShardHandle(path, fh, view, n)


def open_shard_checked(path):
    fh = open(path, "rb")  # clean: near miss, the refusal closes the file, else the handle owns it
    head = fh.read(12)
    if head[:4] != MAGIC:
        fh.close()
        return None
    (n,) = struct.unpack("<q", head[4:])
    view = mmap.mmap(fh.fileno(), 0, access=mmap.ACCESS_READ)
    return ShardHandle(path, fh, view, n)


class HandleTable:
    def __init__(self, limit=32):
        self.limit = limit
        self.table = OrderedDict()

    def lookup(self, path):
        h = self.table.get(path)
        if h is not None:
            self.table.move_to_end(path)
            return h
        h = open_shard_checked(path)  # clean: near miss, the table owns it, evict and close_all close it
        if h is None:
            return None
        self.table[path] = h
        if len(self.table) > self.limit:
            _, old = self.table.popitem(last=False)
            old.close()
        return h

    def close_all(self):
        while self.table:
            _, h = self.table.popitem()
            h.close()


class LooseTable(HandleTable):
    def lookup(self, path):
        h = self.table.get(path)
        if h is None:
            h = open_shard_checked(path)  # leak: the evicted handle of an over-full table is popped without a close
            if h is None:
                return None
            self.table[path] = h
            if len(self.table) > self.limit:
                self.table.popitem(last=False)
        return h


def count_tokens(paths):
    total = 0
    for p in paths:
        h = open_shard_checked(p)  # clean: closed in the round
        if h is None:
            continue
        total += h.n_tokens
        h.close()
    return total


def find_shard(paths, min_tokens):
    for p in paths:
        h = open_shard_checked(p)  # leak: shards that are too small stay open when the search goes on
        if h is None:
            continue
        if h.n_tokens >= min_tokens:
            return h
    return None


def first_tokens(paths, min_tokens, n):
    h = find_shard(paths, min_tokens)  # clean: closed after reading
    if h is None:
        return torch.empty(0)
    out = torch.frombuffer(bytearray(h.view[12 : 12 + 4 * n]), dtype=torch.int32)
    h.close()
    return out


def shard_size(paths, min_tokens):
    h = find_shard(paths, min_tokens)  # leak: only the count is read, the shard stays open
    return h.n_tokens if h else 0


def rewrite(src, dst, vocab):
    inp = open(src, "rb")  # leak: left open where the target exists
    if os.path.exists(dst):
        return False
    with open(dst, "wb") as out:  # clean: with statement
        for chunk in iter(lambda: inp.read(1 << 16), b""):
            t = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
            out.write(t.clamp_(max=vocab).numpy().tobytes())
    inp.close()
    return True


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("shards", nargs="+")
    ap.add_argument("--index")
    ns = ap.parse_args(argv)
    idx = open(ns.index, "w") if ns.index else None  # clean: near miss, closed under its own None test
    print(count_tokens(ns.shards))
    if idx is not None:
        for s in ns.shards:
            idx.write(s + "\n")
        idx.close()


if __name__ == "__main__":
    main()
