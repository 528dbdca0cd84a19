"""Context-parallel evaluation helpers on top of RingAttention."""
import queue
import threading

from .kvpool import KVPool, Pinned


def score_blocks(block, scorers):
    """Run all scorers on one block; the block belongs to the caller."""
    total = 0.0
    with Pinned(block) as b:  # clean: __exit__ drops the extra reference
        for fn in scorers:
            total += fn(b.storage)
    return total


def first_hit(block, scorers, floor):
    extra = block.retain()  # leak: the return on a hit skips the drop
    for i, fn in enumerate(scorers):
        if fn(extra.storage) > floor:
            return i
    extra.drop()
    return -1


class Prefetcher(threading.Thread):
    """Fills blocks from a reader; None ends the stream."""

    def __init__(self, pool: KVPool, reader, depth=2):
        super().__init__(daemon=True)
        self.pool = pool
        self.reader = reader
        self.ready = queue.Queue(depth)

    def run(self):
        for kv in self.reader:
            blk = self.pool.alloc()  # clean: near miss, put on the queue, the consumer drops it
            if blk is None:
                continue
            blk.storage.copy_(kv)
            self.ready.put(blk)
        self.ready.put(None)


def evaluate(pool, reader, scorers):
    pre = Prefetcher(pool, reader)
    pre.start()
    total, n = 0.0, 0
    while True:
        blk = pre.ready.get()
        if blk is None:
            break
        total += score_blocks(blk, scorers)
        blk.drop()
        n += 1
    pre.join()
    return total / max(n, 1)


class Worker(threading.Thread):
    def __init__(self, fn):
        super().__init__(daemon=True)
        self.fn = fn
        self.inbox = queue.Queue()

    def submit(self, block, on_done):
        self.inbox.put((block, on_done))

    def run(self):
        while True:
            block, on_done = self.inbox.get()
            if block is None:
                break
            try:
                self.fn(block.storage)
            finally:
                on_done(block)


def fan_out(block, workers):
    """Each worker gets its own reference and drops it when it is done."""
    for w in workers:
        w.submit(block.retain(), lambda b: b.drop())  # clean: near miss, the worker's done callback drops it
    block.drop()


def ping_pong(pool, frames, attend):
    pair = pool.alloc_double()  # clean: both dropped at the end, whichever is current
    if pair is None:
        return 0
    cur, alt = pair
    done = 0
    for kv in frames:
        alt.storage.copy_(kv)
        cur, alt = alt, cur
        attend(cur.storage)
        done += 1
    cur.drop()
    alt.drop()
    return done
