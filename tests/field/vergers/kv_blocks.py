"""Paged KV blocks of the decode engine, and the parts of the engine that use them."""
from collections import OrderedDict, deque

BLOCK = 16


class NoFreeBlocks(RuntimeError):
    pass


class BlockPool:
    def __init__(self, num_blocks):
        self._free = deque(range(num_blocks))

    @property
    def num_free(self):
        return len(self._free)

    def allocate(self):
        if not self._free:
            raise NoFreeBlocks()
        return self._free.popleft()

    def allocate_many(self, n):
        if n > len(self._free):
            raise NoFreeBlocks()
        return [self._free.popleft() for _ in range(n)]

    def free(self, block):
        self._free.append(block)


class Sequence:
    def __init__(self, seq_id, length):
        self.seq_id = seq_id
        self.length = length
        self.block_table = []

    def blocks_needed(self):
        return -(-self.length // BLOCK)


class DecodeScheduler:
    def __init__(self, pool):
        self.pool = pool
        self.running = deque()
        self.waiting = deque()

    def admit(self):
        while self.waiting and self.pool.num_free >= self.waiting[0].blocks_needed():
            seq = self.waiting.popleft()
            seq.block_table = self.pool.allocate_many(seq.blocks_needed())  # leak: preempt() replaces the table of a running sequence by an empty one without freeing its blocks
            self.running.append(seq)

    def preempt(self):
        victim = self.running.pop()
        victim.block_table = []
        self.waiting.appendleft(victim)

    def finish(self, seq):
        self.running.remove(seq)
        for block in seq.block_table:
            self.pool.free(block)
        seq.block_table = []


class DraftTable:
    def __init__(self, pool):
        self.pool = pool
        self.blocks = []
        self.tokens = 0

    def extend(self, n):
        while len(self.blocks) * BLOCK < self.tokens + n:
            self.blocks.append(self.pool.allocate())  # leak: accept() deletes the tail of the list after rejected tokens and the blocks in it are not freed
        self.tokens += n

    def accept(self, n_accepted, n_draft):
        self.tokens -= n_draft - n_accepted
        keep = -(-self.tokens // BLOCK)
        del self.blocks[keep:]

    def close(self):
        while self.blocks:
            self.pool.free(self.blocks.pop())


def table_for_prompt(pool, prompt):
    count = -(-len(prompt) // BLOCK)
    table = [pool.allocate() for _ in range(count)]  # leak: allocate() raises when the pool runs dry halfway and the blocks already in the unfinished list are lost
    return {"tokens": len(prompt), "table": table}


def reserve_for_beams(pool, width):
    got = []
    try:
        while len(got) < width:
            got.append(pool.allocate())  # clean: on NoFreeBlocks everything taken so far goes back, otherwise the caller gets the list
    except NoFreeBlocks:
        while got:
            pool.free(got.pop())
        return None
    return got


class GroupRunner:
    def __init__(self, pool):
        self.pool = pool
        self.active = []

    def add(self, seq_id, n_blocks):
        blocks = self.pool.allocate_many(n_blocks)  # leak: sweep() filters finished groups out of the list and their blocks go with them
        self.active.append((seq_id, blocks))

    def sweep(self, finished):
        self.active = [(sid, blocks) for sid, blocks in self.active if sid not in finished]

    def stop(self):
        for _, blocks in self.active:
            for block in blocks:
                self.pool.free(block)
        self.active = []


class WindowRunner:
    def __init__(self, pool):
        self.pool = pool
        self.active = {}

    def add(self, seq_id, n_blocks):
        if seq_id in self.active:
            raise KeyError(seq_id)
        self.active[seq_id] = self.pool.allocate_many(n_blocks)  # clean: sweep() frees the blocks of those it filters out, in a pass of its own

    def sweep(self, finished):
        gone = [blocks for sid, blocks in self.active.items() if sid in finished]
        self.active = {sid: blocks for sid, blocks in self.active.items() if sid not in finished}
        for block in (b for blocks in gone for b in blocks):
            self.pool.free(block)

    def stop(self):
        self.sweep(set(self.active))


class PromptCache:
    def __init__(self, pool, capacity):
        self.pool = pool
        self.capacity = capacity
        self.entries = OrderedDict()

    def insert(self, digest):
        if digest in self.entries:
            self.entries.move_to_end(digest)
            return self.entries[digest]
        block = self.pool.allocate()  # leak: the least recently used entry is popped off when the cache is over capacity and its block is dropped
        self.entries[digest] = block
        if len(self.entries) > self.capacity:
            self.entries.popitem(last=False)
        return block

    def flush(self):
        for block in self.entries.values():
            self.pool.free(block)
        self.entries.clear()


def score_prompt(pool, model, chunks):
    table = []
    try:
        for chunk in chunks:
            table.append(pool.allocate())  # clean: the finally frees the whole table on the return inside the loop and on NoFreeBlocks as well
            logits = model.forward(chunk, table)
            if logits.eos:
                return logits.score
        return 0.0
    finally:
        for block in reversed(table):
            pool.free(block)


class SwapSpace:
    def __init__(self, device_pool, host_pool, copier):
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.copier = copier
        self.on_host = {}

    def swap_out(self, seq):
        host = self.host_pool.allocate_many(len(seq.block_table))  # leak: swap_in() copies the data back and forgets the host blocks it came from
        self.copier.copy(seq.block_table, host)
        for block in seq.block_table:
            self.device_pool.free(block)
        seq.block_table = []
        self.on_host[seq.seq_id] = host

    def swap_in(self, seq):
        host = self.on_host[seq.seq_id]
        seq.block_table = self.device_pool.allocate_many(len(host))  # clean: the sequence owns them again, swap_out() and drop() free them
        self.copier.copy(host, seq.block_table)
        del self.on_host[seq.seq_id]

    def drop(self, seq):
        for block in self.on_host.pop(seq.seq_id, ()):
            self.host_pool.free(block)
        for block in seq.block_table:
            self.device_pool.free(block)
        seq.block_table = []


class ChunkedPrefill:
    def __init__(self, pool):
        self.pool = pool
        self.jobs = {}

    def begin(self, seq):
        seq.block_table = self.pool.allocate_many(seq.blocks_needed())  # leak: abort() frees only jobs in the state decode, a job aborted in prefill is forgotten with its blocks
        self.jobs[seq.seq_id] = ["prefill", seq]

    def prefilled(self, seq_id):
        self.jobs[seq_id][0] = "decode"

    def abort(self, seq_id):
        state, seq = self.jobs.pop(seq_id)
        if state == "decode":
            for block in seq.block_table:
                self.pool.free(block)
        seq.block_table = []

    def finish(self, seq_id):
        _, seq = self.jobs.pop(seq_id)
        for block in seq.block_table:
            self.pool.free(block)


def run_beams(pool, model, width, total):
    blocks = pool.allocate_many(total)  # leak: when total is no multiple of width the blocks after the last full share belong to no beam and are not freed
    share = total // width
    shares = [blocks[i * share:(i + 1) * share] for i in range(width)]
    try:
        return [model.search(mine) for mine in shares]
    finally:
        for mine in shares:
            for block in mine:
                pool.free(block)


class PagedWriter:
    def __init__(self, pool):
        self.pool = pool
        self.pages = []
        self.current = None
        self.fill = BLOCK

    def write(self, store, vector):
        if self.fill == BLOCK:
            self.current = self.pool.allocate()  # clean: current is overwritten, but every block is in pages too, and close() frees those
            self.pages.append(self.current)
            self.fill = 0
        store.put(self.current, self.fill, vector)
        self.fill += 1

    def close(self):
        self.current, self.fill = None, BLOCK
        while self.pages:
            self.pool.free(self.pages.pop())
