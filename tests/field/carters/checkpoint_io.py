"""Reading and writing adapter checkpoints: header + raw tensors, optionally sharded."""
from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from typing import BinaryIO, Iterator, Optional, TextIO

MAGIC = b"ADPT"


class BadCheckpoint(ValueError):
    pass


def write_checkpoint(path: str, tensors: dict[str, bytes]) -> None:
    header: dict[str, list[int]] = {}
    pos = 0
    for name, raw in tensors.items():
        header[name] = [pos, len(raw)]
        pos += len(raw)
    blob = json.dumps(header).encode()
    tmp = path + ".tmp"
    with open(tmp, "wb") as f:  # clean: with
        f.write(MAGIC + struct.pack("<I", len(blob)) + blob)
        for raw in tensors.values():
            f.write(raw)
    os.replace(tmp, path)


def read_header(f: BinaryIO) -> dict[str, list[int]]:
    if f.read(4) != MAGIC:
        raise BadCheckpoint("magic")
    (n,) = struct.unpack("<I", f.read(4))
    return json.loads(f.read(n))


def is_checkpoint(path: str) -> bool:
    return open(path, "rb").read(4) == MAGIC  # leak: the handle is never closed


def tensor_names(path: str) -> list[str]:
    f = open(path, "rb")  # leak: BadCheckpoint is survived here and close is skipped
    try:
        names = list(read_header(f))
    except BadCheckpoint:
        return []
    f.close()
    return names


def tensor_sizes(path: str) -> dict[str, int]:
    f = open(path, "rb")  # clean: near miss, the handler returns and finally closes
    try:
        return {name: size for name, (_, size) in read_header(f).items()}
    except BadCheckpoint:
        return {}
    finally:
        f.close()


def open_tensor(path: str, name: str) -> Optional[BinaryIO]:
    """File positioned at the tensor; the caller closes it."""
    f = open(path, "rb")  # clean: near miss, closed when the tensor is missing, else returned
    header = read_header(f)
    if name not in header:
        f.close()
        return None
    f.seek(header[name][0], os.SEEK_CUR)
    return f


def head_of(path: str, name: str, n: int) -> bytes:
    f = open_tensor(path, name)  # leak: read and dropped
    if f is None:
        return b""
    return f.read(n)


def sum_of(path: str, name: str, n: int) -> int:
    f = open_tensor(path, name)  # clean: leaves through the with
    if f is None:
        return 0
    with f:
        return sum(f.read(n))


class CheckpointReader:
    """Keeps the file open and mapped until close."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: Optional[BinaryIO] = open(path, "rb")  # clean: closed by close
        self._header = read_header(self._file)
        self._base = self._file.tell()
        self._map: Optional[mmap.mmap] = None

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            assert self._file is not None
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)  # clean: made once, close closes
        return self._map

    def get(self, name: str) -> Optional[bytes]:
        where = self._header.get(name)
        if where is None:
            return None
        start = self._base + where[0]
        return self._mapped()[start : start + where[1]]  # clean: near miss, the reader keeps the map

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RollingWriter:
    """Step metrics in files of bounded length."""

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.part = 0
        self.lines = 0
        self._out: Optional[TextIO] = None

    def _roll(self) -> None:
        path = os.path.join(self.folder, f"metrics-{self.part:03d}.jsonl")
        self._out = open(path, "w")  # leak: the next roll overwrites the field without closing
        self.part += 1
        self.lines = 0

    def log(self, step: int, **values: float) -> None:
        if self._out is None or self.lines >= self.limit:
            self._roll()
        assert self._out is not None
        self._out.write(json.dumps({"step": step, **values}) + "\n")
        self.lines += 1

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None


class ShardSet:
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self._open: dict[str, BinaryIO] = {}

    def handle(self, path: str) -> BinaryIO:
        f = self._open.get(path)
        if f is None:
            f = self._open[path] = open(path, "rb")  # clean: near miss, opened once per path and closed from the table
        f.seek(0)
        return f

    def find(self, name: str) -> Optional[str]:
        for path in self.paths:
            if name in read_header(self.handle(path)):  # clean: near miss, the table keeps the handle
                return path
        return None

    def close(self) -> None:
        while self._open:
            _, f = self._open.popitem()
            f.close()


def merge_shards(paths: list[str], out_path: str) -> int:
    merged: dict[str, bytes] = {}
    for path in paths:
        f = open(path, "rb")  # leak: a shard with an empty header continues without close
        header = read_header(f)
        if not header:
            continue
        base = f.tell()
        for name, (start, size) in header.items():
            f.seek(base + start)
            merged[name] = f.read(size)
        f.close()
    write_checkpoint(out_path, merged)
    return len(merged)


def copy_if_newer(src: str, dst: str) -> bool:
    fin = open(src, "rb")  # leak: an up-to-date target returns before the close
    if os.path.exists(dst) and os.path.getmtime(dst) >= os.path.getmtime(src):
        return False
    with open(dst, "wb") as fout:  # clean: with
        fout.write(fin.read())
    fin.close()
    return True


def iter_lines(path: str, skip_blank: bool = True) -> Iterator[str]:
    f = open(path)  # clean: near miss, finally in the generator
    try:
        for line in f:
            if skip_blank and not line.strip():
                continue
            yield line.rstrip("\n")
    finally:
        f.close()


def dump_names(path: str, out: Optional[TextIO] = None) -> int:
    own = out is None
    if own:
        out = open(path + ".names", "w")  # clean: near miss, closed under the flag that opened it
    assert out is not None
    names = list(tensor_sizes(path))
    out.write("\n".join(names))
    if own:
        out.close()
    return len(names)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.bin")
        write_checkpoint(path, {"lora_A": b"\x01" * 8, "lora_B": b"\x02" * 4})
        with CheckpointReader(path) as r:  # clean: with
            assert r.get("lora_B") == b"\x02" * 4
        print(tensor_sizes(path), sum_of(path, "lora_A", 8), dump_names(path))
        shards = ShardSet([path])
        shards.find("lora_B")
        shards.close()
        print(list(iter_lines(path + ".names")))


if __name__ == "__main__":
    main()
