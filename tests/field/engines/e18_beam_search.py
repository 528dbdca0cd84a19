"""Beam search over shared KV blocks with copy-on-write."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


class BlockRefs:
    """Allocator and reference counts for beams that share a prefix."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref = [0] * num_blocks

    def new_block(self) -> int:
        """Take a free block, with one reference held by the caller."""
        bid = self._free.pop()  # clean: returned with its count at one
        self._ref[bid] = 1
        return bid

    def has_free(self, n: int = 1) -> bool:
        return len(self._free) >= n

    def inc_ref(self, bid: int) -> None:
        self._ref[bid] += 1  # clean: the pair of the decrement in dec_ref

    def dec_ref(self, bid: int) -> None:
        self._ref[bid] -= 1
        if self._ref[bid] == 0:
            self._free.append(bid)

    def shared(self, bid: int) -> bool:
        return self._ref[bid] > 1


@dataclass
class Beam:
    score: float
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    fresh: bool = True


class BeamPool:
    """Forks, advances and drops beams."""

    def __init__(self, refs: BlockRefs, block_size: int) -> None:
        self.refs = refs
        self.block_size = block_size

    def fork(self, parent: Beam, token: int, logp: float) -> Beam:
        child = Beam(parent.score + logp, parent.tokens + [token])
        for bid in parent.blocks:
            self.refs.inc_ref(bid)  # clean: the child carries the reference, drop lowers it
            child.blocks.append(bid)
        return child

    def drop(self, beam: Beam) -> None:
        for bid in beam.blocks:
            self.refs.dec_ref(bid)
        beam.blocks = []

    def ensure_tail(self, beam: Beam) -> bool:
        """A writable last block for the newest token."""
        used = (len(beam.tokens) - 1) // self.block_size
        if used >= len(beam.blocks):
            if not self.refs.has_free():
                return False
            beam.blocks.append(self.refs.new_block())  # clean: kept in the beam
            return True
        tail = beam.blocks[used]
        if not self.refs.shared(tail):
            return True
        if not self.refs.has_free():
            return False
        beam.blocks[used] = self.refs.new_block()  # clean: near miss, the block it overwrites was saved and is lowered next
        self.refs.dec_ref(tail)
        return True

    def rewrite_tail(self, beam: Beam) -> None:
        """Replace the last block after the token in it was corrected."""
        if beam.blocks and self.refs.has_free():
            beam.blocks[-1] = self.refs.new_block()  # leak: the block that stood there keeps its reference
            beam.fresh = True


class BeamSearch:
    def __init__(self, pool: BeamPool, width: int, eos: int) -> None:
        self.pool = pool
        self.width = width
        self.eos = eos
        self.finished: list[tuple[float, list[int]]] = []

    def expand(self, beams: list[Beam], logp: torch.Tensor) -> list[Beam]:
        """One step: fork every beam over its best tokens, keep the best."""
        cands: list[Beam] = []
        for i, beam in enumerate(beams):
            top = torch.topk(logp[i], self.width)
            for lp, tok in zip(top.values.tolist(), top.indices.tolist()):
                child = self.pool.fork(beam, tok, lp)  # clean: near miss, kept, or dropped by the slice loop or at the end token
                if tok == self.eos:
                    self.finished.append((child.score, child.tokens))
                    self.pool.drop(child)
                    continue
                cands.append(child)
        cands.sort(key=lambda b: -b.score)
        for beam in beams:
            self.pool.drop(beam)
        for loser in cands[self.width :]:
            self.pool.drop(loser)
        return cands[: self.width]

    def expand_greedy(self, beams: list[Beam], logp: torch.Tensor) -> list[Beam]:
        """Advance each beam by its single best token."""
        out: list[Beam] = []
        for i, beam in enumerate(beams):
            lp, tok = torch.max(logp[i], dim=-1)
            child = self.pool.fork(beam, int(tok), float(lp))  # leak: a finished child is recorded and not dropped
            self.pool.drop(beam)
            if int(tok) == self.eos:
                self.finished.append((child.score, child.tokens))
                continue
            out.append(child)
        return out

    def prune(self, beams: list[Beam], threshold: float) -> list[Beam]:
        best = max(b.score for b in beams)
        kept: list[Beam] = []
        for b in beams:
            if b.score < best - threshold:
                self.pool.drop(b)
                continue
            kept.append(b)
        return kept

    def diverse(self, beam: Beam, groups: list[int]) -> list[Beam]:
        """One fork per group token, unless the group repeats the last token."""
        out: list[Beam] = []
        for tok in groups:
            child = self.pool.fork(beam, tok, 0.0)  # leak: repeats are filtered out while holding references
            if beam.tokens and tok == beam.tokens[-1]:
                continue
            out.append(child)
        self.pool.drop(beam)
        return out

    def lookahead(self, beam: Beam, tok: int, scorer) -> float:
        """Score of a one-token continuation; the beam itself stays as it is."""
        child = self.pool.fork(beam, tok, 0.0)  # clean: near miss, ensure_tail may refuse but the drop comes either way
        score = float("-inf")
        if self.pool.ensure_tail(child):
            score = scorer(child.tokens, child.blocks)
        self.pool.drop(child)
        return score


def seed_beams(pool: BeamPool, prompt: list[int], width: int) -> list[Beam]:
    """All beams start from one prefilled root."""
    need = -(-len(prompt) // pool.block_size)
    if not pool.refs.has_free(need):
        return []
    root = Beam(0.0, list(prompt))
    for _ in range(need):
        root.blocks.append(pool.refs.new_block())  # clean: near miss, the root is dropped but the forks hold the blocks
    beams = [pool.fork(root, tok, 0.0) for tok in range(width)]  # clean: returned
    pool.drop(root)
    return beams


def hold_prefix(refs: BlockRefs, beam: Beam, length: int) -> list[int]:
    """Reference the first blocks of a beam for the prefix cache."""
    held: list[int] = []
    for bid in beam.blocks[:length]:
        refs.inc_ref(bid)  # leak: the counts of exclusive blocks are raised but only shared ones are listed
        if refs._ref[bid] > 2:
            held.append(bid)
    return held
