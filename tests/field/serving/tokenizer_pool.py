"""Pool of tokenizer instances for the front end threads."""
import logging
import queue
import threading
import time
from typing import Any, Dict, List, Optional

logger = logging.getLogger("frontend.tokenizer")


class Tokenizer:
    def __init__(self, name: str):
        self.name = name
        self.vocab: Dict[str, int] = {}

    def encode(self, text: str) -> List[int]:
        return [self.vocab.setdefault(w, len(self.vocab)) for w in text.split()]


class TokenizerPool:
    def __init__(self, name: str, size: int):
        self._available: "queue.LifoQueue[Tokenizer]" = queue.LifoQueue()
        for _ in range(size):
            self._available.put(Tokenizer(name))
        self.in_use = 0

    def get_tokenizer(self, timeout: float = 5.0) -> Tokenizer:
        tok = self._available.get(timeout=timeout)
        self.in_use += 1
        return tok

    def put_tokenizer(self, tok: Tokenizer) -> None:
        self.in_use -= 1
        self._available.put(tok)


class Borrowed:
    """with Borrowed(pool) as tok: ..."""

    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.tok: Optional[Tokenizer] = None

    def __enter__(self) -> Tokenizer:
        self.tok = self.pool.get_tokenizer()  # clean: __exit__ always puts it back
        return self.tok

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        self.pool.put_tokenizer(self.tok)
        self.tok = None
        return False


class TimedBorrow:
    def __init__(self, pool: TokenizerPool, budget: float):
        self.pool = pool
        self.budget = budget
        self.t0 = 0.0
        self.tok: Optional[Tokenizer] = None

    def __enter__(self) -> "TimedBorrow":
        self.t0 = time.perf_counter()
        self.tok = self.pool.get_tokenizer()  # leak: __exit__ returns before the put when the body was slow
        return self

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        spent = time.perf_counter() - self.t0
        if spent > self.budget:
            logger.warning("slow tokenizer: %.3fs", spent)
            return False
        self.pool.put_tokenizer(self.tok)
        return False


class CountedBorrow:
    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.tok: Optional[Tokenizer] = None
        self.failures = 0

    def __enter__(self) -> Tokenizer:
        self.tok = self.pool.get_tokenizer()  # clean: near miss, the failed side puts it back before its return
        return self.tok

    def __exit__(self, exc_type: Any, exc: Any, tb: Any) -> bool:
        tok, self.tok = self.tok, None
        if exc_type is not None:
            self.failures += 1
            self.pool.put_tokenizer(tok)
            return True
        self.pool.put_tokenizer(tok)
        return False


class InputProcessor:
    def __init__(self, pool: TokenizerPool, max_len: int):
        self.pool = pool
        self.max_len = max_len
        self._gate = threading.BoundedSemaphore(8)
        self._local = threading.local()

    def encode(self, text: str) -> List[int]:
        with Borrowed(self.pool) as tok:  # clean: with statement
            return tok.encode(text)

    def encode_checked(self, text: str) -> List[int]:
        self._gate.acquire()  # leak: the raise for a long text skips the release
        tok = self.pool.get_tokenizer()  # clean: near miss, put back ahead of the raise
        ids = tok.encode(text)
        self.pool.put_tokenizer(tok)
        if len(ids) > self.max_len:
            raise ValueError(f"{len(ids)} tokens, at most {self.max_len}")
        self._gate.release()
        return ids

    def encode_gated(self, text: str) -> Optional[List[int]]:
        if not self._gate.acquire(blocking=False):  # clean: near miss, only held past the test, then released in the finally
            return None
        try:
            tok = self.pool.get_tokenizer()  # leak: the long text returns without a put
            ids = tok.encode(text)
            if len(ids) > self.max_len:
                return None
            self.pool.put_tokenizer(tok)
            return ids
        finally:
            self._gate.release()

    def encode_batch(self, texts: List[str]) -> List[List[int]]:
        tok = None
        out: List[List[int]] = []
        for text in texts:
            if tok is None:
                tok = self.pool.get_tokenizer()  # clean: near miss, got once and put back after the loop
            out.append(tok.encode(text))
        if tok is not None:
            self.pool.put_tokenizer(tok)
        return out

    def encode_sticky(self, text: str) -> List[int]:
        tok = getattr(self._local, "tok", None)
        if tok is None or len(tok.vocab) > 1_000_000:
            tok = self.pool.get_tokenizer()  # leak: the overgrown one in the thread local is overwritten
            self._local.tok = tok
        return tok.encode(text)

    def count(self, text: str) -> int:
        return len(self.pool.get_tokenizer().encode(text))  # leak: never put back

    def warm(self) -> None:
        toks = []
        try:
            while True:
                toks.append(self.pool.get_tokenizer(timeout=0.01))  # clean: near miss, the loop ends by Empty and the finally puts all back
        except queue.Empty:
            logger.info("%d tokenizers warmed", len(toks))
        finally:
            for t in toks:
                t.encode("warm up")
                self.pool.put_tokenizer(t)
