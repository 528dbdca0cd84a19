"""Process-wide pool of tokenizers (they are not thread safe)."""
import threading
from contextlib import ExitStack, contextmanager
from typing import Callable, Dict, Generator, Iterable, List, Optional, Sequence


class Tokenizer:
    def __init__(self, vocab: Dict[str, int]):
        self.vocab = vocab
        self.dirty = False

    def encode(self, s: str) -> List[int]:
        return [self.vocab.get(w, 0) for w in s.split()]

    def decode(self, ids: Sequence[int]) -> str:
        inv = {v: k for k, v in self.vocab.items()}
        return " ".join(inv.get(i, "<unk>") for i in ids)


class TokenizerPool:
    def __init__(self, vocab: Dict[str, int], n: int):
        self._cond = threading.Condition()
        self._stack: List[Tokenizer] = [Tokenizer(vocab) for _ in range(n)]

    def rent(self) -> Tokenizer:
        with self._cond:
            while not self._stack:
                self._cond.wait()
            return self._stack.pop()  # clean: handed to the caller

    def hand_in(self, t: Tokenizer) -> None:
        with self._cond:
            self._stack.append(t)
            self._cond.notify()

    def shrink(self, n: int) -> List[Tokenizer]:
        gone: List[Tokenizer] = []
        with self._cond:
            while self._stack and n > 0:
                t = self._stack.pop()  # clean: near miss, removed on purpose and handed to the caller for disposal
                gone.append(t)
                n -= 1
        return gone

    def rotate(self) -> None:
        with self._cond:
            if len(self._stack) < 2:
                return
            t = self._stack.pop(0)  # leak: a dirty tokenizer is popped and does not go back
            if t.dirty:
                return
            self._stack.append(t)

    @contextmanager
    def tokenizer(self) -> Generator[Tokenizer, None, None]:
        t = self.rent()  # clean: finally
        try:
            yield t
        finally:
            self.hand_in(t)


def encode_all(pool: TokenizerPool, texts: Iterable[str]) -> List[List[int]]:
    tok = pool.rent()  # clean: handed in after the loop
    out = [tok.encode(t) for t in texts]
    pool.hand_in(tok)
    return out


def encode_until_blank(pool: TokenizerPool, texts: Iterable[str]) -> List[List[int]]:
    out = []
    for t in texts:
        tok = pool.rent()  # clean: near miss, the break stands after hand_in
        ids = tok.encode(t)
        pool.hand_in(tok)
        if not ids:
            break
        out.append(ids)
    return out


def longest(pool: TokenizerPool, texts: Iterable[str]) -> int:
    best = 0
    for t in texts:
        tok = pool.rent()  # leak: blank texts continue with the tokenizer rented
        ids = tok.encode(t)
        if not ids:
            continue
        best = max(best, len(ids))
        pool.hand_in(tok)
    return best


def stream_decode(pool: TokenizerPool, ids: Iterable[int]):
    tok = pool.rent()  # leak: the end marker returns from the generator without hand_in
    for i in ids:
        if i < 0:
            return
        yield tok.decode([i])
    pool.hand_in(tok)


def stream_decode_safe(pool: TokenizerPool, ids: Iterable[int]):
    with pool.tokenizer() as tok:  # clean: with statement, also at the early return
        for i in ids:
            if i < 0:
                return
            yield tok.decode([i])


class Detokenizer:
    """One per streamed request."""

    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.tok: Optional[Tokenizer] = pool.rent()  # leak: finish() with nothing pending leaves without handing it in
        self.pending: List[int] = []

    def push(self, i: int) -> None:
        self.pending.append(i)

    def finish(self) -> str:
        if not self.pending:
            return ""
        assert self.tok is not None
        text = self.tok.decode(self.pending)
        self.pool.hand_in(self.tok)
        self.tok = None
        return text


class Session:
    def __init__(self, pool: TokenizerPool):
        self.pool = pool
        self.tok = pool.rent()  # clean: close() hands it in
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
        return False

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.pool.hand_in(self.tok)


def chat_length(pool: TokenizerPool, turns: Sequence[str]) -> int:
    with Session(pool) as s:  # clean: with statement over a closing session
        return sum(len(s.tok.encode(t)) for t in turns)


def reply_text(pool: TokenizerPool, ids: Sequence[int]) -> str:
    s = Session(pool)  # leak: the empty reply returns before close
    if not ids:
        return ""
    text = s.tok.decode(ids)
    s.close()
    return text


def with_callback(pool: TokenizerPool, texts: Sequence[str], on_done: Callable[[int], None]) -> None:
    with ExitStack() as es:
        tok = pool.rent()  # clean: near miss, handed in by the stack's callback
        es.callback(pool.hand_in, tok)
        n = 0
        for t in texts:
            if not t:
                return
            n += len(tok.encode(t))
        on_done(n)


def make_encoder(pool: TokenizerPool) -> Callable[[str], List[int]]:
    tok = pool.rent()  # leak: only the closure knows the tokenizer and it never hands it in

    def encode(s: str) -> List[int]:
        return tok.encode(s)

    return encode
