"""Beam search on shared KV blocks: beams fork and share their prefix by reference counts."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Callable, List, Tuple


class RefCounter:
    def __init__(self, n: int) -> None:
        self._counts = [0] * n
        self._free = list(range(n))

    def new(self) -> int:
        if not self._free:
            raise MemoryError("no kv block")
        b = self._free.pop()
        self._counts[b] = 1
        return b

    def incref(self, block: int) -> None:
        assert self._counts[block] > 0
        self._counts[block] += 1

    def decref(self, block: int) -> None:
        self._counts[block] -= 1
        if self._counts[block] == 0:
            self._free.append(block)

    def count(self, block: int) -> int:
        return self._counts[block]


@dataclass(order=True)
class Beam:
    score: float
    tokens: List[int] = field(compare=False, default_factory=list)
    blocks: List[int] = field(compare=False, default_factory=list)


Step = Callable[[List[int]], List[Tuple[int, float]]]


class BeamSearcher:
    def __init__(self, refs: RefCounter, width: int, block_size: int, eos: int) -> None:
        self.refs = refs
        self.width = width
        self.block_size = block_size
        self.eos = eos

    def start(self, prompt: List[int]) -> Beam:
        n = -(-len(prompt) // self.block_size)
        return Beam(0.0, list(prompt), [self.refs.new() for _ in range(n)])  # clean: the beam owns them, drop() decrefs

    def drop(self, beam: Beam) -> None:
        for b in beam.blocks:
            self.refs.decref(b)
        beam.blocks = []

    def fork(self, beam: Beam, token: int, logp: float) -> Beam:
        for b in beam.blocks:
            self.refs.incref(b)  # clean: the returned child holds these counts
        child = Beam(beam.score + logp, beam.tokens + [token], list(beam.blocks))
        if len(child.tokens) > len(child.blocks) * self.block_size:
            child.blocks.append(self.refs.new())  # clean: owned by the child
        return child

    def fork_unique(self, beam: Beam, token: int, logp: float, seen: set) -> Beam | None:
        for b in beam.blocks:
            self.refs.incref(b)  # leak: a duplicate returns None after the counts went up
        key = tuple(beam.tokens + [token])
        if key in seen:
            return None
        seen.add(key)
        return Beam(beam.score + logp, list(key), list(beam.blocks))

    def copy_on_write(self, beam: Beam) -> int:
        last = beam.blocks[-1]
        if self.refs.count(last) == 1:
            return last
        fresh = self.refs.new()  # clean: near miss, takes the place of the shared block, which is decreffed
        self.refs.decref(last)
        beam.blocks[-1] = fresh
        return fresh

    def make_private(self, beam: Beam) -> None:
        for i, b in enumerate(beam.blocks):
            fresh = self.refs.new()  # leak: blocks with a single user are skipped after the new one is there
            if self.refs.count(b) == 1:
                continue
            self.refs.decref(b)
            beam.blocks[i] = fresh

    def search(self, prompt: List[int], step: Step, max_steps: int) -> List[int]:
        beams = [self.start(prompt)]  # clean: all beams are dropped when they are expanded or at the end
        for _ in range(max_steps):
            children: List[Beam] = []
            for beam in beams:
                for token, logp in step(beam.tokens):
                    children.append(self.fork(beam, token, logp))  # clean: losers are dropped, winners become beams
                self.drop(beam)
            beams = heapq.nlargest(self.width, children)
            for c in children:
                if not any(c is b for b in beams):
                    self.drop(c)
            if beams and beams[0].tokens[-1] == self.eos:
                break
        best = list(max(beams).tokens) if beams else []
        for beam in beams:
            self.drop(beam)
        return best

    def search_simple(self, prompt: List[int], step: Step, max_steps: int) -> List[int]:
        beams = [self.start(prompt)]  # clean: every generation is dropped after its children exist
        for _ in range(max_steps):
            children = []
            for beam in beams:
                for token, logp in step(beam.tokens):
                    children.append(self.fork(beam, token, logp))  # leak: those that nlargest leaves out keep their counts
                self.drop(beam)
            beams = heapq.nlargest(self.width, children)
        best = max(beams)
        tokens = list(best.tokens)
        for beam in beams:
            self.drop(beam)
        return tokens

    def greedy(self, prompt: List[int], step: Step, max_steps: int) -> List[int]:
        beam = self.start(prompt)  # clean: near miss, each child replaces a dropped parent
        for _ in range(max_steps):
            token, logp = max(step(beam.tokens), key=lambda t: t[1])
            child = self.fork(beam, token, logp)  # clean: becomes the beam and is dropped after the loop
            self.drop(beam)
            beam = child
            if token == self.eos:
                break
        tokens = beam.tokens
        self.drop(beam)
        return tokens

    def perplexity(self, prompt: List[int], step: Step) -> float:
        beam = self.start(prompt)  # leak: a step without candidates returns infinity before drop()
        candidates = step(beam.tokens)
        if not candidates:
            return float("inf")
        score = max(lp for _, lp in candidates)
        self.drop(beam)
        return -score
