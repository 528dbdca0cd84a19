"""Token shard readers and a locked index over plain files."""
from __future__ import annotations

import os
import tempfile
import threading
from typing import Dict, IO, Iterator, List, Optional


class ShardReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.fh: Optional[IO[str]] = None

    def open(self) -> None:
        if self.fh is None:
            self.fh = open(self.path)  # clean: held until close

    def rewind(self) -> None:
        self.close()
        self.fh = open(self.path)  # clean: near miss, the former handle is closed first

    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class TailReader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.fh: Optional[IO[str]] = None
        self.pos = 0

    def poll(self) -> str:
        self.fh = open(self.path)  # leak: each poll overwrites the handle of the one before
        self.fh.seek(self.pos)
        text = self.fh.read()
        self.pos = self.fh.tell()
        return text

    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class HandleCache:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._fhs: Dict[str, IO[str]] = {}

    def get(self, path: str) -> IO[str]:
        fh = self._fhs.get(path)
        if fh is None:
            if len(self._fhs) >= self.limit:
                old = next(iter(self._fhs))
                self._fhs.pop(old).close()
            fh = open(path)  # clean: near miss, cached; evicted with close
            self._fhs[path] = fh
        return fh

    def close(self) -> None:
        for fh in self._fhs.values():
            fh.close()
        self._fhs.clear()


class ShardIndex:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._mu = threading.Lock()
        self._rows: Dict[str, int] = {}

    def count(self, name: str) -> int:
        return len(open(os.path.join(self.folder, name)).readlines())  # leak: handle is never closed

    def lines(self, name: str) -> Iterator[str]:
        f = open(os.path.join(self.folder, name))  # clean: near miss, generator closes in finally
        try:
            for line in f:
                yield line.rstrip()
        finally:
            f.close()

    def add(self, name: str, rows: int) -> bool:
        self._mu.acquire()  # clean: near miss, both ways release
        if name in self._rows:
            self._mu.release()
            return False
        self._rows[name] = rows
        self._mu.release()
        return True

    def take(self, name: str) -> int:
        self._mu.acquire()  # leak: an unknown name is caught and returns 0 with the lock held
        try:
            rows = self._rows.pop(name)
        except KeyError:
            return 0
        self._mu.release()
        return rows

    def total(self, wait: float) -> int:
        got = self._mu.acquire(timeout=wait)  # clean: near miss, release asks whether it was got
        try:
            return sum(self._rows.values())
        finally:
            if got:
                self._mu.release()

    def concat(self, a: str, b: str, out: str) -> bool:
        fa = open(os.path.join(self.folder, a))  # leak: a missing second shard returns False with the first open
        try:
            fb = open(os.path.join(self.folder, b))  # clean: with
        except FileNotFoundError:
            return False
        with fa, fb, open(os.path.join(self.folder, out), "w") as fo:  # clean: with
            fo.write(fa.read())
            fo.write(fb.read())
        return True

    def open_readers(self, names: List[str]) -> List[ShardReader]:
        out: List[ShardReader] = []
        for n in names:
            r = ShardReader(os.path.join(self.folder, n))
            r.open()  # clean: handed to the caller
            out.append(r)
        return out

    def heads(self, names: List[str]) -> List[str]:
        readers = self.open_readers(names)  # clean: closed in finally
        try:
            return [r.fh.readline().strip() for r in readers if r.fh]
        finally:
            for r in readers:
                r.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as d:
        for n in ("a", "b"):
            with open(os.path.join(d, n), "w") as f:  # clean: with
                f.write(n + "\n")
        ix = ShardIndex(d)
        assert list(ix.lines("a")) == ["a"]
        ix.add("a", 1)
        assert ix.total(1.0) == 1 and ix.take("a") == 1
        assert ix.concat("a", "b", "c") and ix.heads(["a", "c"]) == ["a", "a"]
        hc = HandleCache(1)
        hc.get(os.path.join(d, "a"))  # clean: near miss, the cache owns it
        hc.get(os.path.join(d, "b"))  # clean: near miss, the cache owns it
        hc.close()


if __name__ == "__main__":
    main()
