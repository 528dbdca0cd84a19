"""Spool for evaluation results: numbered segment files, a cap on open handles, lock files between processes."""
import contextlib
import fcntl
import io
import json
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Dict, IO, Iterable, Iterator, List, Optional


class HandleBudget:
    """Counts file handles of the process; charge() before an open, credit() after the close."""

    def __init__(self, cap: int):
        self.cap = cap
        self.used = 0
        self._mu = threading.Lock()

    def charge(self, n: int = 1) -> bool:
        with self._mu:
            if self.used + n > self.cap:
                return False
            self.used += n
            return True

    def credit(self, n: int = 1) -> None:
        with self._mu:
            self.used -= n


class SegmentFiles:
    """LRU of open segment files."""

    def __init__(self, root: Path, budget: HandleBudget, keep: int = 16):
        self.root = root
        self.budget = budget
        self.keep = keep
        self._open: "OrderedDict[int, IO[bytes]]" = OrderedDict()

    def get(self, seg: int) -> Optional[IO[bytes]]:
        f = self._open.get(seg)
        if f is not None:
            self._open.move_to_end(seg)
            return f
        if not self.budget.charge():  # leak: a missing segment returns None without credit
            return None
        path = self.root / f"{seg:08d}.seg"
        if not path.exists():
            return None
        f = open(path, "r+b")  # clean: near miss, in _open, closed on eviction or by close()
        self._open[seg] = f
        if len(self._open) > self.keep:
            _, old = self._open.popitem(last=False)
            old.close()
            self.budget.credit()
        return f

    def create(self, seg: int) -> bool:
        path = self.root / f"{seg:08d}.seg"
        if path.exists():
            return False
        f = open(path, "wb")  # leak: the full-disk branch returns before the close
        f.write(b"SPL1")
        if os.statvfs(self.root).f_bavail < 1024:
            return False
        f.close()
        return True

    def close(self) -> None:
        for f in self._open.values():
            f.close()
            self.budget.credit()
        self._open.clear()


class FileLock:
    """flock on a side file; usable from one thread at a time."""

    def __init__(self, path: Path):
        self.path = path
        self.fd: Optional[int] = None

    def try_lock(self) -> bool:
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o644)  # clean: near miss, closed when flock refuses, else kept in self.fd for unlock()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self.fd = fd
        return True

    def unlock(self) -> None:
        if self.fd is not None:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = None

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        ok = self.try_lock()  # clean: unlocked in finally when ok
        try:
            yield ok
        finally:
            if ok:
                self.unlock()


class ScratchDirs:
    def __init__(self, base: Path, cap: int):
        self.base = base
        self._sem = threading.Semaphore(cap)

    def make(self) -> Path:
        self._sem.acquire()  # clean: near miss, released by wipe() with the directory
        return Path(tempfile.mkdtemp(dir=self.base))  # clean: returned to the caller, wipe() removes it

    def wipe(self, d: Path) -> None:
        shutil.rmtree(d, ignore_errors=True)
        self._sem.release()


class Spool:
    def __init__(self, root: Path, budget: HandleBudget, dirs: ScratchDirs):
        self.root = root
        self.budget = budget
        self.dirs = dirs
        self.files = SegmentFiles(root, budget)
        self.lock = FileLock(root / ".lock")

    def append(self, seg: int, rows: Iterable[Dict[str, Any]]) -> int:
        with self.lock.held() as ok:  # clean: with
            if not ok:
                return 0
            f = self.files.get(seg)  # clean: stays with the LRU
            if f is None:
                return 0
            f.seek(0, io.SEEK_END)
            n = 0
            for r in rows:
                f.write(json.dumps(r).encode() + b"\n")
                n += 1
            f.flush()
            return n

    def compact(self, segs: List[int], out: int) -> bool:
        if not self.lock.try_lock():  # leak: no segments to merge returns with the lock held
            return False
        present = [s for s in segs if (self.root / f"{s:08d}.seg").exists()]
        if not present:
            return False
        d = self.dirs.make()  # clean: wiped after the replace
        tmp = d / "merged"
        with open(tmp, "wb") as dst:  # clean: with
            for s in present:
                with open(self.root / f"{s:08d}.seg", "rb") as src:  # clean: with
                    shutil.copyfileobj(src, dst)
        os.replace(tmp, self.root / f"{out:08d}.seg")
        self.dirs.wipe(d)
        self.lock.unlock()
        return True

    def export(self, seg: int, target: Path, check) -> bool:
        d = self.dirs.make()  # leak: a failed check returns without wipe
        copy = d / target.name
        shutil.copy(self.root / f"{seg:08d}.seg", copy)
        if not check(copy):
            return False
        shutil.move(copy, target)
        self.dirs.wipe(d)
        return True


def count_lines(paths: List[Path], budget: HandleBudget) -> Dict[str, int]:
    counts: Dict[str, int] = {}
    for p in paths:
        if not budget.charge():  # leak: an empty file goes to the next one without credit
            break
        if p.stat().st_size == 0:
            counts[p.name] = 0
            continue
        with p.open("rb") as f:  # clean: with
            counts[p.name] = sum(1 for _ in f)
        budget.credit()
    return counts
