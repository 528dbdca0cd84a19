"""Striped locks and leases for the parameter server."""
import contextlib
import logging
import threading
import time
from typing import Dict, Iterable, List, Optional, Set

import torch

logger = logging.getLogger(__name__)


class LeaseTable:
    """Exclusive leases on parameter names."""

    def __init__(self) -> None:
        self._held: Set[str] = set()
        self._cv = threading.Condition()

    def lock_row(self, name: str, timeout: float = 0.0) -> bool:
        end = time.monotonic() + timeout
        with self._cv:  # clean: with statement
            while name in self._held:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._cv.wait(left)
            self._held.add(name)
            return True

    def unlock_row(self, name: str) -> None:
        with self._cv:  # clean: with statement
            self._held.discard(name)
            self._cv.notify_all()


class ParamServer:
    def __init__(self, params: Dict[str, torch.Tensor], lr: float = 0.1) -> None:
        self.params = params
        self.lr = lr
        self.leases = LeaseTable()
        self.global_lock = threading.Lock()
        self.readers = threading.Semaphore(4)
        self.version: Dict[str, int] = {}
        self.frozen: Set[str] = set()

    def push(self, name: str, grad: torch.Tensor) -> bool:
        if not self.leases.lock_row(name, 0.1):  # clean: near miss, False holds nothing, finally unlocks
            return False
        try:
            if grad.shape != self.params[name].shape:
                return False
            self.params[name].sub_(self.lr * grad)
            return True
        finally:
            self.leases.unlock_row(name)

    def push_sparse(self, name: str, idx: torch.Tensor, grad: torch.Tensor) -> bool:
        if not self.leases.lock_row(name, 0.1):  # leak: an empty index returns True before unlock_row
            return False
        if idx.numel() == 0:
            return True
        self.params[name].index_add_(0, idx, grad, alpha=-self.lr)
        self.leases.unlock_row(name)
        return True

    def pull(self, name: str) -> Optional[torch.Tensor]:
        self.readers.acquire()  # leak: an unknown name returns None with the permit
        p = self.params.get(name)
        if p is None:
            return None
        out = p.clone()
        self.readers.release()
        return out

    def pull_many(self, names: Iterable[str]) -> Dict[str, torch.Tensor]:
        out = {}
        with self.readers:  # clean: with statement
            for n in names:
                if n not in self.params:
                    continue
                out[n] = self.params[n].clone()
        return out

    def move(self, src: str, dst: str) -> bool:
        if not self.leases.lock_row(src):  # leak: not unlocked when dst is busy
            return False
        if not self.leases.lock_row(dst):  # clean: unlocked at the end
            return False
        self.params[dst].copy_(self.params[src])
        self.leases.unlock_row(dst)
        self.leases.unlock_row(src)
        return True

    def swap(self, a: str, b: str) -> bool:
        first, second = sorted((a, b))
        if not self.leases.lock_row(first):  # clean: near miss, unlocked when the second is busy
            return False
        if not self.leases.lock_row(second):  # clean: unlocked at the end
            self.leases.unlock_row(first)
            return False
        self.params[a], self.params[b] = self.params[b], self.params[a]
        self.leases.unlock_row(second)
        self.leases.unlock_row(first)
        return True

    def freeze(self, names: List[str]) -> int:
        for n in names:
            if self.leases.lock_row(n):  # clean: near miss, recorded in frozen, thaw unlocks all
                self.frozen.add(n)
        return len(self.frozen)

    def thaw(self) -> None:
        while self.frozen:
            self.leases.unlock_row(self.frozen.pop())

    def average(self, names: List[str]) -> Optional[torch.Tensor]:
        locked: List[str] = []
        for n in names:
            if not self.leases.lock_row(n):  # leak: a busy row returns None with the rows locked so far
                logger.info("row %s busy", n)
                return None
            locked.append(n)
        mean = torch.stack([self.params[n] for n in locked]).mean(0)
        for n in locked:
            self.leases.unlock_row(n)
        return mean

    def scale_all(self, factor: float) -> int:
        n = 0
        with contextlib.ExitStack() as stack:
            for name in self.params:
                if not self.leases.lock_row(name):  # clean: near miss, a stack callback is set for each locked row
                    continue
                stack.callback(self.leases.unlock_row, name)
                self.params[name].mul_(factor)
                n += 1
        return n

    def bump(self, name: str) -> int:
        self.global_lock.acquire()  # clean: near miss, both branches release
        if name in self.version:
            self.version[name] += 1
            self.global_lock.release()
            return self.version[name]
        self.version[name] = 0
        self.global_lock.release()
        return 0

    def bump_all(self, names: List[str]) -> None:
        for name in names:
            self.global_lock.acquire()  # leak: continue for frozen rows skips release
            if name in self.frozen:
                continue
            self.version[name] = self.version.get(name, 0) + 1
            self.global_lock.release()

    def polls_until_free(self, name: str, tries: int) -> int:
        for i in range(tries):
            if self.leases.lock_row(name, 0.05):  # leak: success returns the count with the row locked
                return i
            logger.debug("row %s still busy", name)
        return -1
