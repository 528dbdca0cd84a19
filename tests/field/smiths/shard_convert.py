"""Converts checkpoint shards to the engine's layout; several converters may share a directory."""
from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from typing import IO, Dict, Iterable, Iterator, List, Optional


class LockBusy(RuntimeError):
    pass


class DirLock:
    """An advisory lock file. lock() and unlock() come in pairs."""

    def __init__(self, root: str) -> None:
        self.path = os.path.join(root, ".convert.lock")

    def lock(self) -> None:
        try:
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL)  # clean: near miss, only the file's existence matters, the descriptor is closed
        except FileExistsError:
            raise LockBusy(self.path) from None
        os.close(fd)

    def unlock(self) -> None:
        os.unlink(self.path)

    def lock_retry(self, attempts: int, wait: float = 0.01) -> bool:
        for _ in range(attempts):
            try:
                self.lock()  # clean: near miss, a retry follows only a failed take, the caller unlocks
                return True
            except LockBusy:
                time.sleep(wait)
        return False


def parse_shard(f: IO[str]) -> Dict[str, float]:
    out: Dict[str, float] = {}
    for line in f:
        name, _, value = line.strip().partition("=")
        out[name] = float(value)
    return out


class Converter:
    def __init__(self, root: str) -> None:
        self.root = root
        self.dir_lock = DirLock(root)
        self.bad: List[str] = []

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _open(self, name: str, mode: str = "r") -> IO[str]:
        return open(self._path(name), mode)  # clean: wrapper, the caller closes it

    def read_retry(self, name: str, attempts: int = 3) -> Optional[Dict[str, float]]:
        for _ in range(attempts):
            f = self._open(name)  # leak: the handled parse error goes into the next try with the file open
            try:
                out = parse_shard(f)
            except ValueError:
                time.sleep(0.01)
                continue
            f.close()
            return out
        return None

    def read_settled(self, name: str, attempts: int = 3) -> Optional[Dict[str, float]]:
        for _ in range(attempts):
            f = self._open(name)  # clean: near miss, finally closes it before each retry
            try:
                return parse_shard(f)
            except ValueError:
                time.sleep(0.01)
            finally:
                f.close()
        return None

    def convert(self, name: str) -> bool:
        if not self.dir_lock.lock_retry(3):  # leak: an output that already exists returns with the directory locked
            return False
        if os.path.exists(self._path(name + ".out")):
            return False
        tensors = self.read_settled(name) or {}
        with self._open(name + ".out", "w") as out:  # clean: with closes it
            for k, v in tensors.items():
                out.write(f"{k}={v * 2}\n")
        self.dir_lock.unlock()
        return True

    def convert_once(self, name: str) -> bool:
        locked = self.dir_lock.lock_retry(3)  # clean: near miss, unlocked in finally under the flag
        try:
            if not locked or os.path.exists(self._path(name + ".out")):
                return False
            tensors = self.read_settled(name) or {}
            with self._open(name + ".out", "w") as out:  # clean: with closes it
                out.writelines(f"{k}={v * 2}\n" for k, v in tensors.items())
            return True
        finally:
            if locked:
                self.dir_lock.unlock()

    def merge(self, names: Iterable[str], dst: str) -> int:
        n = 0
        with ExitStack() as stack:
            out = stack.enter_context(self._open(dst, "w"))  # clean: the exit stack closes it
            for name in names:
                f = self._open(name)  # clean: near miss, the exit stack closes all of them
                stack.callback(f.close)
                if name in self.bad:
                    continue
                n += out.write(f.read())
        return n

    def route(self, items: Iterable[str]) -> List[str]:
        """Splits `layer.key=value` lines into one file for each layer."""
        files: Dict[str, IO[str]] = {}
        for item in items:
            layer, _, rest = item.partition(".")
            if layer not in files:
                files[layer] = self._open(f"layer_{layer}", "w")  # clean: closed through the table
            files[layer].write(rest + "\n")
        for f in files.values():
            f.close()
        return sorted(files)

    def lines(self, name: str) -> Iterator[str]:
        f = self._open(name)  # leak: the empty first line returns from the generator before close
        first = f.readline()
        if not first.strip():
            return
        yield first.strip()
        for line in f:
            yield line.strip()
        f.close()


class RotatingWriter:
    def __init__(self, conv: Converter, prefix: str, limit: int) -> None:
        self.conv = conv
        self.prefix = prefix
        self.limit = limit
        self.part = 0
        self.out = conv._open(f"{prefix}.0", "w")  # clean: near miss, rotate closes it before it opens the next

    def write(self, text: str) -> None:
        if self.out.tell() + len(text) > self.limit:
            self.rotate()
        self.out.write(text)

    def rotate(self) -> None:
        self.part += 1
        self.out.close()
        self.out = self.conv._open(f"{self.prefix}.{self.part}", "w")  # clean: closed by the next rotate or close

    def close(self) -> None:
        self.out.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        conv = Converter(root)
        with open(os.path.join(root, "s0"), "w") as f:  # clean: with closes it
            f.write("w=1.5\nb=2\n")
        print(conv.read_settled("s0"), conv.convert_once("s0"), conv.merge(["s0"], "all"))
        print(conv.route(["0.w=1", "1.w=2", "0.b=3"]))
        w = RotatingWriter(conv, "part", 8)  # clean: closed below
        for i in range(4):
            w.write(f"row{i}\n")
        w.close()
        print(w.part, os.path.exists(conv.dir_lock.path))


if __name__ == "__main__":
    main()
