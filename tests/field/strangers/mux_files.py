"""Checkpoint shards and traces: plain files."""
import json
import os


def read_header(path):
    f = open(path, "rb")  # leak: a short header returns before the close
    size = f.read(8)
    if len(size) < 8:
        return None
    header = json.loads(f.read(int.from_bytes(size, "little")))
    f.close()
    return header


def read_header_safely(path):
    f = open(path, "rb")  # clean: near miss, closed in finally on both returns
    try:
        size = f.read(8)
        if len(size) < 8:
            return None
        return json.loads(f.read(int.from_bytes(size, "little")))
    finally:
        f.close()


def merge_shards(paths, target):
    out = open(target, "wb")  # clean: near miss, closed after the loop
    try:
        for path in paths:
            shard = open(path, "rb")  # clean: closed by its own with block
            with shard:
                out.write(shard.read())
    finally:
        out.close()


class TraceWriter:
    def __init__(self, folder):
        self.folder = folder
        self.index = 0
        self.file = None

    def rotate(self):
        path = os.path.join(self.folder, f"trace{self.index}.jsonl")
        self.index += 1
        self.file = open(path, "w")  # leak: the previous file is overwritten, not closed

    def write(self, event):
        if self.file is None or self.file.tell() > 1 << 20:
            self.rotate()
        self.file.write(json.dumps(event) + "\n")

    def close(self):
        if self.file is not None:
            self.file.close()
            self.file = None


def first_matching(paths, needle):
    for path in paths:
        f = open(path)  # leak: files without a match are left open
        if needle in f.read():
            f.close()
            return path
    return None
