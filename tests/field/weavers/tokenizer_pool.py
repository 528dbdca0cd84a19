"""Tokenizer workers are not re-entrant, so the frontend shares a few of them."""
from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Callable, Deque, Dict, Iterable, Iterator, List, Optional


class Tokenizer:
    def __init__(self, vocab: Dict[str, int]) -> None:
        self.vocab = vocab
        self.state: List[int] = []

    def encode(self, text: str) -> List[int]:
        self.state = [self.vocab.get(w, 0) for w in text.split()]
        return self.state

    def reset(self) -> None:
        self.state = []


class TokenizerPool:
    def __init__(self, factory: Callable[[], Tokenizer], size: int) -> None:
        self._idle: Deque[Tokenizer] = deque(factory() for _ in range(size))
        self._cv = threading.Condition()

    def get(self, timeout: Optional[float] = None) -> Optional[Tokenizer]:
        with self._cv:
            if not self._cv.wait_for(lambda: self._idle, timeout):
                return None
            return self._idle.popleft()

    def put(self, tok: Tokenizer) -> None:
        tok.reset()
        with self._cv:
            self._idle.append(tok)
            self._cv.notify()

    @contextmanager
    def using(self, timeout: Optional[float] = None) -> Iterator[Tokenizer]:
        tok = self.get(timeout)  # clean: put back in the finally
        if tok is None:
            raise TimeoutError("no tokenizer")
        try:
            yield tok
        finally:
            self.put(tok)


class IncrementalEncoder:
    """Streaming encoder for one connection. Owns its tokenizer unless one is lent to it."""

    def __init__(self, pool: TokenizerPool, tok: Optional[Tokenizer] = None) -> None:
        self.pool = pool
        self.owned = tok is None
        self.tok = pool.get() if tok is None else tok  # clean: near miss, close() goes by the flag set on the same condition
        self.ids: List[int] = []

    def feed(self, text: str) -> None:
        self.ids.extend(self.tok.encode(text))

    def close(self) -> None:
        if self.owned and self.tok is not None:
            self.pool.put(self.tok)
        self.tok = None


class Frontend:
    def __init__(self, pool: TokenizerPool, max_len: int) -> None:
        self.pool = pool
        self.max_len = max_len
        self._sticky: Dict[str, Tokenizer] = {}
        self._encoders: Dict[str, IncrementalEncoder] = {}

    def encode(self, text: str) -> List[int]:
        tok = self.pool.get()  # leak: an over-long prompt raises ValueError, which is caught here and answered with []
        try:
            ids = tok.encode(text)
            if len(ids) > self.max_len:
                raise ValueError("prompt too long")
            self.pool.put(tok)
            return list(ids)
        except ValueError:
            return []

    def encode_stream(self, texts: Iterable[str]) -> Iterator[List[int]]:
        tok = self.pool.get()  # leak: the stop marker ends the generator by `return` before the put
        for t in texts:
            if t == "<stop>":
                return
            yield list(tok.encode(t))
        self.pool.put(tok)

    def bind(self, session: str) -> bool:
        if session in self._sticky:
            return True
        tok = self.pool.get(timeout=0.01)  # clean: moved into the table, unbind puts it back
        if tok is None:
            return False
        self._sticky[session] = tok
        return True

    def unbind(self, session: str) -> None:
        tok = self._sticky.pop(session, None)
        if tok is not None:
            self.pool.put(tok)

    def open_stream(self, session: str) -> IncrementalEncoder:
        lent = self._sticky.get(session)
        enc = IncrementalEncoder(self.pool, lent)  # clean: kept in the table, close_stream closes it
        prev = self._encoders.pop(session, None)
        if prev is not None:
            prev.close()
        self._encoders[session] = enc
        return enc

    def close_stream(self, session: str) -> List[int]:
        enc = self._encoders.pop(session, None)
        if enc is None:
            return []
        enc.close()
        return enc.ids

    def count(self, text: str) -> int:
        enc = IncrementalEncoder(self.pool)  # leak: used for its length and dropped without close
        enc.feed(text)
        return len(enc.ids)

    def compare(self, left: str, right: str) -> bool:
        with ExitStack() as stack:
            a = stack.enter_context(self.pool.using())  # clean: near miss, the stack leaves both on the early return
            b = stack.enter_context(self.pool.using())  # clean: the stack leaves it
            if not left:
                return not right
            return list(a.encode(left)) == list(b.encode(right))

    def encode_or_borrow(self, text: str, tok: Optional[Tokenizer] = None) -> List[int]:
        mine = tok is None
        if mine:
            tok = self.pool.get()  # clean: near miss, put back under the flag `mine`
        ids = list(tok.encode(text))
        if mine:
            self.pool.put(tok)
        return ids

    def encode_chat(self, turns: List[str], tok: Optional[Tokenizer] = None) -> List[int]:
        tok = tok or self.pool.get()  # leak: ownership is decided by `tok is None` after the rebinding, never true
        out: List[int] = []
        for t in turns:
            out.extend(tok.encode(t))
        if tok is None:
            self.pool.put(tok)
        return out
