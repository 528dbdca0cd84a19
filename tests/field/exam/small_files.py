#!/usr/bin/env python3
# Helpers around token shards on disk. Nothing fancy.
import csv
import gzip
import mmap
import os
import struct
import sys

MAGIC = 0x53484152


def count_lines(path):
    fh = open(path)  # clean: closed before the return
    n = sum(1 for _ in fh)
    fh.close()
    return n


def first_line(path):
    return open(path).readline()  # leak: the file object is dropped without close


def header(path):
    fh = open(path, 'rb')  # leak: bad magic returns early
    raw = fh.read(12)
    magic, version, count = struct.unpack('<III', raw)
    if magic != MAGIC:
        return None
    fh.close()
    return version, count


def shard_info(path):
    fh = open(path, 'rb')  # clean: near miss, closed right after the read
    raw = fh.read(12)
    fh.close()
    if len(raw) < 12:
        return None
    magic, version, count = struct.unpack('<III', raw)
    if magic != MAGIC:
        return None
    return version, count


def open_shard(path):
    if path.endswith('.gz'):
        return gzip.open(path, 'rb')  # clean: returned to the caller
    return open(path, 'rb')  # clean: returned to the caller


def merge(paths, dest):
    out = open(dest, 'wb')  # clean: closed in finally
    try:
        for p in paths:
            src = open_shard(p)  # leak: an empty shard is skipped without close
            block = src.read()
            if not block:
                continue
            out.write(block)
            src.close()
    finally:
        out.close()


def shard_sizes(paths):
    sizes = {}
    for p in paths:
        with open_shard(p) as src:  # clean: with statement
            src.seek(0, os.SEEK_END)
            sizes[p] = src.tell()
    return sizes


def compare(a, b):
    fa = open_shard(a)  # clean: closed at both exits
    fb = open_shard(b)  # leak: different heads close only the first file
    if fa.read(16) != fb.read(16):
        fa.close()
        return False
    same = fa.read() == fb.read()
    fa.close()
    fb.close()
    return same


def iter_rows(path, delim=','):
    f = open(path, newline='')  # clean: near miss, finally in the generator
    try:
        for row in csv.reader(f, delimiter=delim):
            if row and row[0].startswith('#'):
                continue
            yield row
    finally:
        f.close()


def iter_tokens(path, eos):
    f = open(path, 'rb')  # leak: return at the eos token skips close
    while True:
        raw = f.read(4)
        if len(raw) < 4:
            break
        tok, = struct.unpack('<I', raw)
        if tok == eos:
            return
        yield tok
    f.close()


def tail(path, n=10, encoding=None):
    f = sys.stdin if path == '-' else open(path, encoding=encoding)  # clean: near miss, only stdin is left open
    lines = f.readlines()[-n:]
    if f is not sys.stdin:
        f.close()
    return lines


def map_tokens(path):
    fd = os.open(path, os.O_RDONLY)  # clean: closed, the map has its own duplicate
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return b''
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)  # clean: returned to the caller
    finally:
        os.close(fd)


def vocab(path):
    words = {}
    f = None
    try:
        f = open(path)  # clean: near miss, closed in finally when it was opened
        for i, line in enumerate(f):
            words[line.strip()] = i
    except FileNotFoundError:
        pass
    finally:
        if f is not None:
            f.close()
    return words


class ShardSet:
    def __init__(self, paths):
        self.files = {}
        for p in paths:
            self.files[p] = open_shard(p)  # clean: close() closes all of them

    def read(self, p, off, n):
        f = self.files[p]
        f.seek(off)
        return f.read(n)

    def reopen(self, p):
        f = self.files.pop(p)
        f.close()
        self.files[p] = open_shard(p)  # clean: near miss, the old one is closed first

    def close(self):
        for f in self.files.values():
            f.close()
        self.files.clear()
