"""Evaluation harness: task files, result logs, a device lease and per-task locks."""
from __future__ import annotations

import fcntl
import gzip
import json
import os
import tempfile
import threading
from dataclasses import dataclass, field
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Tuple

Model = Callable[[str], str]


@dataclass
class Score:
    right: int = 0
    total: int = 0

    def add(self, ok: bool) -> None:
        self.right += ok
        self.total += 1


class BadSample(ValueError):
    pass


def read_task(path: str) -> List[Dict[str, Any]]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as f:  # clean: with
        return [json.loads(line) for line in f]


def count_samples(path: str) -> int:
    f = open(path)  # clean: near miss, closed ahead of the only return
    n = 0
    for line in f:
        if not line.strip():
            continue
        n += 1
    f.close()
    return n


def first_sample(path: str) -> Optional[Dict[str, Any]]:
    f = open(path)  # leak: returns from inside the loop before close
    for line in f:
        if line.startswith("{"):
            return json.loads(line)
    f.close()
    return None


def iter_samples(path: str, limit: int) -> Iterator[Dict[str, Any]]:
    f = open(path)  # clean: closed in finally, also when the consumer stops early
    try:
        for i, line in enumerate(f):
            if i >= limit:
                return
            yield json.loads(line)
    finally:
        f.close()


@dataclass
class ResultLog:
    """Appends results; starts a new part after ``max_rows`` rows."""

    root: str
    task: str
    max_rows: int = 1000
    part: int = 0
    rows: int = 0
    _f: Optional[IO[str]] = field(default=None, repr=False)

    def append(self, row: Dict[str, Any]) -> None:
        if self._f is None or self.rows >= self.max_rows:
            self.part += 1
            self.rows = 0
            self._f = open(os.path.join(self.root, f"{self.task}.{self.part}.jsonl"), "w")  # leak: a full part is replaced without close
        self._f.write(json.dumps(row) + "\n")
        self.rows += 1

    def close(self) -> None:
        if self._f is not None:
            self._f.close()
            self._f = None


class PairLog:
    """Prompts and completions side by side."""

    def __init__(self, root: str) -> None:
        self._prompts = open(os.path.join(root, "prompts.txt"), "w")  # leak: close() only closes the completions
        self._completions = open(os.path.join(root, "completions.txt"), "w")  # clean: closed by close()

    def add(self, prompt: str, completion: str) -> None:
        self._prompts.write(prompt + "\n")
        self._completions.write(completion + "\n")

    def close(self) -> None:
        self._prompts.flush()
        self._completions.close()


class TaskLock:
    """Advisory lock file so that two harness processes do not score the same task."""

    def __init__(self, root: str, task: str) -> None:
        self.path = os.path.join(root, f".{task}.lock")
        self._fd: Optional[int] = None

    def acquire(self) -> bool:
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR)  # clean: near miss, kept in _fd, or closed when the lock is taken by another
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # clean: unlocked by release, raises when it is not taken
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None


class DevicePermits:
    """How many tasks may hold the device at once."""

    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)
        self.holders = 0

    def enter(self, timeout: float = 60.0) -> bool:
        ok = self._sem.acquire(timeout=timeout)  # clean: held until leave()
        if ok:
            self.holders += 1
        return ok

    def leave(self) -> None:
        self.holders -= 1
        self._sem.release()


class Harness:
    def __init__(self, root: str, permits: DevicePermits) -> None:
        self.root = root
        self.permits = permits
        self.scores: Dict[str, Score] = {}
        self._table_lock = threading.Lock()

    def run_task(self, task: str, path: str, model: Model) -> Optional[Score]:
        lock = TaskLock(self.root, task)
        if not lock.acquire():  # leak: a task without samples returns with the lock held
            return None
        samples = read_task(path)
        if not samples:
            return Score()
        score = self._score(samples, model)
        lock.release()
        self.publish(task, score)
        return score

    def rerun_task(self, task: str, path: str, model: Model) -> Optional[Score]:
        lock = TaskLock(self.root, task)
        if not lock.acquire():  # clean: near miss, every return after it goes through finally
            return None
        try:
            samples = read_task(path)
            if not samples:
                return None
            return self._score(samples, model)
        finally:
            lock.release()

    def _score(self, samples: List[Dict[str, Any]], model: Model) -> Score:
        score = Score()
        for s in samples:
            score.add(model(s["q"]) == s["a"])
        return score

    def publish(self, task: str, score: Score) -> bool:
        self._table_lock.acquire()  # leak: a score that is not better returns with the table lock held
        old = self.scores.get(task)
        if old is not None and old.right >= score.right:
            return False
        self.scores[task] = score
        self._table_lock.release()
        return True

    def score_all(self, tasks: Dict[str, List[Dict[str, Any]]], model: Model) -> List[Tuple[str, float]]:
        table = []
        for name, samples in tasks.items():
            if not self.permits.enter():  # leak: BadSample is survived and the permit is not left
                continue
            try:
                s = self._score(samples, model)
            except BadSample:
                table.append((name, 0.0))
                continue
            self.permits.leave()
            table.append((name, s.right / max(1, s.total)))
        return table

    def calibrate(self, samples: List[Dict[str, Any]], model: Model) -> Optional[Score]:
        held = self.permits.enter(timeout=0.0)  # clean: near miss, left exactly when it was entered
        try:
            return self._score(samples[: 8 if held else 1], model)
        except BadSample:
            return None
        finally:
            if held:
                self.permits.leave()


def main() -> None:
    root = tempfile.mkdtemp()
    path = os.path.join(root, "t.jsonl")
    with open(path, "w") as f:  # clean: with
        f.write('{"q": "1", "a": "1"}\n')
    h = Harness(root, DevicePermits(1))
    h.run_task("t", path, lambda q: q)
    h.rerun_task("t", path, lambda q: q)
    print(h.score_all({"t": read_task(path)}, lambda q: q), count_samples(path), len(list(iter_samples(path, 3))))
    h.calibrate(read_task(path), lambda q: q)


if __name__ == "__main__":
    main()
