"""Manifest of a step directory and the lock that serialises its writers."""
import json
import os
import threading
from typing import Dict, Optional


class StepLock:
    """One lock per step, shared by the trainer thread and the background writer."""

    _locks: Dict[int, threading.Lock] = {}
    _guard = threading.Lock()

    @classmethod
    def for_step(cls, step: int) -> threading.Lock:
        with cls._guard:
            return cls._locks.setdefault(step, threading.Lock())


class Manifest:
    def __init__(self, root: str, step: int) -> None:
        self.root = root
        self.step = step
        self.entries: Dict[str, int] = {}

    @property
    def path(self) -> str:
        return os.path.join(self.root, f"manifest-{self.step}.json")

    def commit(self) -> bool:
        lock = StepLock.for_step(self.step)
        lock.acquire()  # leak: an empty manifest returns with the step lock held
        if not self.entries:
            return False
        with open(self.path + ".tmp", "w") as f:  # clean: with
            json.dump(self.entries, f)
        os.replace(self.path + ".tmp", self.path)
        lock.release()
        return True

    def merge(self, other: "Manifest") -> int:
        lock = StepLock.for_step(self.step)
        if not lock.acquire(timeout=5.0):  # clean: near miss, every return after the take passes finally
            return 0
        try:
            fresh = {k: v for k, v in other.entries.items() if k not in self.entries}
            if not fresh:
                return 0
            self.entries.update(fresh)
            return len(fresh)
        finally:
            lock.release()

    @classmethod
    def load(cls, root: str, step: int) -> Optional["Manifest"]:
        m = cls(root, step)
        try:
            f = open(m.path)  # leak: a truncated manifest (ValueError) returns None without close
        except FileNotFoundError:
            return None
        try:
            m.entries = json.load(f)
        except ValueError:
            return None
        f.close()
        return m

    @staticmethod
    def latest_step(root: str) -> int:
        marker = os.path.join(root, "latest")
        if not os.path.exists(marker):
            return -1
        f = open(marker)  # clean: near miss, closed before either return
        text = f.read().strip()
        f.close()
        if not text.isdigit():
            return -1
        return int(text)

    def mark_latest(self) -> None:
        open(os.path.join(self.root, "latest"), "w").write(str(self.step))  # leak: the handle is never bound nor closed
