"""A pool of tokenizers that are not thread safe, with older and newer call sites."""
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import Iterator, List, Optional


class Tokenizer:
    def __init__(self, vocab):
        self.vocab = vocab

    def encode(self, text: str) -> List[int]:
        return [self.vocab.get(w, 0) for w in text.split()]


class TokenizerPool:
    def __init__(self, vocab, n: int = 4) -> None:
        self._queue: "LifoQueue[Tokenizer]" = LifoQueue()
        for _ in range(n):
            self._queue.put(Tokenizer(vocab))

    def borrow(self, timeout: Optional[float] = None) -> Optional[Tokenizer]:
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    def give_back(self, tokenizer: Tokenizer) -> None:
        self._queue.put(tokenizer)

    @contextmanager
    def using(self) -> Iterator[Tokenizer]:
        tokenizer = self.borrow()  # clean: near miss, the pool's own context manager
        try:
            yield tokenizer
        finally:
            self.give_back(tokenizer)


def encode(pool: TokenizerPool, text: str) -> List[int]:
    with pool.using() as tok:
        return tok.encode(text)


def encode_or_empty(pool: TokenizerPool, text: str) -> List[int]:
    tok = pool.borrow(0.5)  # clean: near miss, truthiness check, then finally
    if not tok:
        return []
    try:
        return tok.encode(text)
    finally:
        pool.give_back(tok)


def count_tokens(pool: TokenizerPool, texts: List[str], limit: int) -> int:
    tok = pool.borrow()  # leak: over the limit returns from the loop
    total = 0
    for text in texts:
        total += len(tok.encode(text))
        if total > limit:
            return limit
    pool.give_back(tok)
    return total


def count_tokens_capped(pool: TokenizerPool, texts: List[str], limit: int) -> int:
    tok = pool.borrow()  # clean: near miss, given back before the return inside the loop and after it
    total = 0
    for text in texts:
        total += len(tok.encode(text))
        if total > limit:
            pool.give_back(tok)
            return limit
    pool.give_back(tok)
    return total


def encode_streams(pool: TokenizerPool, streams: List[List[str]]) -> List[int]:
    lengths = []
    for stream in streams:
        tok = pool.borrow()  # leak: an empty text jumps to the next stream through the inner break's continue
        broken = False
        n = 0
        for text in stream:
            if not text:
                broken = True
                break
            n += len(tok.encode(text))
        if broken:
            continue
        pool.give_back(tok)
        lengths.append(n)
    return lengths


def encode_streams_all(pool: TokenizerPool, streams: List[List[str]]) -> List[int]:
    lengths = []
    for stream in streams:
        tok = pool.borrow()  # clean: near miss, given back before the flag is looked at
        broken = False
        n = 0
        for text in stream:
            if not text:
                broken = True
                break
            n += len(tok.encode(text))
        pool.give_back(tok)
        if broken:
            continue
        lengths.append(n)
    return lengths


def same_encoding(pool: TokenizerPool, text: str) -> bool:
    a = pool.borrow()  # clean: given back first
    b = pool.borrow(0.1)  # leak: given back only when the encodings agree
    if b is None:
        pool.give_back(a)
        return True
    same = a.encode(text) == b.encode(text)
    pool.give_back(a)
    if same:
        pool.give_back(b)
    return same
