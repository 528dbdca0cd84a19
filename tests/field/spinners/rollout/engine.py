"""Samples n completions for each prompt and frees their blocks."""
from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import Deque, Dict, List, Optional

from .blocks import Block, BlockManager, NoBlocks
from .request import BLOCK, RolloutRequest, Sequence, free_sequence

log = logging.getLogger(__name__)


class RolloutEngine:
    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.waiting: Deque[RolloutRequest] = deque()
        self.running: List[RolloutRequest] = []
        self._swapped: Dict[int, Sequence] = {}
        self._ids = itertools.count()

    def submit(self, prompt: List[int], n: int) -> RolloutRequest:
        req = RolloutRequest(prompt, n)
        self.waiting.append(req)
        return req

    def admit(self) -> Optional[RolloutRequest]:
        if not self.waiting:
            return None
        req = self.waiting.popleft()
        seq = Sequence(next(self._ids), list(req.prompt))
        try:
            while seq.blocks_needed() > 0:
                seq.table.append(self.manager.allocate())  # clean: near miss, the handler frees what the sequence has so far
        except NoBlocks:
            free_sequence(seq, self.manager)
            self.waiting.appendleft(req)
            return None
        req.sequences.append(seq)
        req.state = "running"
        self.running.append(req)
        return req

    def admit_fast(self) -> Optional[RolloutRequest]:
        """Prompts that fit in one block."""
        if not self.waiting:
            return None
        req = self.waiting.popleft()
        block = self.manager.allocate_above_watermark()  # leak: a long prompt goes back to the queue without its block
        if block is None:
            self.waiting.appendleft(req)
            return None
        if len(req.prompt) > BLOCK:
            self.waiting.appendleft(req)
            return None
        req.sequences.append(Sequence(next(self._ids), list(req.prompt), [block]))
        self.running.append(req)
        return req

    def attach_prefix(self, req: RolloutRequest, prefix: int) -> bool:
        if req.shared is not None:
            self.manager.decref(req.shared)
        req.shared = self.manager.lookup(prefix)  # clean: near miss, the one before was dropped, finish() drops this one
        return req.shared is not None

    def prefix_hit(self, prefix: int) -> bool:
        return self.manager.lookup(prefix) is not None  # leak: only compared with None, the reference is lost

    def warm_prefix(self, prefixes: List[int]) -> int:
        hits = 0
        for prefix in prefixes:
            block = self.manager.lookup(prefix)  # clean: near miss, None goes on, a hit is dropped again
            if block is None:
                continue
            hits += 1
            self.manager.decref(block)
        return hits

    def expand(self, req: RolloutRequest) -> None:
        parent = req.sequences[0]
        while len(req.drafts) < req.n:
            req.fork_draft(parent, next(self._ids), self.manager)  # leak: prune() drops unfinished drafts without freeing their tables

    def prune(self, req: RolloutRequest, keep: int) -> int:
        """Drop unfinished drafts when enough have finished."""
        if sum(d.finished for d in req.drafts) < keep:
            return 0
        return req.drop_unfinished()

    def append_token(self, seq: Sequence, token: int) -> bool:
        seq.tokens.append(token)
        if seq.blocks_needed() <= 0:
            return True
        try:
            seq.table.append(self.manager.allocate())  # clean: in the table of the sequence
        except NoBlocks:
            seq.tokens.pop()
            return False
        return True

    def copy_on_write(self, seq: Sequence) -> bool:
        last = seq.table[-1]
        if last.refs == 1:
            return True
        try:
            fresh = self.manager.allocate()  # clean: near miss, takes the place of the shared block, whose reference is dropped
        except NoBlocks:
            return False
        seq.table[-1] = fresh
        self.manager.decref(last)
        return True

    def publish_prompt(self, seq: Sequence, prefix: int) -> Optional[Block]:
        if not seq.table:
            return None
        block = self.manager.incref(seq.table[0])  # leak: a prefix that is already cached returns without dropping it
        if self.manager._by_prefix.get(prefix) is not None:
            return None
        self.manager.publish(block, prefix)
        return block

    def swap_out(self, seq: Sequence) -> None:
        free_sequence(seq, self.manager)
        self._swapped[seq.seq_id] = seq

    def swap_in(self, seq_id: int) -> bool:
        seq = self._swapped[seq_id]
        try:
            for _ in range(-(-len(seq.tokens) // BLOCK)):
                seq.table.append(self.manager.allocate())  # leak: a failed swap-in clears the table instead of freeing it
        except NoBlocks:
            seq.table.clear()
            return False
        del self._swapped[seq_id]
        return True

    def finish(self, req: RolloutRequest) -> None:
        for seq in itertools.chain(req.sequences, req.drafts):
            free_sequence(seq, self.manager)
        req.sequences.clear()
        req.drafts.clear()
        if req.shared is not None:
            self.manager.decref(req.shared)
            req.shared = None
        if req in self.running:
            self.running.remove(req)
        req.state = "done"

    def run(self, prompts: List[List[int]], n: int) -> int:
        for prompt in prompts:
            self.submit(prompt, n)
        completed = 0
        while self.waiting:
            req = self.admit()  # clean: in the running list, finished below
            if req is None:
                break
            for seq in list(req.sequences):
                for token in range(BLOCK):
                    if not self.append_token(seq, token):
                        log.info("sequence %d was cut", seq.seq_id)
                        break
                seq.finished = True
            completed += 1
            self.finish(req)
        return completed
