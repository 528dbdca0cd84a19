"""Turns raw jsonl files into packed token files.

The tokenizer objects are heavy (regex tables, merges) and not thread safe, so a fixed number of them is shared.
Everything is written as generators; a stage pulls from the stage before it.
"""
import contextlib
import gzip
import itertools
import json
import logging
import os
import queue
import threading
from contextlib import ExitStack, contextmanager

import numpy as np

log = logging.getLogger("tok")


class BadLine(ValueError):
    pass


class EncodeError(Exception):
    pass


class Tokenizer:
    def __init__(self, vocab, serial):
        self.vocab = vocab
        self.serial = serial
        self.calls = 0

    def encode(self, text):
        self.calls += 1
        ids = []
        for piece in text.split(" "):
            if piece in self.vocab:
                ids.append(self.vocab[piece])
            elif not piece.isprintable():
                raise EncodeError("unprintable piece at call %d" % self.calls)
            else:
                ids.extend(b + 3 for b in piece.encode())
        return ids


class TokenizerPool:
    def __init__(self, vocab, n, recycle_after=100000):
        self.vocab = vocab
        self.recycle_after = recycle_after
        self._idle = queue.Queue()
        self._serial = itertools.count()
        for _ in range(n):
            self._idle.put(Tokenizer(vocab, next(self._serial)))

    def checkout(self, timeout=None):
        """None when nothing became idle in time."""
        try:
            tok = self._idle.get(timeout=timeout)  # clean: near miss, a worn-out one is replaced, else it goes to the caller
        except queue.Empty:
            return None
        if tok.calls > self.recycle_after:
            tok = Tokenizer(self.vocab, next(self._serial))
        return tok

    def checkin(self, tok):
        self._idle.put(tok)

    @contextmanager
    def borrowed(self):
        tok = self.checkout()  # leak: no finally, an EncodeError in the with body skips the checkin and is handled by the stages
        yield tok
        self.checkin(tok)

    @contextmanager
    def borrowed_safely(self):
        tok = self.checkout()  # clean: checked in by the finally
        try:
            yield tok
        finally:
            self.checkin(tok)


def open_any(path):
    if path.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")  # clean: handed to the caller
    return open(path, "r", encoding="utf-8")  # clean: handed to the caller


def read_lines(paths, max_bad):
    """Documents of all files. Damaged files are given up after max_bad lines."""
    for path in paths:
        f = open_any(path)  # leak: a file that is given up is not closed
        bad = 0
        for no, line in enumerate(f):
            try:
                doc = json.loads(line)
                if "text" not in doc:
                    raise BadLine("no text")
            except ValueError as e:
                bad += 1
                log.debug("%s:%d: %s", path, no, e)
                continue
            if bad > max_bad:
                log.warning("giving up on %s at line %d", path, no)
                break
            yield doc
        else:
            f.close()


def count_docs(paths):
    total = 0
    for path in paths:
        with open_any(path) as f:  # clean: with
            total += sum(1 for _ in f)
    return total


def encode_docs(docs, pool, field):
    for doc in docs:
        try:
            with pool.borrowed_safely() as tok:  # clean: with, and the manager has a finally
                ids = tok.encode(doc[field])
        except EncodeError as e:
            log.info("document skipped: %s", e)
            continue
        if ids:
            yield ids


def encode_pairs(docs, pool):
    """Source and target of one document through the same tokenizer."""
    for doc in docs:
        try:
            with pool.borrowed() as tok:  # clean: with, what is lost inside borrowed() is accounted there
                src, tgt = tok.encode(doc["src"]), tok.encode(doc["tgt"])
        except EncodeError as e:
            log.info("pair skipped: %s", e)
            continue
        yield src, tgt


def pack(streams, seq_len, eos):
    buf = []
    for ids in streams:
        buf.extend(ids)
        buf.append(eos)
        while len(buf) >= seq_len:
            yield np.asarray(buf[:seq_len], dtype=np.uint16)
            buf = buf[seq_len:]


class OutputSet:
    """All the output files of a run, opened together or not at all."""

    def __init__(self, root, names):
        with ExitStack() as stack:
            self.files = {}
            for name in names:
                if name in self.files:
                    raise ValueError("two outputs are called %s" % name)
                f = open(os.path.join(root, name + ".bin"), "ab")  # clean: near miss, callback on the stack, which pop_all moves to self
                stack.callback(f.close)
                self.files[name] = f
            self._stack = stack.pop_all()
        self.written = dict.fromkeys(names, 0)

    def write(self, name, arr):
        self.files[name].write(arr.tobytes())
        self.written[name] += len(arr)

    def rotate(self, name, new_path):
        """Goes on in another file when the current one has reached its size."""
        self.files[name] = open(new_path, "ab")  # leak: the callback on the stack closes the first file, not this one
        self.written[name] = 0

    def close(self):
        self._stack.close()


def split_worker(path, pool, out, results):
    """Thread body: one input file, one output."""
    tok = pool.checkout(timeout=30.0)  # leak: an EncodeError leaves the loop through the outer handler
    if tok is None:
        results.put((path, "no tokenizer"))
        return
    n = 0
    try:
        for doc in read_lines([path], max_bad=20):
            ids = tok.encode(doc["text"])
            out.write("split", np.asarray(ids, dtype=np.uint16))
            n += 1
    except EncodeError as e:
        results.put((path, str(e)))
        return
    pool.checkin(tok)
    results.put((path, n))


def sample_stats(paths, pool, n):
    """Mean length over the first n documents. Used to choose the sequence length."""
    tok = pool.checkout()  # clean: near miss, closed over by the callback of the stack, also when nothing was read
    lengths = []
    with ExitStack() as stack:
        stack.callback(pool.checkin, tok)
        for path in paths:
            f = stack.enter_context(contextlib.closing(open_any(path)))  # clean: closed by the stack
            for line in itertools.islice(f, n - len(lengths)):
                try:
                    lengths.append(len(tok.encode(json.loads(line)["text"])))
                except (ValueError, KeyError, EncodeError):
                    continue
            if len(lengths) >= n:
                break
        if not lengths:
            raise BadLine("no usable document in %d files" % len(paths))
    return sum(lengths) / len(lengths)


class ThreadTokenizers(threading.local):
    """A tokenizer per thread, checked out at the first use."""

    def __init__(self, pool):
        self.pool = pool
        self.tok = None

    def get(self):
        if self.tok is None:
            self.tok = self.pool.checkout()  # leak: done() hands it back only if it was used more than ten times
        return self.tok

    def done(self):
        if self.tok is not None and self.tok.calls > 10:
            self.pool.checkin(self.tok)
        self.tok = None


def run(paths, root, pool, seq_len=2048):
    seq_len = min(seq_len, 1 << int(sample_stats(paths, pool, 200)).bit_length())
    out = OutputSet(root, ["train"])  # clean: closed in finally
    try:
        for i, arr in enumerate(pack(encode_docs(read_lines(paths, 20), pool, "text"), seq_len, eos=2)):
            out.write("train", arr)
            if i and i % 4096 == 0:
                out.rotate("train", os.path.join(root, "train.%04d.bin" % (i // 4096)))
    finally:
        out.close()
    return out.written
