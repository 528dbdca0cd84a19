"""Bindings to a native tokenizer library, with handles that have to be closed by hand.

    vocab   tok_open / tok_close        one per model file, counted and shared
    text    tok_buf_new / tok_buf_free  scratch for one call
    cursor  tok_iter / tok_iter_end     walks over the tokens of one buffer
"""
import atexit
import ctypes as C
import functools
import hashlib
import itertools
import threading
from types import SimpleNamespace

lib = C.CDLL("libfasttok.so.2")
lib.tok_open.restype = lib.tok_buf_new.restype = lib.tok_iter.restype = C.c_void_p
lib.tok_next.restype = C.c_int
lib.tok_version.restype = C.c_int

END = -1
BAD = -2


class TokError(Exception):
    pass


class BadVocab(TokError):
    pass


_registry = {}
_registry_lock = threading.Lock()
_last_used = None


def open_vocab(path):
    """Counted: every call needs its close_vocab()."""
    with _registry_lock:
        ent = _registry.get(path)
        if ent is not None:
            ent.users += 1
            return ent
        handle = lib.tok_open(path.encode())  # leak: a file of an old version is refused with its handle open
        if not handle:
            raise BadVocab(path)
        version = lib.tok_version(C.c_void_p(handle))
        if version < 2:
            raise BadVocab(f"{path} has version {version}")
        ent = _registry[path] = SimpleNamespace(path=path, handle=handle, users=1, version=version)
        return ent


def close_vocab(ent):
    with _registry_lock:
        ent.users -= 1
        if ent.users == 0:
            del _registry[ent.path]
            lib.tok_close(C.c_void_p(ent.handle))


class TextBuf:
    def __init__(self, text):
        raw = text.encode()
        self._h = lib.tok_buf_new(raw, C.c_size_t(len(raw)))  # clean: near miss, free() or leaving the with frees it once
        self.nbytes = len(raw)

    @property
    def handle(self):
        return C.c_void_p(self._h)

    def free(self):
        if self._h is not None:
            lib.tok_buf_free(C.c_void_p(self._h))
            self._h = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()


def _walk(vocab, buf):
    """Token ids of a buffer."""
    it = lib.tok_iter(C.c_void_p(vocab.handle), buf.handle)  # leak: an invalid sequence raises TokError before the end of the cursor
    while True:
        tok = lib.tok_next(C.c_void_p(it))
        if tok == BAD:
            raise TokError("invalid byte sequence")
        if tok == END:
            break
        yield tok
    lib.tok_iter_end(C.c_void_p(it))


def _walk_safe(vocab, buf):
    it = lib.tok_iter(C.c_void_p(vocab.handle), buf.handle)  # clean: near miss, the finally of the generator ends it
    try:
        while (tok := lib.tok_next(C.c_void_p(it))) >= 0:
            yield tok
    finally:
        lib.tok_iter_end(C.c_void_p(it))


def encode(path, text):
    vocab = open_vocab(path)  # clean: closed in the outer finally
    try:
        with TextBuf(text) as buf:  # clean: the with frees it
            return list(_walk(vocab, buf))
    finally:
        close_vocab(vocab)


def encode_or_none(path, text):
    try:
        return encode(path, text)
    except TokError:
        return None


def truncate(path, text, limit):
    vocab = open_vocab(path)  # clean: near miss, the finally closes it and the slice only stops the walk
    try:
        with TextBuf(text) as buf:  # clean: the with frees it
            return list(itertools.islice(_walk_safe(vocab, buf), limit))
    finally:
        close_vocab(vocab)


def count_pair(path_a, path_b, text):
    """Length of one text under two vocabularies."""
    try:
        a = open_vocab(path_a)  # leak: BadVocab for the second path is caught with the first one open
        b = open_vocab(path_b)  # clean: closed below
    except BadVocab as exc:
        print("tokenizer:", exc)
        return None
    try:
        with TextBuf(text) as buf:  # clean: the with frees it
            return tuple(sum(1 for _ in _walk_safe(v, buf)) for v in (a, b))
    finally:
        close_vocab(a)
        close_vocab(b)


def use(path):
    """Make `path` the vocabulary of quick(); called from the REPL and from notebooks."""
    global _last_used
    vocab = open_vocab(path)  # clean: near miss, replaces the former one, which is closed, and atexit closes the last
    if _last_used is not None:
        close_vocab(_last_used)
    _last_used = vocab


@atexit.register
def _forget_last():
    global _last_used
    if _last_used is not None:
        close_vocab(_last_used)
        _last_used = None


def quick(text):
    if _last_used is None:
        raise TokError("call use() first")
    buf = TextBuf(text)  # leak: an empty text returns before the free
    if not buf.nbytes:
        return []
    try:
        return list(_walk_safe(_last_used, buf))
    finally:
        buf.free()


class Session:
    """Buffers of a conversation, kept so that the turns need not be copied again."""

    def __init__(self, path, keep=32):
        self.vocab = open_vocab(path)  # clean: near miss, close() lets go of it
        self.turns = {}
        self.keep = keep
        self.closed = False

    def add(self, turn_id, text):
        old = self.turns.pop(turn_id, None)
        if old is not None:
            old.free()
        self.turns[turn_id] = TextBuf(text)  # leak: trim() deletes old turns without freeing them
        self.trim()

    def trim(self):
        while len(self.turns) > self.keep:
            oldest = next(iter(self.turns))
            del self.turns[oldest]

    def ids(self):
        for buf in self.turns.values():
            yield from _walk_safe(self.vocab, buf)

    def digest(self):
        h = hashlib.blake2b(digest_size=8)
        for tok in self.ids():
            h.update(tok.to_bytes(4, "little"))
        return h.hexdigest()

    def close(self):
        if self.closed:
            return
        self.closed = True
        for buf in self.turns.values():
            buf.free()
        self.turns.clear()
        close_vocab(self.vocab)


def with_vocab(fn):
    """Decorator: the first argument becomes an open vocabulary for the length of the call."""

    @functools.wraps(fn)
    def inner(path, *args, **kw):
        vocab = open_vocab(path)  # clean: closed when the call is over
        try:
            return fn(vocab, *args, **kw)
        finally:
            close_vocab(vocab)

    return inner


@with_vocab
def histogram(vocab, texts):
    counts = {}
    for text in texts:
        with TextBuf(text) as buf:  # clean: the with frees it
            for tok in _walk_safe(vocab, buf):
                counts[tok] = counts.get(tok, 0) + 1
    return counts
