"""Beam search on shared KV blocks with copy on write."""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field


class KVExhausted(RuntimeError):
    """No KV block is left."""


class SharedBlocks:
    """Block ids with a reference counter; the free ids form a set."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = set(range(num_blocks))
        self._refs: Counter[int] = Counter()

    def new_block(self) -> int:
        if not self._unused:
            raise KVExhausted
        block = self._unused.pop()  # clean: to the caller with one reference
        self._refs[block] = 1
        return block

    def share(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def share_all(self, blocks: list[int]) -> list[int]:
        """One more reference to each block; returns the shared list."""
        return [self.share(b) for b in blocks]  # clean: near miss, the list with all references goes to the caller

    def unref(self, block: int) -> None:
        self._refs[block] -= 1
        if not self._refs[block]:
            del self._refs[block]
            self._unused.add(block)

    def unref_all(self, blocks: list[int]) -> None:
        for block in blocks:
            self.unref(block)

    def is_shared(self, block: int) -> bool:
        return self._refs[block] > 1


@dataclass
class Beam:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    score: float = 0.0

    def length_penalized(self, alpha: float) -> float:
        return self.score / math.pow(max(1, len(self.tokens)), alpha)


class BeamSearch:
    """Beam search for one prompt."""

    def __init__(self, kv: SharedBlocks, width: int, block_size: int, eos: int, alpha: float = 1.0) -> None:
        self.kv = kv
        self.width = width
        self.block_size = block_size
        self.eos = eos
        self.alpha = alpha
        self.beams: list[Beam] = []
        self.finished: list[Beam] = []

    def start(self, prompt: list[int]) -> bool:
        """Create the first beam."""
        blocks: list[int] = []
        for _ in range(0, len(prompt), self.block_size):
            try:
                blocks.append(self.kv.new_block())  # leak: the handler returns without the blocks that are already in the list
            except KVExhausted:
                return False
        self.beams.append(Beam(list(prompt), blocks))
        return True

    def _fork(self, parent: Beam, token: int, score: float) -> Beam:
        blocks = self.kv.share_all(parent.blocks)  # clean: held by the new beam, which is returned
        return Beam(parent.tokens + [token], blocks, score)

    def _writable_tail(self, beam: Beam) -> int:
        """Block that the next token is written to, private to the beam."""
        if (len(beam.tokens) - 1) % self.block_size == 0:
            beam.blocks.append(self.kv.new_block())  # clean: kept in the beam's blocks
            return beam.blocks[-1]
        tail = beam.blocks[-1]
        if self.kv.is_shared(tail):
            beam.blocks[-1] = self.kv.new_block()  # clean: near miss, the replaced block is unreferenced on the next line
            self.kv.unref(tail)
        return beam.blocks[-1]

    def expand(self, candidates: list[list[tuple[int, float]]]) -> None:
        """One step: fork every beam for its candidates and keep the best."""
        forks: list[Beam] = []
        for beam, options in zip(self.beams, candidates):
            for token, logp in options:
                fork = self._fork(beam, token, beam.score + logp)  # clean: near miss, the losers of the cut are unreferenced below
                if token == self.eos:
                    self.finished.append(fork)
                    continue
                forks.append(fork)
        for beam in self.beams:
            self.kv.unref_all(beam.blocks)
        forks.sort(key=lambda b: b.score, reverse=True)
        for loser in forks[self.width:]:
            self.kv.unref_all(loser.blocks)
        self.beams = forks[:self.width]
        for beam in self.beams:
            self._writable_tail(beam)  # clean: near miss, only the id is ignored, the block is in the beam

    def keep_best_finished(self) -> None:
        """Cut the finished beams to the width."""
        self.finished.sort(key=lambda b: b.length_penalized(self.alpha), reverse=True)
        for beam in self.finished[self.width:]:
            self.kv.unref_all(beam.blocks)
        del self.finished[self.width:]

    def best_continuation(self, options: list[tuple[int, float]]) -> Beam | None:
        """The best fork of the first beam; the caller owns it."""
        best: Beam | None = None
        for token, logp in options:
            fork = self._fork(self.beams[0], token, self.beams[0].score + logp)  # leak: a better fork overwrites the best one so far, its blocks stay referenced
            if best is None or fork.score > best.score:
                best = fork
                continue
            self.kv.unref_all(fork.blocks)
        return best

    def peek(self, options: list[tuple[int, float]]) -> list[int]:
        """Tokens the first beam would have after this step."""
        best = self.best_continuation(options)  # leak: the tokens are copied out, the fork with its blocks is dropped
        if best is None:
            return []
        return list(best.tokens)

    def snapshot(self) -> list[Beam]:
        """A frozen copy of all beams, to roll back to."""
        return [Beam(list(b.tokens), self.kv.share_all(b.blocks), b.score) for b in self.beams]  # clean: handed to the caller

    def try_expand(self, candidates: list[list[tuple[int, float]]], min_score: float) -> bool:
        """Expand unless the best beam falls below min_score."""
        saved = self.snapshot()  # leak: the successful step returns with the snapshot still referenced
        self.expand(candidates)
        if self.beams and self.beams[0].score >= min_score:
            return True
        for beam in self.beams:
            self.kv.unref_all(beam.blocks)
        self.beams = saved
        return False

    def score_with(self, rescorer) -> float:
        """Best score of a rescoring model over the current beams."""
        best = -math.inf
        for beam in self.beams:
            held = self.kv.share_all(beam.blocks)  # leak: a beam without a score continues with its blocks referenced once more
            score = rescorer(beam.tokens, held)
            if score is None:
                continue
            best = max(best, score)
            self.kv.unref_all(held)
        return best

    def close(self) -> None:
        for beam in self.beams + self.finished:
            self.kv.unref_all(beam.blocks)
        self.beams, self.finished = [], []
