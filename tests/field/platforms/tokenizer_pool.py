"""Tokenizer instances shared between request threads."""
from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple


@dataclass(eq=False)
class Tokenizer:
    name: str
    revision: int
    eos_id: int = 2

    def encode(self, text: str) -> List[int]:
        return [ord(ch) % 32000 for ch in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i % 0x10000) for i in ids)


class TokenizerPool:
    """Tokenizers are not thread safe; each is lent to one user at a time."""

    def __init__(self, factory: Callable[[], Tokenizer], size: int) -> None:
        self._idle: "queue.LifoQueue[Tokenizer]" = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(factory())
        self.revision = 0

    def acquire(self, timeout: Optional[float] = None) -> Optional[Tokenizer]:
        try:
            return self._idle.get(timeout=timeout)  # clean: returned to the caller
        except queue.Empty:
            return None

    def acquire_current(self, attempts: int = 4) -> Optional[Tokenizer]:
        """Lend a tokenizer that is at the newest revision."""
        for _ in range(attempts):
            tok = self._idle.get()  # clean: near miss, a stale one goes back before the next attempt
            if tok.revision == self.revision:
                return tok
            tok.revision = self.revision
            self._idle.put(tok)
        return None

    def release(self, tok: Tokenizer) -> None:
        self._idle.put(tok)

    @contextmanager
    def lent(self) -> Iterator[Tokenizer]:
        tok = self._idle.get()  # clean: put back when the with block ends
        try:
            yield tok
        finally:
            self._idle.put(tok)


class QuotaPool:
    """Per-tenant quota on top of a tokenizer pool."""

    def __init__(self, inner: TokenizerPool, quota: int) -> None:
        self.inner = inner
        self._left = threading.Semaphore(quota)

    def acquire(self, timeout: float) -> Optional[Tokenizer]:
        if not self._left.acquire(blocking=False):  # leak: the unit is kept when the inner pool times out
            return None
        tok = self.inner.acquire(timeout)  # clean: returned to the caller, None included
        return tok

    def release(self, tok: Tokenizer) -> None:
        self.inner.release(tok)
        self._left.release()


class EncodeService:
    def __init__(self, pool: TokenizerPool, workers: int) -> None:
        self.pool = pool
        self._executor = ThreadPoolExecutor(max_workers=workers)

    def encode(self, text: str) -> List[int]:
        tok = self.pool.acquire()  # clean: near miss, the return inside the try still runs the release
        if tok is None:
            return []
        try:
            return tok.encode(text)
        finally:
            self.pool.release(tok)

    def submit(self, text: str) -> "Optional[Future[List[int]]]":
        tok = self.pool.acquire(timeout=0.5)  # clean: near miss, the task it is passed to releases it
        if tok is None:
            return None
        return self._executor.submit(self._run, tok, text)

    def _run(self, tok: Tokenizer, text: str) -> List[int]:
        try:
            return tok.encode(text)
        finally:
            self.pool.release(tok)

    def shutdown(self) -> None:
        self._executor.shutdown(wait=True)

    def count_tokens(self, texts: List[str], limit: int) -> int:
        total = 0
        with self.pool.lent() as tok:  # clean: near miss, returning from the with block puts it back
            for text in texts:
                total += len(tok.encode(text))
                if total > limit:
                    return limit
        return total

    def truncate(self, text: str, limit: int) -> Tuple[str, bool]:
        tok = self.pool.acquire_current()  # leak: text that fits is returned without the release
        if tok is None:
            return text[:limit], True
        ids = tok.encode(text)
        if len(ids) <= limit:
            return text, False
        shortened = tok.decode(ids[:limit])
        self.pool.release(tok)
        return shortened, True

    def deferred(self, text: str) -> Callable[[], List[int]]:
        tok = self.pool.acquire_current()  # clean: near miss, the returned closure releases it when called

        def run() -> List[int]:
            if tok is None:
                return []
            ids = tok.encode(text)
            self.pool.release(tok)
            return ids

        return run


class StreamDecoder:
    """Incremental detokenizer bound to one stream."""

    def __init__(self, pool: TokenizerPool) -> None:
        self.pool = pool
        self.tok = pool.acquire()  # leak: close returns early when no ids are buffered
        self.buffer: List[int] = []

    def push(self, token: int) -> None:
        self.buffer.append(token)

    def close(self) -> str:
        if self.tok is None or not self.buffer:
            return ""
        text = self.tok.decode(self.buffer)
        self.pool.release(self.tok)
        self.tok = None
        return text


def decode_stream(pool: TokenizerPool, tokens: Iterable[int]) -> Iterator[str]:
    tok = pool.acquire()  # leak: the end-of-sequence return skips the release
    if tok is None:
        return
    for token in tokens:
        if token == tok.eos_id:
            return
        yield tok.decode([token])
    pool.release(tok)


def decode_words(pool: TokenizerPool, tokens: Iterable[int]) -> Iterator[str]:
    tok = pool.acquire()  # clean: near miss, the finally covers the early return and a closed generator
    if tok is None:
        return
    try:
        for token in tokens:
            if token == tok.eos_id:
                return
            yield tok.decode([token])
    finally:
        pool.release(tok)


def revisions(pool: TokenizerPool, count: int) -> Dict[str, int]:
    """Revision of each tokenizer name among `count` idle instances."""
    by_name: Dict[str, Tokenizer] = {}
    for _ in range(count):
        tok = pool.acquire(timeout=0.0)  # leak: instances of one name overwrite each other in the dict
        if tok is None:
            break
        by_name[tok.name] = tok
    for tok in by_name.values():
        pool.release(tok)
    return {name: tok.revision for name, tok in by_name.items()}
