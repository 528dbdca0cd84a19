"""Pool of tokenizer instances shared by request handlers (tokenizers are not thread-safe)."""

import functools
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

_log = logging.getLogger(__name__)


class WordTokenizer:
    def __init__(self, vocab):
        self.vocab = dict(vocab)
        self.unk = len(self.vocab)

    def encode(self, text):
        return [self.vocab.get(w, self.unk) for w in text.split()]

    def decode(self, ids):
        inv = {i: w for w, i in self.vocab.items()}
        return " ".join(inv.get(i, "<unk>") for i in ids)


class TokenizerPool:
    def __init__(self, vocab, n):
        self._queue = queue.Queue()
        for _ in range(n):
            self._queue.put(WordTokenizer(vocab))

    def borrow(self, block=True):
        try:
            return self._queue.get(block)  # clean: goes to the caller
        except queue.Empty:
            return None

    def give_back(self, tok):
        self._queue.put(tok)

    def __call__(self):
        return _Borrowed(self)


class _Borrowed:
    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        self.tok = self.pool.borrow()  # clean: __exit__ gives it back always
        return self.tok

    def __exit__(self, *exc):
        self.pool.give_back(self.tok)
        self.tok = None


def with_tokenizer(pool):
    def wrap(fn):
        @functools.wraps(fn)
        def call(*a, **kw):
            tok = pool.borrow()  # leak: a falsy result returns without give_back
            res = fn(tok, *a, **kw)
            if not res:
                return []
            pool.give_back(tok)
            return res
        return call
    return wrap


class Handler:
    def __init__(self, pool, max_len=128, threads=2):
        self.pool = pool
        self.max_len = max_len
        self.exe = ThreadPoolExecutor(threads)
        self.slots = threading.BoundedSemaphore(threads)

    def encode(self, text):
        with self.pool() as tok:  # clean: own context manager
            return tok.encode(text)

    def encode_limited(self, text):
        tok = self.pool.borrow()  # leak: the raise for long inputs
        ids = tok.encode(text)
        if len(ids) > self.max_len:
            raise ValueError("too long: %d" % len(ids))
        self.pool.give_back(tok)
        return ids

    def encode_truncated(self, text):
        tok = self.pool.borrow()  # clean: near miss, given back before the length test
        ids = tok.encode(text)
        self.pool.give_back(tok)
        if len(ids) > self.max_len:
            _log.info("truncating %d", len(ids))
            return ids[:self.max_len]
        return ids

    def try_encode(self, text):
        tok = self.pool.borrow(block=False)  # clean: None-checked
        if tok is None:
            return None
        try:
            return tok.encode(text)
        finally:
            self.pool.give_back(tok)

    def encode_batch(self, texts):
        tok = None
        out = []
        for t in texts:
            if tok is None:
                tok = self.pool.borrow()  # clean: near miss, borrowed once, given back after the loop
            out.append(tok.encode(t))
        if tok is not None:
            self.pool.give_back(tok)
        return out

    def encode_pairs(self, pairs):
        out = []
        for a, b in pairs:
            tok = self.pool.borrow()  # leak: pairs with an empty second half are skipped before give_back
            ids = tok.encode(a)
            if not b:
                out.append(ids)
                continue
            out.append(ids + tok.encode(b))
            self.pool.give_back(tok)
        return out

    def submit(self, text):
        self.slots.acquire()  # clean: near miss, the done callback releases it
        fut = self.exe.submit(self.encode, text)
        fut.add_done_callback(lambda _f: self.slots.release())
        return fut

    def submit_unless_full(self, text):
        if not self.slots.acquire(blocking=False):  # leak: an empty text gets a finished future and the slot stays taken
            return None
        if not text:
            done = Future()
            done.set_result([])
            return done
        fut = self.exe.submit(self.encode, text)
        fut.add_done_callback(lambda _f: self.slots.release())
        return fut

    def roundtrip(self, text):
        enc = self.pool.borrow()  # clean: given back in the inner finally
        try:
            ids = enc.encode(text)
        finally:
            self.pool.give_back(enc)
        dec = self.pool.borrow()  # leak: equal text returns True before give_back
        if dec.decode(ids) == text:
            return True
        self.pool.give_back(dec)
        return False

    def vocab_size(self):
        return len(self.pool.borrow().vocab)  # leak: borrowed for one expression and dropped

    def close(self):
        self.exe.shutdown()
