import threading
import queue
from typing import Any, Dict, Iterable, List


class Tokenizer:
    def __init__(self, vocab: Dict[str, int]):
        self.vocab = vocab
        self.scratch: List[int] = []

    def encode(self, text: str) -> List[int]:
        self.scratch.clear()
        for w in text.split():
            self.scratch.append(self.vocab.get(w, 0))
        return list(self.scratch)


class TokenizerPool:
    """Tokenizers are not thread safe, so everybody takes one of their own."""

    def __init__(self, vocab: Dict[str, int], n: int):
        self._q: "queue.SimpleQueue[Tokenizer]" = queue.SimpleQueue()
        for _ in range(n):
            self._q.put(Tokenizer(vocab))

    def take(self) -> Tokenizer:
        return self._q.get()  # clean: handed to the caller

    def take_nowait(self) -> "Tokenizer | None":
        try:
            return self._q.get_nowait()  # clean: handed to the caller
        except queue.Empty:
            return None

    def give(self, tok: Tokenizer) -> None:
        self._q.put(tok)

    def resize_vocab(self, vocab: Dict[str, int], n: int) -> int:
        done = 0
        for _ in range(n):
            tok = self._q.get()  # leak: a tokenizer with the vocabulary already in place is not put back
            if tok.vocab is vocab:
                continue
            tok.vocab = vocab
            self._q.put(tok)
            done += 1
        return done


class Held:
    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.main = pool.take()  # clean: __exit__ gives it
        self.spare = pool.take_nowait()  # leak: __exit__ knows only the main one

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.pool.give(self.main)


class HeldPair:
    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.main = pool.take()  # clean: __exit__ gives it
        self.spare = pool.take_nowait()  # clean: near miss, __exit__ gives it where there is one

    def __enter__(self) -> "HeldPair":
        return self

    def __exit__(self, *exc: Any) -> None:
        for tok in (self.main, self.spare):
            if tok is not None:
                self.pool.give(tok)


def encode_all(pool: TokenizerPool, texts: Iterable[str]) -> List[List[int]]:
    tok = pool.take()  # clean: given in the finally
    try:
        return [tok.encode(t) for t in texts]
    finally:
        pool.give(tok)


def encode_limited(pool: TokenizerPool, texts: Iterable[str], limit: int) -> List[List[int]]:
    tok = pool.take()  # leak: a text over the limit raises with the tokenizer
    out = []
    for t in texts:
        ids = tok.encode(t)
        if len(ids) > limit:
            raise ValueError("text too long: %d tokens" % len(ids))
        out.append(ids)
    pool.give(tok)
    return out


def encode_if_idle(pool: TokenizerPool, text: str) -> List[int]:
    tok = pool.take_nowait()  # leak: the empty result is returned before the give
    if tok is None:
        return []
    ids = tok.encode(text)
    if not ids:
        return ids
    pool.give(tok)
    return ids


def encode_any(pool: TokenizerPool, text: str) -> List[int]:
    tok = pool.take_nowait() or pool.take()  # clean: near miss, one of the two, and it is given
    ids = tok.encode(text)
    pool.give(tok)
    return ids


def parallel(pool: TokenizerPool, texts: List[str]) -> List[List[int]]:
    out: List[List[int]] = [[] for _ in texts]

    def work(i: int, tok: Tokenizer) -> None:
        try:
            out[i] = tok.encode(texts[i])
        finally:
            pool.give(tok)

    threads = []
    for i in range(len(texts)):
        tok = pool.take()  # clean: near miss, the thread gives it
        th = threading.Thread(target=work, args=(i, tok))
        th.start()
        threads.append(th)
    for th in threads:
        th.join()
    return out


def parallel_short(pool: TokenizerPool, texts: List[str]) -> List[List[int]]:
    out: List[List[int]] = [[] for _ in texts]

    def work(i: int, tok: Tokenizer) -> None:
        out[i] = tok.encode(texts[i])
        if out[i]:
            pool.give(tok)

    threads = []
    for i in range(len(texts)):
        tok = pool.take()  # leak: the thread gives it only for a text with tokens
        th = threading.Thread(target=work, args=(i, tok))
        th.start()
        threads.append(th)
    for th in threads:
        th.join()
    return out


def stream(pool: TokenizerPool, texts: Iterable[str]):
    tok = pool.take()  # leak: the sentinel text ends the generator without the give
    for t in texts:
        if t == "<stop>":
            return
        yield tok.encode(t)
    pool.give(tok)


def stream_tokens(pool: TokenizerPool, texts: Iterable[str]):
    tok = pool.take()  # clean: near miss, the sentinel returns through the finally
    try:
        for t in texts:
            if t == "<stop>":
                return
            yield tok.encode(t)
    finally:
        pool.give(tok)
