"""Prefill to decode hand-off of KV blocks: the prefill side leases blocks, sends them, the decode side lands them."""
from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field

import torch

log = logging.getLogger(__name__)

BLOCK = 16


class Phase(enum.Enum):
    QUEUED = 0
    PREFILL = 1
    SENDING = 2
    DECODE = 3
    DONE = 4


@dataclass
class Seq:
    rid: str
    tokens: list[int]
    phase: Phase = Phase.QUEUED
    blocks: list[int] = field(default_factory=list)
    tail: int | None = None


class BlockStore:
    def __init__(self, n: int, heads: int, dim: int) -> None:
        self.kv = torch.zeros(n, 2, BLOCK, heads, dim)
        self._free = list(range(n))
        self._shares = [0] * n

    def carve(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        got = [self._free.pop() for _ in range(count)]  # clean: returned to the caller
        for b in got:
            self._shares[b] = 1
        return got

    def carve_one(self) -> int | None:
        got = self.carve(1)  # clean: its one block is returned
        return got[0] if got else None

    def share(self, blocks: list[int]) -> list[int]:
        for b in blocks:
            self._shares[b] += 1
        return list(blocks)

    def drop(self, blocks: list[int]) -> None:
        for b in blocks:
            self._shares[b] -= 1
            if self._shares[b] == 0:
                self._free.append(b)

    def room(self) -> int:
        return len(self._free)

    def fork(self, blocks: list[int]) -> list[int] | None:
        """Shares the full blocks and copies the last."""
        shared = self.share(blocks[:-1])  # leak: not dropped when no block is left for the copy
        last = self.carve_one()  # clean: returned within the list
        if last is None:
            return None
        self.kv[last].copy_(self.kv[blocks[-1]])
        return shared + [last]


class Prefiller:
    def __init__(self, store: BlockStore, model, link) -> None:
        self.store = store
        self.model = model
        self.link = link
        self.running: dict[str, Seq] = {}
        self.sending: dict[str, Seq] = {}

    def admit(self, seq: Seq) -> bool:
        need = (len(seq.tokens) + BLOCK - 1) // BLOCK
        blocks = self.store.carve(need)  # clean: near miss, in the sequence, which running and sending hold until on_sent
        if blocks is None:
            return False
        seq.blocks = blocks
        seq.phase = Phase.PREFILL
        self.running[seq.rid] = seq
        return True

    def admit_bounded(self, seq: Seq, limit: int) -> bool:
        need = (len(seq.tokens) + BLOCK - 1) // BLOCK
        blocks = self.store.carve(need)  # leak: refused above the limit with the blocks in a local
        if blocks is None or len(self.running) >= limit:
            return False
        seq.blocks = blocks
        seq.phase = Phase.PREFILL
        self.running[seq.rid] = seq
        return True

    def step(self) -> None:
        for rid in list(self.running):
            seq = self.running[rid]
            self.model.prefill(seq.tokens, self.store.kv, seq.blocks)
            del self.running[rid]
            seq.phase = Phase.SENDING
            self.sending[rid] = seq
            self.link.send(rid, self.store.kv[seq.blocks])

    def on_sent(self, rid: str) -> None:
        seq = self.sending.pop(rid, None)
        if seq is not None:
            self.store.drop(seq.blocks)
            seq.blocks = []

    def cancel(self, rid: str) -> None:
        seq = self.running.pop(rid, None) or self.sending.pop(rid, None)
        if seq is not None:
            self.store.drop(seq.blocks)
            seq.blocks = []
            seq.phase = Phase.DONE

    def embed(self, tokens: list[int]) -> torch.Tensor | None:
        block = self.store.carve_one()  # leak: long inputs return None with the block taken
        if block is None:
            return None
        if len(tokens) > BLOCK:
            log.warning("embed takes %d tokens at most", BLOCK)
            return None
        self.model.prefill(tokens, self.store.kv, [block])
        vec = self.store.kv[block].mean(dim=(0, 1)).clone()
        self.store.drop([block])
        return vec

    def prefix(self, seq: Seq, parent: Seq, matched: int) -> bool:
        head = self.store.share(parent.blocks[: matched // BLOCK])  # clean: near miss, dropped on failure and else in seq.blocks
        rest = self.store.carve((len(seq.tokens) - matched) // BLOCK + 1)  # clean: in seq.blocks
        if rest is None:
            self.store.drop(head)
            return False
        seq.blocks = head + rest
        self.running[seq.rid] = seq
        return True


class Decoder:
    def __init__(self, store: BlockStore, model) -> None:
        self.store = store
        self.model = model
        self.active: dict[str, Seq] = {}

    def land(self, seq: Seq, payload: torch.Tensor) -> bool:
        blocks = self.store.carve(payload.shape[0])  # clean: in the sequence, active until finish()
        if blocks is None:
            return False
        self.store.kv[blocks] = payload
        seq.blocks = blocks
        seq.phase = Phase.DECODE
        self.active[seq.rid] = seq
        return True

    def draft_tail(self, rid: str) -> None:
        """A block for speculative tokens, settled once they are verified."""
        seq = self.active[rid]
        seq.tail = self.store.carve_one()  # leak: a rejected tail is set to None without being dropped

    def settle_tail(self, rid: str, accepted: bool) -> None:
        seq = self.active[rid]
        if seq.tail is not None and accepted:
            seq.blocks.append(seq.tail)
        seq.tail = None

    def finish(self, rid: str) -> None:
        seq = self.active.pop(rid, None)
        if seq is None:
            return
        if seq.tail is not None:
            self.store.drop([seq.tail])
        self.store.drop(seq.blocks)
        seq.phase = Phase.DONE

    def beam(self, rid: str, width: int) -> list[list[int]]:
        """Forks for a beam; finish_beam drops those not chosen."""
        seq = self.active[rid]
        forks = []
        for _ in range(width):
            f = self.store.fork(seq.blocks)  # clean: the short list is returned to the caller
            if f is None:
                break
            forks.append(f)
        return forks

    def finish_beam(self, rid: str, forks: list[list[int]], best: int) -> None:
        seq = self.active[rid]
        self.store.drop(seq.blocks)
        seq.blocks = forks[best]
        for i, f in enumerate(forks):
            if i != best:
                self.store.drop(f)

    def search(self, rid: str) -> bool:
        forks = self.beam(rid, 4)  # leak: forks are left when the model finds none of them good
        if not forks:
            return False
        best = self.model.choose(self.store.kv, forks)
        if best < 0:
            return False
        self.finish_beam(rid, forks, best)
        return True
