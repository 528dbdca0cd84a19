"""Evaluation harness: sharded result files, a claim per task, one lock per table."""
from __future__ import annotations

import json
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Dict, IO, Iterator, List, Optional


@dataclass
class Task:
    name: str
    path: str
    metric: str = "exact"
    tries: int = 0


class ClaimBoard:
    """Which worker evaluates which task. A claim must be handed in with drop_claim."""

    def __init__(self):
        self._lock = threading.Lock()
        self._owner: Dict[str, str] = {}

    def claim(self, name: str, worker: str) -> bool:
        with self._lock:
            if name in self._owner:
                return False
            self._owner[name] = worker
            return True

    def drop_claim(self, name: str) -> None:
        self._lock.acquire()  # clean: released in finally
        try:
            self._owner.pop(name, None)
        finally:
            self._lock.release()


class ResultTable:
    def __init__(self, path: str, flush_every: int = 16):
        self.path = path
        self.flush_every = flush_every
        self.lock = threading.RLock()
        self.rows: List[dict] = []
        self._out: Optional[IO[str]] = None

    def open_out(self) -> None:
        if self._out is None:
            self._out = open(self.path, "a")  # leak: rotate overwrites the field without close

    def add(self, row: dict) -> int:
        self.lock.acquire()  # clean: released in finally
        try:
            self.rows.append(row)
            if self._out is not None and len(self.rows) % self.flush_every == 0:
                self._out.write(json.dumps(row) + "\n")
                return len(self.rows)
            return len(self.rows)
        finally:
            self.lock.release()

    def rotate(self, path: str) -> None:
        self.path = path
        self._out = open(path, "a")  # leak: the next rotate overwrites the field without close
        self.rows.clear()

    def close(self) -> None:
        if self._out is not None:
            self._out.close()
            self._out = None


def load_examples(path: str) -> List[dict]:
    return [json.loads(line) for line in open(path)]  # leak: nobody closes the file


def load_answers(path: str) -> Optional[Dict[str, str]]:
    f = open(path)  # leak: bad JSON is caught and None returned without close
    try:
        table = json.load(f)
    except ValueError:
        return None
    f.close()
    return table


@contextmanager
def lock_file(path: str, wait: float = 0.5) -> Iterator[bool]:
    """Exclusive lock file; yields False when it could not be had."""
    deadline = time.monotonic() + wait
    fh = None
    while fh is None and time.monotonic() < deadline:
        try:
            fh = open(path, "x")  # clean: near miss, loop ends as soon as it is had, closed in finally
        except FileExistsError:
            time.sleep(0.01)
    try:
        yield fh is not None
    finally:
        if fh is not None:
            fh.close()
            os.unlink(path)


@dataclass
class Harness:
    board: ClaimBoard
    table: ResultTable
    worker: str
    max_tries: int = 2
    scorers: Dict[str, Callable[[List[dict]], float]] = field(default_factory=dict)

    def run_one(self, task: Task) -> Optional[float]:
        if not self.board.claim(task.name, self.worker):  # leak: unknown metric returns without drop_claim
            return None
        scorer = self.scorers.get(task.metric)
        if scorer is None:
            return None
        score = scorer(load_examples(task.path))
        self.table.add({"task": task.name, "metric": task.metric, "score": score})
        self.board.drop_claim(task.name)
        return score

    def run_safely(self, task: Task) -> Optional[float]:
        if not self.board.claim(task.name, self.worker):  # clean: near miss, errors are survived but finally drops it
            return None
        try:
            score = self.scorers[task.metric](load_examples(task.path))
            self.table.add({"task": task.name, "metric": task.metric, "score": score})
            return score
        except (KeyError, OSError):
            task.tries += 1
            return None
        finally:
            self.board.drop_claim(task.name)

    def run_all(self, tasks: List[Task], scratch: str) -> int:
        done = 0
        for task in tasks:
            if not self.board.claim(task.name, self.worker):  # leak: break at the stop file keeps the claim
                continue
            if os.path.exists(os.path.join(scratch, "STOP")):
                break
            with lock_file(os.path.join(scratch, task.name + ".lock")) as mine:  # clean: with
                if mine:
                    done += 1
            self.board.drop_claim(task.name)
        return done
