"""A few warm tokenizer instances shared by the HTTP handler threads."""
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import List, Optional

logger = logging.getLogger("frontend.tokenizer")


class InputTooLong(ValueError):
    pass


class Tokenizer:
    def __init__(self, vocab: int, max_len: int = 8192) -> None:
        self.vocab, self.max_len = vocab, max_len

    def encode(self, text: str) -> List[int]:
        if len(text) > self.max_len:
            raise InputTooLong(f"{len(text)} characters")
        return [hash(w) % self.vocab for w in text.split()]


class TokenizerBench:
    def __init__(self, n: int, vocab: int) -> None:
        self._bench: "queue.SimpleQueue[Tokenizer]" = queue.SimpleQueue()
        self._dirty = threading.local()
        for _ in range(n):
            self._bench.put(Tokenizer(vocab))

    def call_up(self, timeout: Optional[float] = None) -> Tokenizer:
        return self._bench.get(timeout=timeout)  # clean: returned

    def call_up_long(self, need: int) -> Optional[Tokenizer]:
        tok = self._bench.get()  # leak: an instance whose limit is too small is replaced by None
        return tok if tok.max_len >= need else None

    def bench(self, tok: Tokenizer) -> None:
        self._bench.put(tok)

    def __enter__(self) -> Tokenizer:
        self._dirty.tok = self.call_up()  # clean: __exit__ benches it unconditionally
        return self._dirty.tok

    def __exit__(self, *exc) -> bool:
        self.bench(self._dirty.tok)
        return exc[0] is InputTooLong


class Frontend:
    def __init__(self, bench: TokenizerBench, workers: int = 8) -> None:
        self.bench = bench
        self.pool = ThreadPoolExecutor(workers)

    def encode(self, text: str) -> List[int]:
        ids: List[int] = []
        with self.bench as tok:  # clean: context manager
            ids = tok.encode(text)
        return ids

    def encode_all(self, texts: List[str]) -> List[List[int]]:
        tok = self.bench.call_up()  # leak: InputTooLong from encode leaves the loop and the function
        out = [tok.encode(t) for t in texts]
        self.bench.bench(tok)
        return out

    def encode_later(self, text: str) -> "Future[List[int]]":
        tok = self.bench.call_up()  # clean: the callback benches it for a result, an error or a cancelled future
        fut = self.pool.submit(tok.encode, text)
        fut.add_done_callback(lambda _: self.bench.bench(tok))
        return fut

    def encode_then(self, text: str, fn) -> "Future[List[int]]":
        tok = self.bench.call_up()  # leak: done calls result() first, and a failed encode raises there
        fut = self.pool.submit(tok.encode, text)

        def done(f: "Future[List[int]]") -> None:
            fn(f.result())
            self.bench.bench(tok)

        fut.add_done_callback(done)
        return fut

    def longest(self, texts: List[str]) -> int:
        tok, best = self.bench.call_up(), 0  # clean: errors are handled inside the loop
        for text in texts:
            try:
                best = max(best, len(tok.encode(text)))
            except InputTooLong:
                logger.info("skipped one of %d", len(text))
                continue
        self.bench.bench(tok)
        return best
