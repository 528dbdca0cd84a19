"""Block tables and continuous batching for the toy engine."""
import enum
import logging
import time
from collections import deque

logger = logging.getLogger(__name__)


class OutOfBlocks(RuntimeError):
    pass


class BlockAllocator:
    """Reference counted physical blocks of one device (or of host memory)."""

    def __init__(self, num_blocks, block_size, name):
        self.block_size = block_size
        self.name = name
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._by_hash = {}

    @property
    def num_free(self):
        return len(self._free)

    def allocate(self):
        if not self._free:
            raise OutOfBlocks(self.name)
        bid = self._free.pop()  # clean: returned with one reference
        self._refs[bid] = 1
        return bid

    def allocate_many(self, n):
        got = []
        for _ in range(n):
            got.append(self.allocate())  # leak: OutOfBlocks half way drops the blocks already in the local list
        return got

    def try_allocate_many(self, n):
        if n > len(self._free):
            return None
        return [self.allocate() for _ in range(n)]  # clean: near miss, the count was checked so allocate cannot raise half way

    def share(self, bid):
        self._refs[bid] += 1
        return bid

    def lookup(self, content_hash):
        """A block with this content, with a reference for the caller."""
        bid = self._by_hash.get(content_hash)
        if bid is None or self._refs[bid] == 0:
            return None
        return self.share(bid)  # clean: the reference is the caller's

    def publish(self, bid, content_hash):
        self._by_hash[content_hash] = bid

    def release(self, bid):
        self._refs[bid] -= 1
        if self._refs[bid] == 0:
            self._free.append(bid)


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    DONE = 3
    REJECTED = 4


class Sequence:
    def __init__(self, seq_id, tokens):
        self.seq_id = seq_id
        self.tokens = list(tokens)
        self.status = Status.WAITING
        self.table = []
        self.host_table = []
        self.arrival = time.time()

    def blocks_needed(self, block_size):
        return -(-len(self.tokens) // block_size)

    def tail_is_partial(self, block_size):
        return len(self.tokens) % block_size != 0


class Scheduler:
    def __init__(self, device, host, max_len=4096, max_running=64):
        self.device = device
        self.host = host
        self.max_len = max_len
        self.max_running = max_running
        self.waiting = deque()
        self.running = []
        self.swapped = deque()
        self.copies = []

    # -- admission ---------------------------------------------------------

    def add(self, seq):
        self.waiting.append(seq)

    def admit(self):
        """Move waiting sequences to running while blocks last."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            need = seq.blocks_needed(self.device.block_size)
            table = self.device.try_allocate_many(need)  # leak: a prompt over max_len is rejected after its blocks were taken
            if table is None:
                break
            self.waiting.popleft()
            if len(seq.tokens) > self.max_len:
                logger.warning("%s: prompt of %d tokens rejected", seq.seq_id, len(seq.tokens))
                seq.status = Status.REJECTED
                continue
            seq.table = table
            seq.status = Status.RUNNING
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def admit_cached(self, seq, hashes):
        """Admission of one sequence with prefix hits, used by the chat frontend."""
        hits = []
        for h in hashes:
            bid = self.device.lookup(h)  # clean: near miss, rolled back below when the rest does not fit, else in the table
            if bid is None:
                break
            hits.append(bid)
        missing = max(0, seq.blocks_needed(self.device.block_size) - len(hits))
        fresh = self.device.try_allocate_many(missing)  # clean: becomes the tail of the block table
        if fresh is None:
            for bid in hits:
                self.device.release(bid)
            return False
        seq.table = hits + fresh
        for bid, h in zip(fresh, hashes[len(hits):]):
            self.device.publish(bid, h)
        seq.status = Status.RUNNING
        self.running.append(seq)
        return True

    # -- decoding ----------------------------------------------------------

    def append_token(self, seq, token):
        if len(seq.tokens) % self.device.block_size == 0:
            seq.table.append(self.device.allocate())  # clean: released with the table
        seq.tokens.append(token)

    def step(self, sampled):
        """sampled: list of (sequence, token) of the last forward."""
        for seq, token in sampled:
            if seq.status is not Status.RUNNING:
                continue  # preempted by an earlier turn of this loop
            try:
                self.append_token(seq, token)
            except OutOfBlocks:
                victim = max(self.running, key=lambda s: s.arrival)
                logger.info("preempting %s", victim.seq_id)
                if not self.swap_out(victim):
                    self.recompute(victim)
                continue
            if token == 0:
                self.finish(seq)

    def draft(self, seq, k, proposer, verify):
        """One speculative step; k == 0 switches it off."""
        scratch = self.device.allocate_many(k) if k else []  # leak: the blocks come back only when a token was accepted
        proposed = proposer(seq.tokens, scratch, k)
        accepted = verify(seq.tokens, proposed)
        if accepted:
            for bid in scratch:
                self.device.release(bid)
            for token in accepted:
                self.append_token(seq, token)
        return len(accepted)

    def fork(self, parent, child_id):
        """A second continuation of the same tokens, for sampling with n > 1."""
        child = Sequence(child_id, parent.tokens)
        for bid in parent.table:
            child.table.append(self.device.share(bid))  # leak: the shared tail is overwritten by _privatise_tail without release
        if parent.tail_is_partial(self.device.block_size):
            self._privatise_tail(child)
        child.status = Status.RUNNING
        self.running.append(child)
        return child

    def _privatise_tail(self, seq):
        shared = seq.table[-1]
        own = self.device.allocate()  # clean: stands in the block table afterwards
        self.copies.append((shared, own))
        seq.table[-1] = own

    # -- preemption --------------------------------------------------------

    def swap_out(self, seq):
        target = self.host.try_allocate_many(len(seq.table))  # leak: abort() of a swapped sequence forgets host_table
        if target is None:
            return False
        self.copies.extend(zip(seq.table, target))
        for bid in seq.table:
            self.device.release(bid)
        seq.table = []
        seq.host_table = target
        seq.status = Status.SWAPPED
        self.running.remove(seq)
        self.swapped.append(seq)
        return True

    def swap_in(self):
        while self.swapped:
            seq = self.swapped[0]
            table = self.device.try_allocate_many(len(seq.host_table))  # clean: None or becomes the block table
            if table is None:
                return
            self.swapped.popleft()
            self.copies.extend(zip(seq.host_table, table))
            for bid in seq.host_table:
                self.host.release(bid)
            seq.host_table = []
            seq.table = table
            seq.status = Status.RUNNING
            self.running.append(seq)

    def recompute(self, seq):
        self._drop_table(seq)
        self.running.remove(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    # -- the end -----------------------------------------------------------

    def _drop_table(self, seq):
        for bid in reversed(seq.table):
            self.device.release(bid)
        seq.table = []

    def finish(self, seq):
        self._drop_table(seq)
        self.running.remove(seq)
        seq.status = Status.DONE

    def abort(self, seq_id):
        for queue in (self.waiting, self.running, self.swapped):
            for seq in list(queue):
                if seq.seq_id == seq_id:
                    queue.remove(seq)
                    self._drop_table(seq)
                    seq.status = Status.DONE
                    return True
        return False
