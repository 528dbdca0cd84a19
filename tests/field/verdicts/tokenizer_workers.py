import functools
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence

log = logging.getLogger("frontend.tok")


class Tokenizer:
    def __init__(self, vocab: Dict[str, int]):
        self.vocab = vocab
        self.special: List[str] = []

    def encode(self, text: str) -> List[int]:
        return [self.vocab.get(w, 0) for w in text.split()]


class TokenizerPool(object):
    """Tokenizers are not thread safe: one user at a time each."""

    def __init__(self, make: Callable[[], Tokenizer], n: int):
        self._items = [make() for _ in range(n)]
        self._free = set(range(n))
        self._cond = threading.Condition()

    def checkout(self, timeout: Optional[float] = None) -> Tokenizer:
        with self._cond:
            if not self._cond.wait_for(lambda: self._free, timeout):
                raise TimeoutError("no tokenizer")
            return self._items[self._free.pop()]

    def checkin(self, tok: Tokenizer) -> None:
        with self._cond:
            self._free.add(self._items.index(tok))
            self._cond.notify()


class Borrowed:
    """with Borrowed(pool) as tok: ..."""

    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.tok: Optional[Tokenizer] = None

    def __enter__(self) -> Tokenizer:
        self.tok = self.pool.checkout()  # clean: __exit__ checks it in whatever happened
        return self.tok

    def __exit__(self, *exc: Any) -> None:
        if self.tok is not None:
            self.pool.checkin(self.tok)
            self.tok = None


class BorrowedQuiet:
    def __init__(self, pool: TokenizerPool, swallow: Sequence[type] = ()):
        self.pool = pool
        self.swallow = tuple(swallow)

    def __enter__(self) -> Tokenizer:
        self.tok = self.pool.checkout()  # leak: __exit__ returns True for swallowed exceptions before checkin
        return self.tok

    def __exit__(self, et, ev, tb) -> bool:
        if et is not None and issubclass(et, self.swallow):
            log.debug("swallowed %s", ev)
            return True
        self.pool.checkin(self.tok)
        return False


class AsyncFrontend:
    def __init__(self, pool: TokenizerPool, threads: int = 4):
        self.pool = pool
        self.exec = ThreadPoolExecutor(threads)
        self.counter = 0
        self.counter_lock = threading.Lock()
        self.turn = threading.BoundedSemaphore(threads)

    def encode_async(self, text: str) -> Future:
        tok = self.pool.checkout()  # clean: near miss, the done callback checks it in
        fut = self.exec.submit(tok.encode, text)
        fut.add_done_callback(lambda _f: self.pool.checkin(tok))
        return fut

    def encode_future(self, text: str) -> Future:
        tok = self.pool.checkout()  # leak: nobody checks in when the future is done
        return self.exec.submit(tok.encode, text)

    def encode_partial(self, text: str) -> Callable[[], None]:
        tok = self.pool.checkout()  # clean: near miss, the returned partial is the release
        tok.encode(text)
        return functools.partial(self.pool.checkin, tok)

    def encode_batch(self, texts: List[str]) -> List[List[int]]:
        done = self.encode_partial("")  # clean: the returned callable is called
        out = []
        with Borrowed(self.pool) as tok:  # clean: with
            for t in texts:
                out.append(tok.encode(t))
        done()
        return out

    def warm(self, text: str) -> None:
        self.encode_partial(text)  # leak: the callable that checks in is thrown away

    def count(self, text: str, limit: int) -> int:
        tok = self.pool.checkout()  # leak: text over the limit raises before checkin
        n = len(tok.encode(text))
        if n > limit:
            raise ValueError(f"{n} tokens, limit {limit}")
        self.pool.checkin(tok)
        return n

    def count_limited(self, text: str, limit: int) -> int:
        tok = self.pool.checkout()  # clean: near miss, checkin stands before the raise
        n = len(tok.encode(text))
        self.pool.checkin(tok)
        if n > limit:
            raise ValueError(f"{n} tokens, limit {limit}")
        return n

    def add_special(self, words: List[str]) -> int:
        toks = {}
        for w in words:
            toks[w] = self.pool.checkout()  # leak: duplicates in words overwrite the entry before
            toks[w].special.append(w)
        for t in toks.values():
            self.pool.checkin(t)
        return len(toks)

    def try_encode(self, text: str, wait: float) -> Optional[List[int]]:
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            try:
                tok = self.pool.checkout(timeout=0.01)  # clean: near miss, the handler is reached only when nothing was checked out
            except TimeoutError:
                continue
            ids = tok.encode(text)
            self.pool.checkin(tok)
            return ids
        return None

    def bump(self, by: int) -> int:
        self.counter_lock.acquire()  # leak: zero increment returns while locked
        if by == 0:
            return self.counter
        self.counter += by
        value = self.counter
        self.counter_lock.release()
        return value

    def in_turn(self, text: str) -> Optional[List[int]]:
        if not self.turn.acquire(blocking=False):  # clean: near miss, False holds nothing, else released in finally
            return None
        try:
            with Borrowed(self.pool) as tok:  # clean: with
                return tok.encode(text)
        finally:
            self.turn.release()
