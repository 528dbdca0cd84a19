# Token shards as chained generators. A block taken from BLOCKS belongs to whoever got it last; give() ends its life.
import glob, os, random, struct, threading
from collections import OrderedDict, deque

import numpy as np

BLOCK = 1 << 16


class Dry(Exception): pass
class BadShard(Exception): pass


class Blk:
    __slots__ = "buf", "n", "src"
    def __init__(self):
        self.buf, self.n, self.src = np.empty(BLOCK, np.uint16), 0, ""

    @property
    def tokens(self): return self.buf[:self.n]


class Blocks:
    def __init__(self, count):
        self.free, self.lock, self.count = [Blk() for _ in range(count)], threading.Lock(), count

    def take(self):
        with self.lock:
            if not self.free: raise Dry(f"{self.count} blocks are out")
            return self.free.pop()  # clean: handed to the caller

    def take_like(self, other):
        with self.lock:
            if not self.free: raise Dry(f"{self.count} blocks are out")
            b = self.free.pop()  # leak: a source longer than a block raises with the fresh one popped
        if other.size > BLOCK: raise BadShard("too long")
        b.n = other.size
        b.buf[:b.n] = other
        return b

    def give(self, b):
        b.n, b.src = 0, ""
        with self.lock: self.free.append(b)


class Files:
    """Open shard files, least recently used ones are closed. A handle that is out is not in the table."""

    def __init__(self, keep): self.keep, self.table = keep, OrderedDict()

    def checkout(self, path):
        f = self.table.pop(path, None)  # clean: near miss, the caller gets it, and a missing one is opened below
        if f is None:
            f = open(path, "rb")  # clean: the caller checks it in
        return f

    def checkin(self, path, f):
        if path in self.table:
            f.close()
            return
        self.table[path] = f
        while len(self.table) > self.keep:
            self.table.popitem(last=False)[1].close()

    def close(self):
        while self.table: self.table.popitem()[1].close()


BLOCKS, FILES = Blocks(256), Files(32)


def header(path):
    f = FILES.checkout(path)  # leak: a wrong magic number raises, and index() goes on to the next file
    f.seek(0)
    magic, n = struct.unpack("<4sQ", f.read(12))
    if magic != b"TOKS": raise BadShard(path)
    FILES.checkin(path, f)
    return n


def index(pattern):
    out = {}
    for p in sorted(glob.glob(pattern)):
        try: out[p] = header(p)
        except BadShard as e: print("skipping", e)
    return out


def read(path, start=0):
    """Yields blocks; the receiver owns them."""
    f = FILES.checkout(path)  # clean: near miss, checked in when the generator ends, is closed or is collected
    try:
        f.seek(12 + 2 * start)
        while raw := f.read(2 * BLOCK):
            b = BLOCKS.take()  # clean: near miss, yielded to the receiver
            b.n, b.src = len(raw) // 2, path
            b.buf[:b.n] = np.frombuffer(raw, np.uint16, b.n)
            yield b
    finally:
        FILES.checkin(path, f)


def chain(paths, seed):
    paths = list(paths)
    random.Random(seed).shuffle(paths)
    for p in paths: yield from read(p)  # clean: passed on to the receiver


def skip(stream, k):
    for _ in range(k):
        next(stream, None)  # leak: the block that comes out of the stream is thrown away
    return stream


def nonempty(stream, pad):
    for b in stream:  # leak: a block of nothing but padding is passed over without give()
        if (b.tokens == pad).all(): continue
        yield b


def shuffled(stream, size, rng):
    pool = []
    try:
        for b in stream:  # clean: near miss, goes to the pool or to the receiver, and the finally gives what is left in the pool
            if len(pool) < size:
                pool.append(b)
                continue
            j = rng.randrange(size)
            pool[j], b = b, pool[j]
            yield b
        while pool: yield pool.pop()
    finally:
        while pool: BLOCKS.give(pool.pop())


def mixture(streams, weights, rng):
    """Samples streams by weight until one of them ends."""
    heads = [next(s, None) for s in streams]  # leak: the end of one stream returns with the heads of the others
    while True:
        i = rng.choices(range(len(streams)), weights)[0]
        if heads[i] is None: return
        out, heads[i] = heads[i], next(streams[i], None)  # leak: the end of one stream returns with the heads of the others
        yield out


def paired(prompts, answers):
    for a, b in zip(prompts, answers):  # leak: zip has taken a block from the first stream when the second ends
        n = min(a.n, b.n)
        both = np.stack([a.tokens[:n], b.tokens[:n]])
        BLOCKS.give(a)
        BLOCKS.give(b)
        yield both


class Peek:
    def __init__(self, stream): self.stream, self.back = stream, deque()

    def __iter__(self): return self

    def __next__(self):
        return self.back.popleft() if self.back else next(self.stream)  # clean: goes to the caller

    def peek(self):
        b = next(self, None)  # clean: near miss, put back at once, close() gives what was never taken
        if b is not None: self.back.appendleft(b)
        return b.n if b is not None else 0

    def close(self):
        while self.back: BLOCKS.give(self.back.popleft())
        self.stream.close()


def rows(stream, seq):
    """Fixed-length rows; plain arrays, no block leaves this function."""
    tail = np.empty(0, np.uint16)
    for b in stream:  # clean: given back before the rows go out
        flat = np.concatenate([tail, b.tokens])
        BLOCKS.give(b)
        k = len(flat) // seq
        tail = flat[k * seq:]
        yield from flat[:k * seq].reshape(k, seq)


def histogram(path, vocab):
    counts = np.zeros(vocab, np.int64)
    for b in read(path):  # clean: given in finally, also when the bincount refuses
        try: counts += np.bincount(b.tokens, minlength=vocab)[:vocab]
        except ValueError: print("odd block in", path)
        finally: BLOCKS.give(b)
    return counts


def dedup(stream, seen):
    for b in stream:  # clean: either yielded or given
        h = hash(b.tokens.tobytes())
        if h in seen:
            BLOCKS.give(b)
            continue
        seen.add(h)
        yield b


def copy_first(path, out):
    st = Peek(read(path))
    try:
        if st.peek() == 0: return 0
        b = next(st)  # clean: given before the return
        out[:b.n] = b.tokens
        n = b.n
        BLOCKS.give(b)
        return n
    finally:
        st.close()


def loader(root, seq, seed, resume=0, pad=0):
    rng = random.Random(seed)
    idx = index(os.path.join(root, "*.toks"))
    stream = skip(chain(idx, seed), resume)
    yield from rows(shuffled(dedup(nonempty(stream, pad), set()), 64, rng), seq)
