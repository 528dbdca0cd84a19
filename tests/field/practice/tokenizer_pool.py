"""Tokenizer processes are expensive; requests share a few of them."""
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, Callable, ClassVar, Dict, Generic, Iterable, List, Optional, Tuple, TypeVar

R = TypeVar("R")
logger = logging.getLogger(__name__)


class Worker:
    def __init__(self, wid: int) -> None:
        self.wid = wid
        self.vocab: Dict[str, int] = {}

    def encode(self, text: str) -> List[int]:
        return [self.vocab.setdefault(w, len(self.vocab)) for w in text.split()]


class BoundedPool(ABC, Generic[R]):
    """Condition-variable pool.  Subclasses say how to make a resource."""

    timeout: ClassVar[float] = 5.0

    def __init__(self, size: int) -> None:
        self._resources: List[R] = [self.make(i) for i in range(size)]
        self._cond = threading.Condition()
        self.usage: Counter = Counter()

    @abstractmethod
    def make(self, i: int) -> R: ...

    def acquire(self, timeout: Optional[float] = None) -> Optional[R]:
        with self._cond:
            deadline = time.monotonic() + (timeout or self.timeout)
            while not self._resources:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._cond.wait(left)
            return self._resources.pop()

    def release(self, r: R) -> None:
        with self._cond:
            self._resources.append(r)
            self._cond.notify()

    def try_acquire(self, ok: Callable[[R], bool]) -> Optional[R]:
        with self._cond:
            if not self._resources:
                return None
            r = self._resources.pop()  # clean: near miss, put back into the list when the check fails
            if ok(r):
                return r
            self._resources.insert(0, r)
            return None

    def swap_out(self, ok: Callable[[R], bool]) -> Optional[R]:
        with self._cond:
            while self._resources:
                r = self._resources.pop()  # leak: resources that fail the check are popped one after the other
                if ok(r):
                    return r
            return None


class TokenizerPool(BoundedPool[Worker]):
    def make(self, i: int) -> Worker:
        return Worker(i)

    def acquire(self, timeout: Optional[float] = None) -> Optional[Worker]:
        w = super().acquire(timeout)  # clean: handed to the caller
        if w is not None:
            self.usage[w.wid] += 1
        return w


class Held(AbstractContextManager):
    def __init__(self, pool: TokenizerPool) -> None:
        self.pool = pool
        self.w: Optional[Worker] = None

    def __enter__(self) -> Worker:
        self.w = self.pool.acquire()  # clean: near miss, __exit__ releases, a failed acquire raises with nothing held
        if self.w is None:
            raise TimeoutError("no tokenizer")
        return self.w

    def __exit__(self, *exc: Any) -> Optional[bool]:
        if self.w is None:
            return None
        self.pool.release(self.w)
        self.w = None
        return None


def encode(pool: TokenizerPool, text: str) -> List[int]:
    with Held(pool) as w:  # clean: with block
        return w.encode(text)


def encode_limited(pool: TokenizerPool, text: str, limit: int) -> List[int]:
    w = pool.acquire()  # leak: a text over the limit raises with the worker out
    if w is None:
        raise TimeoutError("no tokenizer")
    ids = w.encode(text)
    if len(ids) > limit:
        raise ValueError(f"{len(ids)} tokens, limit is {limit}")
    pool.release(w)
    return ids


def encode_fast(pool: TokenizerPool, text: str) -> Optional[List[int]]:
    w = pool.try_acquire(lambda r: len(r.vocab) < 100_000)  # clean: released when there was one
    if w is None:
        return None
    ids = w.encode(text)
    pool.release(w)
    return ids


def encode_many(pool: TokenizerPool, texts: Iterable[str], width: int = 2) -> List[List[int]]:
    workers = [w for w in (pool.acquire(0.1) for _ in range(width)) if w is not None]  # clean: near miss, the filter removes only None
    if not workers:
        raise TimeoutError("no tokenizer")
    out = [workers[i % len(workers)].encode(t) for i, t in enumerate(texts)]
    for w in workers:
        pool.release(w)
    return out


def encode_small_vocab(pool: TokenizerPool, texts: Iterable[str], width: int, cap: int) -> List[List[int]]:
    workers = [w for w in (pool.acquire(0.1) for _ in range(width)) if w is not None and len(w.vocab) < cap]  # leak: workers with a large vocabulary are filtered out
    out = [w.encode(t) for w, t in zip(workers, texts)]
    for w in workers:
        pool.release(w)
    return out


def vocab_size(pool: TokenizerPool) -> int:
    w = pool.acquire()  # leak: `w` is rebound to the vocabulary
    if w is None:
        return 0
    w = w.vocab
    return len(w)


class Session:
    """Keeps one worker for a conversation."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.pool = pool
        self.worker: Optional[Worker] = None
        self.spare: Optional[Worker] = None

    def _ensure(self) -> Worker:
        if self.worker is None:
            w = self.pool.acquire()  # clean: near miss, kept in the session, close() releases
            if w is None:
                raise TimeoutError("no tokenizer")
            self.worker = w
        return self.worker

    def push(self, text: str) -> Tuple[int, ...]:
        return tuple(self._ensure().encode(text))

    def reserve_spare(self) -> bool:
        if self.spare is not None:
            return True
        self.spare = self.pool.acquire(0.01)  # leak: close() has no eye for the spare worker
        return self.spare is not None

    def promote(self) -> bool:
        if self.spare is None:
            return False
        if self.worker is not None:
            self.pool.release(self.worker)
        self.worker, self.spare = self.spare, None
        return True

    def close(self) -> None:
        if self.worker is not None:
            self.pool.release(self.worker)
            self.worker = None


def warm(pool: TokenizerPool, corpus: List[str], rounds: int) -> int:
    done = 0
    for _ in range(rounds):
        w = pool.acquire(0.5)  # leak: an empty corpus line breaks out
        if w is None:
            continue
        for line in corpus:
            w.encode(line)
            done += 1
        if not corpus[-1]:
            break
        pool.release(w)
    return done
