"""Tokenizer workers and incremental detokenizers in front of the engine loop."""

import functools
import itertools
import logging
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor

log = logging.getLogger("text")

REPLACEMENT = "\ufffd"


class TokenizerPool:
    """Tokenizers are not thread safe, so each is used by one thread at a time."""

    def __init__(self, make, n):
        self._q = queue.LifoQueue()
        self.size = n
        for _ in range(n):
            self._q.put(make())

    def get(self, timeout=None):
        try:
            return self._q.get(timeout=timeout)
        except queue.Empty:
            return None

    def get_special(self, vocab_hash):
        """A tokenizer whose added tokens are those of the adapter."""
        seen = []
        found = None
        while found is None:
            try:
                tk = self._q.get_nowait()  # clean: near miss, those that were passed over are put back below
            except queue.Empty:
                break
            if tk.vocab_hash == vocab_hash:
                found = tk
            else:
                seen.append(tk)
        for tk in seen:
            self._q.put(tk)
        return found

    def put(self, tk):
        self._q.put(tk)


class DetokStates:
    """Detokenizer states by index; the free ones form a linked list through `_next`."""

    def __init__(self, n):
        self._next = list(range(1, n)) + [-1]
        self._head = 0
        self.text = [""] * n
        self.ids = [[] for _ in range(n)]

    def open_state(self):
        i = self._head
        if i < 0:
            return None
        self._head = self._next[i]
        self.text[i], self.ids[i] = "", []
        return i

    def close_state(self, i):
        self._next[i] = self._head
        self._head = i


def with_tokenizer(fn):
    """Passes a tokenizer of self.toks as the first argument."""

    @functools.wraps(fn)
    def inner(self, *args, **kw):
        tk = self.toks.get()  # clean: put back in finally
        try:
            return fn(self, tk, *args, **kw)
        finally:
            self.toks.put(tk)

    return inner


class TextFrontend:
    def __init__(self, toks, states, workers=4):
        self.toks = toks
        self.states = states
        self.exec = ThreadPoolExecutor(workers)
        self.by_rid = {}
        self.inputs = queue.Queue()
        self._gate = threading.Semaphore(workers * 2)
        self._ids = itertools.count()

    # -- encoding ---------------------------------------------------------

    @with_tokenizer
    def count(self, tk, text):
        return len(tk.encode(text))

    def encode(self, text, max_len):
        tk = self.toks.get(timeout=1.0)  # leak: an over-long prompt raises before the tokenizer is put back
        if tk is None:
            raise TimeoutError("no tokenizer")
        ids = tk.encode(text)
        if len(ids) > max_len:
            raise ValueError(f"{len(ids)} tokens, at most {max_len}")
        self.toks.put(tk)
        return ids

    def encode_chat(self, messages, max_len):
        tk = self.toks.get(timeout=1.0)  # clean: put back before the length is looked at
        if tk is None:
            raise TimeoutError("no tokenizer")
        try:
            ids = tk.apply_template(messages)
        finally:
            self.toks.put(tk)
        if len(ids) > max_len:
            raise ValueError(f"{len(ids)} tokens, at most {max_len}")
        return ids

    def encode_special(self, text, vocab_hash):
        tk = self.toks.get_special(vocab_hash)  # leak: the special one is used and not put back
        if tk is not None:
            return tk.encode(text)
        tk = self.toks.get()  # clean: put back before the return
        tk.load_vocab(vocab_hash)
        ids = tk.encode(text)
        self.toks.put(tk)
        return ids

    def encode_async(self, text):
        self._gate.acquire()  # clean: near miss, the future's done callback releases it
        fut = self.exec.submit(self.count, text)
        fut.add_done_callback(lambda _: self._gate.release())
        return fut

    def encode_many(self, texts):
        futs = []
        for text in texts:
            if not self._gate.acquire(timeout=0.5):  # leak: an empty text gets a ready future and no release
                log.warning("encode queue is full")
                break
            if not text:
                done = Future()
                done.set_result(0)
                futs.append(done)
                continue
            f = self.exec.submit(self.count, text)
            f.add_done_callback(lambda _: self._gate.release())
            futs.append(f)
        return futs

    # -- decoding ---------------------------------------------------------

    def begin(self, n=1):
        """Opens n states under one request id."""
        opened = []
        for _ in range(n):
            st = self.states.open_state()  # clean: closed in the rollback, or filed in by_rid
            if st is None:
                for o in opened:
                    self.states.close_state(o)
                return None
            opened.append(st)
        rid = next(self._ids)
        self.by_rid[rid] = opened
        return rid

    def add_choice(self, rid):
        st = self.states.open_state()  # leak: nobody closes it when the request has ended meanwhile
        if st is None:
            return -1
        opened = self.by_rid.get(rid)
        if opened is None:
            return -1
        opened.append(st)
        return len(opened) - 1

    @with_tokenizer
    def feed(self, tk, rid, choice, token):
        st = self.by_rid[rid][choice]
        self.states.ids[st].append(token)
        text = tk.decode(self.states.ids[st])
        if text.endswith(REPLACEMENT):
            return ""
        delta = text[len(self.states.text[st]):]
        self.states.text[st] = text
        return delta

    def end(self, rid):
        for st in self.by_rid.pop(rid, ()):
            self.states.close_state(st)

    def end_choice(self, rid, choice):
        st = self.by_rid[rid].pop(choice)
        self.states.close_state(st)

    def decode_once(self, ids):
        """Whole answer at once, for the batch API."""
        st = self.states.open_state()  # leak: stays open when no tokenizer comes in time
        tk = self.toks.get(timeout=1.0)  # clean: put back after decoding
        if tk is None:
            return None
        text = tk.decode(ids)
        self.toks.put(tk)
        if st is not None:
            self.states.close_state(st)
        return text
