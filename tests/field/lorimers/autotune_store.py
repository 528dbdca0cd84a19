"""On-disk store of autotuned kernel configurations (one JSON-lines file per kernel)."""
from __future__ import annotations

import io
import json
import os
import tempfile
import threading
from dataclasses import asdict, dataclass
from typing import IO, Dict, Iterator, List, Optional, Tuple


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int = 2
    ms: float = 0.0


class StoreError(Exception):
    pass


class AutotuneStore:
    MAGIC = "#autotune v2"

    def __init__(self, root: str) -> None:
        self.root = root
        self._mu = threading.Lock()
        self._writers: Dict[str, IO[str]] = {}
        self._index: Optional[IO[str]] = None

    def path(self, kernel: str) -> str:
        return os.path.join(self.root, f"{kernel}.jsonl")

    def _open_checked(self, kernel: str) -> IO[str]:
        f = open(self.path(kernel))  # leak: the bad-magic raise leaves it open and load_all survives that
        if f.readline().rstrip() != self.MAGIC:
            raise StoreError(kernel)
        return f

    def _open_or_none(self, kernel: str) -> Optional[IO[str]]:
        try:
            f = open(self.path(kernel))  # clean: near miss, closed before the None return, else handed on
        except FileNotFoundError:
            return None
        if f.readline().rstrip() != self.MAGIC:
            f.close()
            return None
        return f

    def load(self, kernel: str) -> List[Config]:
        f = self._open_or_none(kernel)  # clean: closed by the with below
        if f is None:
            return []
        with f:
            return [Config(**json.loads(line)) for line in f if line.strip()]

    def load_all(self, kernels: List[str]) -> Dict[str, List[Config]]:
        out: Dict[str, List[Config]] = {}
        for k in kernels:
            try:
                f = self._open_checked(k)  # clean: closed after the read
            except (StoreError, FileNotFoundError):
                out[k] = []
                continue
            out[k] = [Config(**json.loads(line)) for line in f]
            f.close()
        return out

    def best(self, kernel: str, budget_ms: float) -> Optional[Config]:
        f = self._open_or_none(kernel)  # leak: the first hit returns without close
        if f is None:
            return None
        for line in f:
            cfg = Config(**json.loads(line))
            if cfg.ms <= budget_ms:
                return cfg
        f.close()
        return None

    def stream(self, kernel: str) -> Iterator[Config]:
        f = self._open_or_none(kernel)  # clean: near miss, finally closes even when the consumer stops early
        if f is None:
            return
        try:
            for line in f:
                yield Config(**json.loads(line))
        finally:
            f.close()

    def count(self, kernel: str) -> int:
        return sum(1 for _ in self._open_or_none(kernel) or ())  # leak: the temporary file is never closed

    # -- writing ------------------------------------------------------------
    def writer(self, kernel: str) -> IO[str]:
        w = self._writers.get(kernel)
        if w is None or w.closed:
            fresh = not os.path.exists(self.path(kernel))
            w = open(self.path(kernel), "a")  # clean: kept in _writers, closed by close
            if fresh:
                w.write(self.MAGIC + "\n")
            self._writers[kernel] = w
        return w

    def append(self, kernel: str, cfg: Config) -> None:
        w = self.writer(kernel)  # clean: borrowed from _writers, which owns it
        w.write(json.dumps(asdict(cfg)) + "\n")
        w.flush()

    def rotate(self, kernel: str) -> None:
        """Start the kernel's file over, keeping the old one beside it."""
        if os.path.exists(self.path(kernel)):
            os.replace(self.path(kernel), self.path(kernel) + ".old")
        w = open(self.path(kernel), "w")  # clean: replaces the writer in the table, closed by close
        w.write(self.MAGIC + "\n")
        w.flush()
        prev = self._writers.get(kernel)
        if prev is not None:
            prev.close()
        self._writers[kernel] = w

    def rewrite(self, kernel: str, configs: List[Config]) -> bool:
        if not configs:
            return False
        fd, tmp = tempfile.mkstemp(dir=self.root)  # clean: fdopen takes the descriptor over
        with os.fdopen(fd, "w") as f:  # clean: closed by the with
            f.write(self.MAGIC + "\n")
            for c in configs:
                f.write(json.dumps(asdict(c)) + "\n")
        os.replace(tmp, self.path(kernel))
        return True

    def reindex(self, kernels: List[str]) -> None:
        self._index = open(os.path.join(self.root, "INDEX"), "w")  # leak: the handle of an earlier reindex is overwritten open
        for k in kernels:
            self._index.write(f"{k} {len(self.load(k))}\n")
        self._index.flush()

    # -- in-process exclusion -------------------------------------------------
    def prune(self, kernel: str, keep: int) -> int:
        self._mu.acquire()  # leak: nothing-to-do return keeps the lock
        configs = self.load(kernel)
        if len(configs) <= keep:
            return 0
        self.rewrite(kernel, sorted(configs, key=lambda c: c.ms)[:keep])
        self._mu.release()
        return len(configs) - keep

    def try_prune(self, kernel: str, keep: int) -> Optional[int]:
        if not self._mu.acquire(blocking=False):  # clean: near miss, the early return is the not-acquired case
            return None
        try:
            configs = self.load(kernel)
            if len(configs) <= keep:
                return 0
            self.rewrite(kernel, sorted(configs, key=lambda c: c.ms)[:keep])
            return len(configs) - keep
        finally:
            self._mu.release()

    def merge(self, kernels: List[str], into: str) -> int:
        handles: List[IO[str]] = []
        n = 0
        for k in kernels:
            f = self._open_or_none(k)  # clean: near miss, all handles are closed in the last loop
            if f is not None:
                handles.append(f)
        for f in handles:
            for line in f:
                self.append(into, Config(**json.loads(line)))
                n += 1
        for f in handles:
            f.close()
        return n

    def diff(self, kernel: str) -> Optional[Tuple[int, int]]:
        new = self._open_or_none(kernel)  # leak: not closed when there is no older file
        if new is None:
            return None
        old_path = self.path(kernel) + ".old"
        if not os.path.exists(old_path):
            return None
        old = open(old_path)  # clean: closed with new
        counts = len(old.readlines()), len(new.readlines())
        old.close()
        new.close()
        return counts

    def close(self) -> None:
        for w in self._writers.values():
            w.close()
        self._writers.clear()
        if self._index is not None:
            self._index.close()


def render(configs: List[Config], out: Optional[IO[str]] = None, path: Optional[str] = None) -> int:
    close_it = False
    if out is None:
        if path is not None:
            out = open(path, "w")  # clean: near miss, close_it is set exactly here
            close_it = True
        else:
            out = io.StringIO()
    for c in configs:
        out.write(f"{c.block_m}x{c.block_n} w{c.num_warps} s{c.num_stages}: {c.ms:.3f} ms\n")
    if close_it:
        out.close()
    return len(configs)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        st = AutotuneStore(root)
        for i in range(4):
            st.append("splitk", Config(64, 64, 4, ms=float(i)))
        st.rotate("ring")
        print(len(st.load("splitk")), st.load_all(["splitk", "none"]).keys(), st.count("splitk"))
        print(next(st.stream("splitk")), st.try_prune("splitk", 2), st.merge(["splitk", "x"], "ring"))
        st.rotate("ring")
        print(st.diff("ring"), st.best("splitk", 9.0), render(st.load("splitk"), path=os.path.join(root, "r")))
        st.reindex(["splitk"])
        st.prune("splitk", 100)
        print(st._mu.locked())
        st.close()


if __name__ == "__main__":
    main()
