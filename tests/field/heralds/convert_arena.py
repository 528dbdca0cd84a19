"""Checkpoint conversion in one big arena.

The converter touches every tensor once and must not exceed the arena, so all
temporaries are spans of one bytearray.
"""
from __future__ import annotations

import dataclasses
import logging
import struct
from pathlib import Path
from typing import Callable, Iterator, Mapping

import numpy as np

log = logging.getLogger("convert")

PAGE = 64


class ArenaFull(MemoryError):
    pass


class SkipTensor(Exception):
    """Raised by a rule for tensors which have no place in the output."""


@dataclasses.dataclass(frozen=True)
class Span:
    off: int
    size: int


class Arena:
    def __init__(self, size: int) -> None:
        self.mem = np.zeros(size, np.uint8)
        self._top = 0
        self._free: list[Span] = []

    def carve(self, n: int) -> Span:
        n = -(-n // PAGE) * PAGE
        best = None
        for i, span in enumerate(self._free):
            if span.size >= n and (best is None or span.size < self._free[best].size):
                best = i
        if best is not None:
            span = self._free.pop(best)  # clean: near miss, split below, the rest goes back and the front to the caller
            if span.size > n:
                self._free.append(Span(span.off + n, span.size - n))
            return Span(span.off, n)
        if self._top + n > len(self.mem):
            raise ArenaFull(f"{n} bytes")
        off, self._top = self._top, self._top + n
        return Span(off, n)

    def fold(self, span: Span) -> None:
        self._free.append(span)

    def settle(self) -> None:
        self._free.sort(key=lambda s: s.off)
        while self._free:
            last = self._free.pop()  # clean: near miss, taken back into the area above the top, or put back
            if last.off + last.size != self._top:
                self._free.append(last)
                return
            self._top = last.off

    def purge(self, least: int) -> int:
        self._free.sort(key=lambda s: s.off)
        merged: list[Span] = []
        while self._free:
            span = self._free.pop(0)  # leak: a small span without a neighbour is in neither list afterwards
            if merged and merged[-1].off + merged[-1].size == span.off:
                merged[-1] = Span(merged[-1].off, merged[-1].size + span.size)
            elif span.size >= least:
                merged.append(span)
        self._free = merged
        return len(merged)

    def array(self, span: Span, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return self.mem[span.off:span.off + count * np.dtype(dtype).itemsize].view(dtype).reshape(shape)


@dataclasses.dataclass
class Tensor:
    name: str
    span: Span
    data: np.ndarray


class Shared:
    """A tensor that several outputs use (tied embeddings)."""

    def __init__(self, arena: Arena, tensor: Tensor) -> None:
        self.arena = arena
        self.tensor = tensor
        self.users = 1

    def use(self) -> "Shared":
        self.users += 1
        return self

    def drop(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.arena.fold(self.tensor.span)


def read_shard(arena: Arena, path: Path) -> Iterator[Tensor]:
    """Yields tensors; whoever iterates folds the span of each."""
    raw = path.read_bytes()
    at = 8
    for _ in range(struct.unpack_from("<q", raw)[0]):
        name_len, rows, cols = struct.unpack_from("<iii", raw, at)
        at += 12
        name = raw[at:at + name_len].decode()
        at += name_len
        span = arena.carve(rows * cols * 4)  # clean: goes out with the yielded tensor
        data = arena.array(span, "<f4", (rows, cols))
        data[...] = np.frombuffer(raw, "<f4", rows * cols, at).reshape(rows, cols)
        at += rows * cols * 4
        yield Tensor(name, span, data)


def copy_plain(arena: Arena, path: Path, keep: Callable[[str], bool], write: Callable[[str, np.ndarray], None]) -> int:
    n = 0
    for tensor in read_shard(arena, path):  # leak: a name that is not kept goes to the next turn without fold
        if not keep(tensor.name):
            continue
        write(tensor.name, tensor.data)
        arena.fold(tensor.span)
        n += 1
    return n


def norms(arena: Arena, path: Path) -> dict[str, float]:
    out = {}
    for tensor in read_shard(arena, path):  # clean: each is folded in the body
        out[tensor.name] = float(np.linalg.norm(tensor.data))
        arena.fold(tensor.span)
    return out


def quantise(arena: Arena, t: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = t.data.shape
    qspan = arena.carve(rows * cols)  # leak: ArenaFull for the scales, which convert() answers by writing f32
    sspan = arena.carve(rows * 4)  # clean: returned
    scale = arena.array(sspan, "<f4", (rows,))
    np.divide(np.abs(t.data).max(axis=1), 127.0, out=scale)
    q = arena.array(qspan, "i1", (rows, cols))
    q[...] = np.rint(t.data / np.maximum(scale, 1e-8)[:, None])
    return Tensor(t.name + ".q", qspan, q), Tensor(t.name + ".s", sspan, scale)


def convert(arena: Arena, path: Path, write: Callable[[str, np.ndarray], None]) -> None:
    for tensor in read_shard(arena, path):  # clean: folded in the finally
        try:
            q, s = quantise(arena, tensor)  # clean: both folded below
            write(q.name, q.data)
            write(s.name, s.data)
            arena.fold(q.span)
            arena.fold(s.span)
        except ArenaFull:
            write(tensor.name, tensor.data)
        finally:
            arena.fold(tensor.span)


class Fuser:
    """Collects q, k and v of a layer and writes them as one matrix."""

    def __init__(self, arena: Arena, write: Callable[[str, np.ndarray], None]) -> None:
        self.arena = arena
        self.write = write
        self.waiting: dict[str, dict[str, Tensor]] = {}
        self.embedding: Shared | None = None

    def add(self, t: Tensor) -> None:
        layer, _, part = t.name.rpartition(".")
        if part == "embed":
            self.embedding = Shared(self.arena, t)
            return
        parts = self.waiting.setdefault(layer, {})
        old = parts.pop(part, None)
        if old is not None:
            self.arena.fold(old.span)
        parts[part] = t
        if parts.keys() == {"q", "k", "v"}:
            self._fuse(layer, self.waiting.pop(layer))

    def _fuse(self, layer: str, parts: Mapping[str, Tensor]) -> None:
        rows = sum(t.data.shape[0] for t in parts.values())
        cols = parts["q"].data.shape[1]
        try:
            span = self.arena.carve(rows * cols * 4)  # clean: ArenaFull means there is none, else folded below
        except ArenaFull:
            for key in "qkv":
                self.write(f"{layer}.{key}", parts[key].data)
        else:
            fused = self.arena.array(span, "<f4", (rows, cols))
            np.concatenate([parts[k].data for k in "qkv"], out=fused)
            self.write(layer + ".qkv", fused)
            self.arena.fold(span)
        for t in parts.values():
            self.arena.fold(t.span)

    def tie_head(self) -> Shared | None:
        return self.embedding.use() if self.embedding else None  # clean: the count is the caller's, None without embedding

    def close(self) -> None:
        for parts in self.waiting.values():
            for t in parts.values():
                self.arena.fold(t.span)
        self.waiting.clear()


def fuse_all(arena: Arena, paths: list[Path], write: Callable[[str, np.ndarray], None]) -> None:
    fuser = Fuser(arena, write)
    try:
        for path in paths:
            for tensor in read_shard(arena, path):  # leak: the embedding is kept by the fuser, and close() does not drop it
                fuser.add(tensor)
        head = fuser.tie_head()  # clean: dropped below
        if head is not None:
            write("lm_head", head.tensor.data)
            head.drop()
    finally:
        fuser.close()


def apply_rules(arena: Arena, path: Path, rules: list[Callable[[str, np.ndarray], np.ndarray]], write: Callable[[str, np.ndarray], None]) -> None:
    """Each rule may rewrite the tensor; the result lives in a fresh span."""
    for tensor in read_shard(arena, path):  # clean: near miss, cur starts as its span and is folded when replaced or at the end
        cur, data = tensor.span, tensor.data
        try:
            for rule in rules:
                out = rule(tensor.name, data)
                nxt = arena.carve(out.nbytes)  # clean: near miss, becomes cur, which is folded in the next turn or in the finally
                fresh = arena.array(nxt, out.dtype.str, out.shape)
                fresh[...] = out
                arena.fold(cur)
                cur, data = nxt, fresh
            write(tensor.name, data)
        except SkipTensor:
            log.info("%s skipped by a rule", tensor.name)
        finally:
            arena.fold(cur)


def diff(arena: Arena, left: np.ndarray, right: np.ndarray) -> float:
    work = arena.carve(left.nbytes)  # leak: arrays of other shapes return before fold
    if left.shape != right.shape:
        return float("inf")
    out = arena.array(work, left.dtype.str, left.shape)
    np.subtract(left, right, out=out)
    worst = float(np.abs(out).max())
    arena.fold(work)
    return worst
