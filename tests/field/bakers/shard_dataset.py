"""Token shards on disk: readers, an open-file cache, index building, sampling."""
from __future__ import annotations

import json
import logging
import os
import struct
from collections import OrderedDict
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Callable, Dict, IO, Iterator, List, Optional, TextIO

log = logging.getLogger("shards")

MAGIC = b"TOK1"
HEADER = struct.Struct("<4sI")


class BadShard(ValueError):
    pass


def write_shard(path: str, tokens: List[int]) -> None:
    with open(path, "wb") as f:  # clean: with
        f.write(HEADER.pack(MAGIC, len(tokens)))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


def open_shard(path: str) -> BinaryIO:
    """An open file, positioned behind a valid header."""
    f = open(path, "rb")  # clean: near miss, closed before the raise, else returned
    head = f.read(HEADER.size)
    if len(head) < HEADER.size or head[:4] != MAGIC:
        f.close()
        raise BadShard(path)
    return f


def open_shard_or_none(path: str) -> Optional[BinaryIO]:
    if not os.path.exists(path):
        return None
    f = open(path, "rb")  # leak: a short or foreign header returns None without closing
    head = f.read(HEADER.size)
    if head[:4] != MAGIC:
        return None
    return f


def shard_length(path: str) -> int:
    f = open_shard(path)  # clean: closed in finally
    try:
        f.seek(0)
        return HEADER.unpack(f.read(HEADER.size))[1]
    finally:
        f.close()


def first_tokens(paths: List[str], n: int) -> List[bytes]:
    out = []
    for path in paths:
        f = open_shard_or_none(path)  # clean: near miss, continue for None only, closed below
        if f is None:
            continue
        out.append(f.read(2 * n))
        f.close()
    return out


def total_bytes(paths: List[str]) -> int:
    return sum(len(open_shard(p).read()) for p in paths)  # leak: read and dropped unclosed


class OpenFileCache:
    """LRU of open shards; evicted files are closed."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._files: "OrderedDict[str, BinaryIO]" = OrderedDict()
        self._docs: Dict[str, BinaryIO] = {}

    def get(self, path: str) -> BinaryIO:
        f = self._files.get(path)
        if f is not None:
            self._files.move_to_end(path)
            return f
        f = open_shard(path)  # clean: kept in the cache, evicted or closed with it
        self._files[path] = f
        if len(self._files) > self.cap:
            _, old = self._files.popitem(last=False)
            old.close()
        return f

    def refresh_docs(self, paths: List[str]) -> None:
        """Called at every epoch; document offsets may have been rewritten."""
        for path in paths:
            self._docs[path] = open(path + ".docs", "rb")  # leak: the next epoch overwrites the entry, the former file stays open

    def doc_offsets(self, path: str) -> List[int]:
        f = self._docs[path]
        f.seek(0)
        raw = f.read()
        return list(struct.unpack(f"<{len(raw) // 4}I", raw))

    def forget(self, path: str) -> None:
        f = self._files.pop(path, None)
        if f is not None:
            f.close()

    def close(self) -> None:
        for f in self._files.values():
            f.close()
        self._files.clear()
        for f in self._docs.values():
            f.close()
        self._docs.clear()


class ShardReader:
    """Context manager over one shard; a damaged one is skipped by the caller."""

    def __init__(self, path: str, strict: bool = True) -> None:
        self.path = path
        self.strict = strict
        self._f: Optional[BinaryIO] = None

    def __enter__(self) -> "ShardReader":
        self._f = open_shard(self.path)  # leak: exit returns early for the lenient reader, which swallows the error
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        if exc_type is not None and not self.strict:
            log.warning("skipping rest of %s: %s", self.path, exc)
            return True
        self._f.close()
        return False

    def tokens(self) -> Iterator[int]:
        while True:
            raw = self._f.read(2)
            if not raw:
                return
            if len(raw) == 1:
                raise BadShard(f"{self.path}: odd length")
            yield struct.unpack("<H", raw)[0]


@contextmanager
def shard_log(path: str, append: bool = False) -> Iterator[TextIO]:
    f = open(path, "a" if append else "w")  # clean: closed in finally
    try:
        yield f
    finally:
        f.close()


def build_index(paths: List[str], out: str) -> int:
    count = 0
    with shard_log(out) as idx:  # clean: context manager
        for path in paths:
            try:
                n = shard_length(path)
            except BadShard:
                continue
            idx.write(json.dumps({"path": path, "n": n}) + "\n")
            count += 1
    return count


def stream_lines(path: str) -> Iterator[str]:
    f = open(path)  # clean: near miss, finally runs on exhaustion and on close of the generator
    try:
        for line in f:
            if line.startswith("#"):
                continue
            yield line.rstrip("\n")
    finally:
        f.close()


def find_entry(index: str, want: str) -> Optional[Dict[str, Any]]:
    f = open(index)  # leak: a hit returns from inside the loop
    for line in f:
        entry = json.loads(line)
        if entry["path"] == want:
            return entry
    f.close()
    return None


def find_entry_closing(index: str, want: str) -> Optional[Dict[str, Any]]:
    with closing(open(index)) as f:  # clean: near miss, closing() around a return in the loop
        for line in f:
            entry = json.loads(line)
            if entry["path"] == want:
                return entry
    return None


class MixtureSampler:
    """Keeps one file per source open for the length of an epoch."""

    def __init__(self, sources: Dict[str, str]) -> None:
        self.sources = sources
        self._open: Dict[str, BinaryIO] = {}

    def start_epoch(self) -> None:
        self.end_epoch()
        for name, path in self.sources.items():
            self._open[name] = open_shard(path)  # clean: near miss, end_epoch has emptied the table before

    def end_epoch(self) -> None:
        while self._open:
            _, f = self._open.popitem()
            f.close()

    def draw(self, name: str, n: int) -> bytes:
        f = self._open[name]
        data = f.read(2 * n)
        if len(data) < 2 * n:
            f.close()
            f = self._open[name] = open_shard(self.sources[name])  # clean: near miss, the exhausted file was closed, this one takes its entry
            data += f.read(2 * n - len(data))
        return data

    def disable(self, name: str) -> None:
        f = self._open.pop(name, None)
        if f is not None:
            f.close()
        self.sources.pop(name, None)


def dump_rejects(path: str, rows: List[str], verbose: bool) -> int:
    out = None
    if verbose:
        out = open(path, "w")  # clean: near miss, closed under the same flag
    kept = 0
    for row in rows:
        if len(row) > 80:
            if verbose:
                out.write(row + "\n")
            continue
        kept += 1
    if verbose:
        out.close()
    return kept


def retry_open(path: str, valid: Callable[[IO[bytes]], bool], tries: int = 3) -> Optional[IO[bytes]]:
    for _ in range(tries):
        f = open(path, "rb")  # leak: a file that does not validate is left open for the next try
        if valid(f):
            f.seek(0)
            return f
    return None
