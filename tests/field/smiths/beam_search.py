"""Beam search over copy-on-write KV blocks with reference counts."""
from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional, Sequence

BLOCK = 4


class BlockRefs:
    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._refs: Dict[int, int] = {}

    def new_block(self) -> int:
        if not self._free:
            raise MemoryError("no free KV block")
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def incref(self, block: int) -> int:
        self._refs[block] += 1
        return block

    def decref(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            del self._refs[block]
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self._refs[block] > 1

    @property
    def live(self) -> int:
        return len(self._refs)


@dataclass(order=True)
class Beam:
    score: float
    tokens: List[int] = field(compare=False, default_factory=list)
    blocks: List[int] = field(compare=False, default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == 0


ScoreFn = Callable[[Beam], List[float]]


class BeamSearch:
    def __init__(self, refs: BlockRefs, width: int, score: ScoreFn) -> None:
        self.refs = refs
        self.width = width
        self.score = score
        self.best_seen: Optional[Beam] = None

    def fork(self, beam: Beam, token: int, delta: float) -> Beam:
        blocks = [self.refs.incref(b) for b in beam.blocks]  # clean: the child holds the counts
        return Beam(beam.score + delta, beam.tokens + [token], blocks)

    def drop(self, beam: Beam) -> None:
        for b in beam.blocks:
            self.refs.decref(b)
        beam.blocks = []

    def root(self, prompt: Sequence[int]) -> Beam:
        beam = Beam(0.0, list(prompt))
        for _ in range(0, len(prompt), BLOCK):
            beam.blocks.append(self.refs.new_block())  # clean: the beam holds it
        return beam

    def make_writable(self, beam: Beam) -> None:
        if not beam.blocks or len(beam.tokens) % BLOCK == 1:
            beam.blocks.append(self.refs.new_block())  # clean: the beam holds it
            return
        last = beam.blocks[-1]
        if self.refs.shared(last):
            copy = self.refs.new_block()  # clean: near miss, takes the place of the count given back
            beam.blocks[-1] = copy
            self.refs.decref(last)

    def expand(self, beams: List[Beam]) -> List[Beam]:
        children: List[Beam] = []
        for beam in beams:
            for token, delta in enumerate(self.score(beam)):
                child = self.fork(beam, token, delta)  # clean: near miss, the pruned ones are dropped below
                children.append(child)
        children.sort(reverse=True)
        keep, pruned = children[: self.width], children[self.width :]
        for child in pruned:
            self.drop(child)
        for beam in beams:
            self.drop(beam)
        for child in keep:
            self.make_writable(child)
        return keep

    def expand_topk(self, beams: List[Beam]) -> List[Beam]:
        heap: List[Beam] = []
        for beam in beams:
            for token, delta in enumerate(self.score(beam)):
                child = self.fork(beam, token, delta)  # leak: the child pushed out of the heap is not dropped
                if len(heap) < self.width:
                    heapq.heappush(heap, child)
                else:
                    heapq.heappushpop(heap, child)
            self.drop(beam)
        return heap

    def expand_heap(self, beams: List[Beam]) -> List[Beam]:
        heap: List[Beam] = []
        for beam in beams:
            for token, delta in enumerate(self.score(beam)):
                child = self.fork(beam, token, delta)  # clean: near miss, whatever falls out of the heap is dropped
                if len(heap) < self.width:
                    heapq.heappush(heap, child)
                else:
                    self.drop(heapq.heappushpop(heap, child))
            self.drop(beam)
        return heap

    def diverse(self, beams: List[Beam], banned: set) -> List[Beam]:
        out: List[Beam] = []
        for beam in beams:
            deltas = self.score(beam)
            token = max(range(len(deltas)), key=deltas.__getitem__)
            child = self.fork(beam, token, deltas[token])  # leak: a banned token continues without dropping the child
            self.drop(beam)
            if token in banned:
                continue
            out.append(child)
        return out

    def remember(self, beam: Beam) -> None:
        if self.best_seen is None or beam > self.best_seen:
            self.best_seen = self.fork(beam, 0, 0.0)  # leak: a better one overwrites the beam kept before

    def search(self, prompt: Sequence[int], steps: int) -> List[int]:
        beams = [self.root(prompt)]  # clean: every beam is dropped at the end
        for _ in range(steps):
            beams = self.expand(beams)  # clean: near miss, expand drops the beams it was given
        best = max(beams)
        tokens = list(best.tokens)
        for beam in beams:
            self.drop(beam)
        return tokens

    def search_eos(self, prompt: Sequence[int], steps: int) -> Optional[List[int]]:
        beams = [self.root(prompt)]  # leak: zero steps leave the loop straight to the return
        for _ in range(steps):
            beams = self.expand(beams)  # leak: a finished beam returns without dropping its siblings
            for beam in beams:
                if beam.finished:
                    self.drop(beam)
                    return beam.tokens
        return None

    def rescore(self, beam: Beam, scorer: Callable[[List[int]], float]) -> float:
        held = [self.refs.incref(b) for b in beam.blocks]  # clean: finally
        try:
            return beam.score + scorer(beam.tokens)
        finally:
            for b in held:
                self.refs.decref(b)

    def stream(self, prompt: Sequence[int], steps: int) -> Iterator[int]:
        beam = self.root(prompt)  # clean: near miss, finally runs when the consumer stops early
        try:
            for _ in range(steps):
                deltas = self.score(beam)
                token = max(range(len(deltas)), key=deltas.__getitem__)
                beam.tokens.append(token)
                self.make_writable(beam)
                yield token
        finally:
            self.drop(beam)


class PrefixShare:
    """Blocks of a system prompt that several searches start from."""

    def __init__(self, refs: BlockRefs, blocks: List[int]) -> None:
        self.refs = refs
        self.blocks = blocks

    def attach(self, tokens: List[int], limit: int) -> Optional[Beam]:
        beam = Beam(0.0, list(tokens))
        for b in self.blocks:
            self.refs.incref(b)  # leak: a prompt over the limit returns None after the counts went up
            beam.blocks.append(b)
        if len(beam.tokens) > limit:
            return None
        return beam

    def attach_checked(self, tokens: List[int], limit: int) -> Optional[Beam]:
        if len(tokens) > limit:
            return None
        beam = Beam(0.0, list(tokens))
        for b in self.blocks:
            beam.blocks.append(self.refs.incref(b))  # clean: the returned beam holds it
        return beam

    def score_only(self, search: BeamSearch, tokens: List[int]) -> float:
        beam = self.attach_checked(tokens, 4096)  # leak: only the score is kept, the beam is never dropped
        return max(search.score(beam)) if beam else 0.0

    def close(self) -> None:
        for b in self.blocks:
            self.refs.decref(b)
        self.blocks = []


def main() -> None:
    refs = BlockRefs(64)
    search = BeamSearch(refs, 2, lambda b: [-3.0, -1.0 - len(b.tokens) * 0.01, -1.5])
    print(search.search([5, 6, 7], 4))
    for tok in search.stream([1, 2], 5):
        if tok == 1:
            break
    share = PrefixShare(refs, [refs.new_block()])  # clean: share.close
    beam = share.attach_checked([1], 16)  # clean: dropped below
    assert beam is not None
    print(search.rescore(beam, lambda t: 0.5))
    for out in search.expand_heap([beam]):  # clean: every beam taken out is dropped
        search.drop(out)
    share.close()
    print("live blocks:", refs.live)


if __name__ == "__main__":
    main()
