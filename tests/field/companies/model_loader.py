"""Sharded checkpoint loader with a bounded set of mapped files and read buffers."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Callable, Iterator

import torch


class ReadBuffers:
    def __init__(self, size: int, n: int) -> None:
        self.size = size
        self._free = [bytearray(size) for _ in range(n)]

    def get(self) -> bytearray:
        try:
            return self._free.pop()  # clean: handed to the caller
        except IndexError:
            return bytearray(self.size)

    def put(self, b: bytearray) -> None:
        self._free.append(b)


class LoadError(Exception):
    pass


class ShardLoader:
    def __init__(self, folder: Path, buffers: ReadBuffers) -> None:
        self.folder = folder
        self.buffers = buffers
        self._files: dict[str, object] = {}

    def _file(self, name: str):
        f = self._files.get(name)
        if f is None:
            f = open(self.folder / name, "rb")  # clean: in the table, close() closes all
            self._files[name] = f
        return f

    def close(self) -> None:
        for f in self._files.values():
            f.close()
        self._files.clear()

    def header(self, name: str) -> dict:
        with open(self.folder / name, "rb") as f:  # clean: with closes it
            (n,) = struct.unpack("<Q", f.read(8))
            if n > 1 << 26:
                raise LoadError(f"{name}: header of {n} bytes")
            return json.loads(f.read(n))

    def header_fast(self, name: str) -> dict:
        f = open(self.folder / name, "rb")  # leak: the raise for a large header leaves it open
        (n,) = struct.unpack("<Q", f.read(8))
        if n > 1 << 26:
            raise LoadError(f"{name}: header of {n} bytes")
        head = json.loads(f.read(n))
        f.close()
        return head

    def read_tensor(self, name: str, off: int, n: int) -> torch.Tensor:
        buf = self.buffers.get()  # clean: put back in the finally
        try:
            f = self._file(name)
            f.seek(off)
            got = f.readinto(memoryview(buf)[:n])
            if got != n:
                raise LoadError(f"{name}: {got} of {n} bytes")
            return torch.frombuffer(buf, dtype=torch.uint8, count=n).clone()
        finally:
            self.buffers.put(buf)

    def read_raw(self, name: str, off: int, n: int) -> bytes:
        buf = self.buffers.get()  # leak: a short read raises without the put
        f = self._file(name)
        f.seek(off)
        if f.readinto(memoryview(buf)[:n]) != n:
            raise LoadError(name)
        out = bytes(buf[:n])
        self.buffers.put(buf)
        return out

    def read_with(self, name: str, n: int, on_data: Callable[[bytearray, int], None]) -> None:
        buf = self.buffers.get()  # clean: handed to the callback together with the duty to put it
        f = self._file(name)
        on_data(buf, f.readinto(memoryview(buf)[:n]))

    def count_zeros(self, name: str, n: int) -> int:
        total = 0

        def on_data(buf: bytearray, got: int) -> None:
            nonlocal total
            total = buf[:got].count(0)
            self.buffers.put(buf)

        self.read_with(name, n, on_data)
        return total

    def chunks(self, name: str) -> Iterator[tuple[bytearray, int]]:
        f = self._file(name)
        while True:
            buf = self.buffers.get()  # leak: at the end of the file the last buffer is not put back
            n = f.readinto(buf)
            if not n:
                return
            yield buf, n

    def checksum(self, name: str) -> int:
        c = 0
        for buf, n in self.chunks(name):  # clean: each yielded buffer is put back
            c ^= int.from_bytes(buf[:8], "little") ^ n
            self.buffers.put(buf)
        return c

    def pages(self, name: str) -> Iterator[memoryview]:
        buf = self.buffers.get()  # clean: near miss, one buffer for all pages and the finally puts it
        try:
            f = self._file(name)
            while n := f.readinto(buf):
                yield memoryview(buf)[:n]
        finally:
            self.buffers.put(buf)

    def magic(self, name: str) -> bytes:
        return open(self.folder / name, "rb").read(4)  # leak: the file object is never closed

    def first_matching(self, pattern: str, key: str) -> str | None:
        for p in sorted(self.folder.glob(pattern)):
            f = p.open("rb")  # clean: near miss, closed ahead of the test
            data = f.read(4096)
            f.close()
            if key.encode() not in data:
                continue
            return p.name
        return None
