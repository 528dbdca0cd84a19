"""Beam search on a paged cache.  Beams share blocks by reference count."""
from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch


class OutOfBlocks(Exception):
    pass


class BlockAllocator:
    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.free_ids = list(range(num_blocks))

    def allocate(self) -> int:
        if not self.free_ids:
            raise OutOfBlocks
        b = self.free_ids.pop()
        self.refs[b] = 1
        return b

    def fork(self, b: int) -> int:
        self.refs[b] += 1
        return b

    def free(self, b: int) -> None:
        self.refs[b] -= 1
        if self.refs[b] == 0:
            self.free_ids.append(b)


@dataclass
class Beam:
    tokens: list[int]
    score: float = 0.0
    blocks: list[int] = field(default_factory=list)
    done: bool = False

    def normalised(self, alpha: float) -> float:
        return self.score / math.pow((5 + len(self.tokens)) / 6, alpha)


class BeamSearcher:
    block_size = 16

    def __init__(self, model, alloc: BlockAllocator, width: int, alpha: float = 0.6) -> None:
        self.model = model
        self.alloc = alloc
        self.width = width
        self.alpha = alpha

    def _free_beam(self, beam: Beam) -> None:
        for b in beam.blocks:
            self.alloc.free(b)
        beam.blocks = []

    def _fork(self, parent: Beam, token: int, logp: float) -> Beam:
        child = Beam(parent.tokens + [token], parent.score + logp)
        for b in parent.blocks:
            child.blocks.append(self.alloc.fork(b))  # clean: handed to the caller inside the beam
        return child

    def _grow(self, beam: Beam) -> None:
        if len(beam.tokens) > len(beam.blocks) * self.block_size:
            beam.blocks.append(self.alloc.allocate())  # clean: belongs to the beam, _free_beam() frees it

    def start(self, prompt: list[int]) -> Beam:
        beam = Beam(list(prompt))
        for _ in range(-(-len(prompt) // self.block_size)):
            beam.blocks.append(self.alloc.allocate())  # clean: handed to the caller inside the beam
        return beam

    def search(self, prompt: list[int], steps: int) -> list[int]:
        beams = [self.start(prompt)]  # clean: near miss, every generation is freed when the next one exists
        for _ in range(steps):
            cand: list[tuple[float, Beam, int, float]] = []
            for beam in beams:
                logp = torch.log_softmax(self.model(beam.tokens), -1)
                top = logp.topk(self.width)
                for v, t in zip(top.values.tolist(), top.indices.tolist()):
                    cand.append((beam.score + v, beam, t, v))
            cand.sort(key=lambda c: -c[0])
            nxt = [self._fork(b, t, v) for _, b, t, v in cand[: self.width]]  # clean: becomes `beams`, freed one step later or at the end
            for beam in beams:
                self._free_beam(beam)
            for beam in nxt:
                self._grow(beam)
            beams = nxt
        best = max(beams, key=lambda b: b.normalised(self.alpha)).tokens
        for beam in beams:
            self._free_beam(beam)
        return best

    def greedy_until(self, prompt: list[int], stop: int, limit: int) -> list[int]:
        beam = self.start(prompt)  # leak: the stop token returns without freeing the beam
        for _ in range(limit):
            token = int(self.model(beam.tokens).argmax())
            if token == stop:
                return beam.tokens
            beam.tokens.append(token)
            self._grow(beam)
        self._free_beam(beam)
        return beam.tokens

    def best_child(self, parent: Beam, tokens: list[int]) -> Beam:
        best = None
        for t in tokens:
            child = self._fork(parent, t, float(self.model(parent.tokens)[t]))  # leak: children that lose are dropped with their references
            if best is None or child.score > best.score:
                best = child
        return best if best is not None else parent

    def best_child_pruned(self, parent: Beam, tokens: list[int]) -> Beam:
        best = parent
        for t in tokens:
            child = self._fork(parent, t, float(self.model(parent.tokens)[t]))  # clean: near miss, the loser of each comparison is freed
            if best is not parent and child.score <= best.score:
                self._free_beam(child)
                continue
            if best is not parent:
                self._free_beam(best)
            best = child
        return best

    def snapshot(self, beam: Beam) -> Beam:
        twin = copy.copy(beam)
        twin.blocks = [self.alloc.fork(b) for b in beam.blocks]  # clean: handed to the caller
        return twin

    def try_extend(self, beam: Beam, tokens: list[int]) -> bool:
        trial = self.snapshot(beam)  # leak: the handler forgets the trial beam
        try:
            for t in tokens:
                trial.tokens = trial.tokens + [t]
                self._grow(trial)
        except OutOfBlocks:
            return False
        self._free_beam(beam)
        beam.tokens, beam.blocks = trial.tokens, trial.blocks
        return True

    def score_suffix(self, beam: Beam, suffix: list[int]) -> float:
        trial = self.snapshot(beam)  # clean: freed at the end
        total = 0.0
        for t in suffix:
            total += float(self.model(trial.tokens)[t])
            trial.tokens = trial.tokens + [t]
        self._free_beam(trial)
        return total

    def prune(self, beams: list[Beam], keep: int) -> list[Beam]:
        scratch = self.alloc.allocate()  # leak: freed only when something is pruned
        beams = sorted(beams, key=lambda b: -b.score)
        if len(beams) <= keep:
            return beams
        for b in beams[keep:]:
            self._free_beam(b)
        self.alloc.free(scratch)
        return beams[:keep]
