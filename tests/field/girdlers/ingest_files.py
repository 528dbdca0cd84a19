"""Nightly ingestion of partner files: block buffers, temporary files, checksums and the final move."""
import gzip
import hashlib
import json
import os
import threading
from pathlib import Path

BLOCK = 256 * 1024


class BufferStock:
    """A stock of equally sized bytearrays. lend() gives one out, take_back() wants it again."""

    def __init__(self, count, size=BLOCK):
        self.size = size
        self._shelf = [bytearray(size) for _ in range(count)]
        self._out = 0
        self._cv = threading.Condition()

    def lend(self):
        with self._cv:
            self._cv.wait_for(lambda: self._shelf)
            self._out += 1
            return self._shelf.pop()

    def lend_or_none(self):
        with self._cv:
            if not self._shelf:
                return None
            self._out += 1
            return self._shelf.pop()

    def take_back(self, buf):
        with self._cv:
            self._shelf.append(buf)
            self._out -= 1
            self._cv.notify()


class ScratchDir:
    """Hands out numbered temporary file names below one directory."""

    def __init__(self, root):
        self.root = Path(root)
        self.names = set()
        self.counter = 0

    def claim_name(self, stem):
        self.counter += 1
        name = self.root / f"{stem}.{self.counter:06d}.part"
        self.names.add(name)
        return name

    def drop_name(self, name):
        self.names.discard(name)
        if name.exists():
            name.unlink()

    def keep_as(self, name, target):
        """The scratch file becomes the target; the name is free again."""
        os.replace(name, target)
        self.names.discard(name)


def same_content(stock, left_path, right_path):
    left = stock.lend()  # leak: unequal lengths of a block return before take_back
    right = stock.lend()  # leak: lost together with left on the return for unequal lengths
    with open(left_path, "rb") as a, open(right_path, "rb") as b:  # clean: with closes both
        equal = True
        while equal:
            n = a.readinto(left)
            m = b.readinto(right)
            if n != m:
                return False
            if n == 0:
                break
            equal = left[:n] == right[:m]
    stock.take_back(left)
    stock.take_back(right)
    return equal


def read_manifest(path):
    handle = open(path, encoding="utf-8")  # leak: a manifest of an unknown version returns without close
    data = json.load(handle)
    if data.get("version", 0) > 3:
        print("manifest", path, "is too new:", data["version"])
        return {}
    handle.close()
    return {entry["name"]: entry["sha256"] for entry in data["files"]}


def open_source(path):
    """A binary reader of the file, unpacked when it is compressed. The caller closes it."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # clean: handed to the caller
    return open(path, "rb")  # clean: handed to the caller


def first_line(path):
    source = open_source(path)  # leak: the reader is dropped after its first line
    line = source.readline()
    return line.decode("utf-8", "replace").rstrip()


def sniff_delimiter(path):
    with open_source(path) as source:  # clean: near miss, the reader is a context manager itself
        line = source.readline().decode("utf-8", "replace")
    best = max(",;\t|", key=line.count)
    return best if best in line else ","


class PartFile:
    """A scratch file being written, with the block buffer that collects small writes."""

    def __init__(self, stock, scratch, stem):
        self.stock = stock
        self.scratch = scratch
        self.name = scratch.claim_name(stem)  # clean: commit keeps it, abort drops it
        self.file = open(self.name, "wb")  # clean: commit and abort both close it
        self.buf = stock.lend()  # clean: near miss, given back by _finish from commit and abort
        self.fill = 0
        self.total = 0

    def write(self, data):
        for start in range(0, len(data), 4096):
            piece = data[start:start + 4096]
            if self.fill + len(piece) > len(self.buf):
                self.flush()
            self.buf[self.fill:self.fill + len(piece)] = piece
            self.fill += len(piece)
        self.total += len(data)

    def flush(self):
        self.file.write(memoryview(self.buf)[:self.fill])
        self.fill = 0

    def _finish(self):
        self.file.close()
        self.stock.take_back(self.buf)
        self.buf = None

    def commit(self, target):
        self.flush()
        self._finish()
        self.scratch.keep_as(self.name, target)
        return self.total

    def abort(self):
        self._finish()
        self.scratch.drop_name(self.name)


class SplitWriter:
    """Splits rows by key into one file each; close() ends them all."""

    def __init__(self, folder, stock):
        self.folder = Path(folder)
        self.stock = stock
        self.outputs = {}
        self.spill = stock.lend()  # leak: close() ends the files but never takes the spill buffer back
        self.rows = 0

    def write(self, key, row):
        out = self.outputs.get(key)
        if out is None:
            out = open(self.folder / f"{key}.csv", "ab")  # clean: kept in outputs, closed by close
            self.outputs[key] = out
        size = len(row)
        self.spill[:size] = row
        out.write(memoryview(self.spill)[:size])
        self.rows += 1

    def close(self):
        for out in self.outputs.values():
            out.close()
        self.outputs.clear()
        return self.rows


def filter_rows(scratch, path, keep, target):
    part = scratch.claim_name(path.stem)  # leak: with no row kept the name stays claimed
    kept = 0
    with open_source(path) as source, open(part, "wb") as out:  # clean: with closes both
        for row in source:
            if keep(row):
                out.write(row)
                kept += 1
    if kept:
        scratch.keep_as(part, target)
    return kept


def concat(stock, paths, target, progress=None):
    buf = stock.lend_or_none()  # clean: near miss, both uses are guarded by the same None check
    small = bytearray(8192)
    work = buf if buf is not None else small
    done = 0
    with open(target, "wb") as out:  # clean: with closes it
        for path in paths:
            source = open(path, "rb")  # clean: closed in every round
            while True:
                n = source.readinto(work)
                if not n:
                    break
                out.write(memoryview(work)[:n])
            source.close()
            done += 1
            if progress is not None:
                progress(done, len(paths))
    if buf is not None:
        stock.take_back(buf)
    return done


def tail(stock, path, size):
    buf = stock.lend_or_none()  # leak: given back only when the file was larger than the tail
    if buf is None:
        return b""
    with open(path, "rb") as handle:  # clean: with closes it
        handle.seek(0, os.SEEK_END)
        length = handle.tell()
        handle.seek(max(0, length - size))
        n = handle.readinto(buf)
    data = bytes(buf[:n])
    if length > size:
        cut = data.find(b"\n") + 1
        stock.take_back(buf)
        return data[cut:]
    return data


def ingest(stock, scratch, folder, inbox):
    manifest = read_manifest(inbox / "manifest.json")
    accepted = []
    for name, wanted in sorted(manifest.items()):
        path = inbox / name
        if not path.exists():
            continue
        part = PartFile(stock, scratch, path.stem)  # clean: committed or aborted below
        digest = hashlib.sha256()
        with open_source(path) as source:  # clean: with closes it
            for chunk in iter(lambda: source.read(65536), b""):
                digest.update(chunk)
                part.write(chunk)
        if digest.hexdigest() != wanted:
            part.abort()
            continue
        part.commit(Path(folder) / name)
        accepted.append(name)
    return accepted
