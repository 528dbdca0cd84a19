"""Beam search over block tables: beams are reordered each step."""
from typing import Dict, List


class BeamBlocks:
    def __init__(self):
        self.counter = 0
        self.cold = []

    def make(self):
        if self.cold:
            return self.cold.pop()
        self.counter += 1
        return self.counter

    def unmake(self, block):
        self.cold.append(block)


class Beams:
    def __init__(self, blocks: BeamBlocks, width: int):
        self.blocks = blocks
        self.tables: Dict[int, List[int]] = {}
        for beam in range(width):
            self.tables[beam] = [blocks.make()]  # clean: near miss, reorder and finish unmake what they drop

    def extend(self, beam: int) -> None:
        self.tables[beam].append(self.blocks.make())  # clean: near miss, appended to the beam's table

    def reorder(self, survivors: List[int]) -> None:
        keep = set(survivors)
        dropped = [b for b in self.tables if b not in keep]
        for beam in dropped:
            for block in self.tables.pop(beam):
                self.blocks.unmake(block)

    def finish(self) -> List[int]:
        lengths = []
        for table in self.tables.values():
            lengths.append(len(table))
            while table:
                self.blocks.unmake(table.pop())
        self.tables = {}
        return lengths


class FastBeams:
    def __init__(self, blocks: BeamBlocks):
        self.blocks = blocks
        self.tables: Dict[int, List[int]] = {}

    def start(self, beam: int) -> None:
        if beam not in self.tables:
            self.tables[beam] = [self.blocks.make()]  # leak: reorder rebuilds the dict without the losers
        return None

    def reorder(self, survivors: List[int]) -> None:
        self.tables = {b: t for b, t in self.tables.items() if b in survivors}

    def finish(self) -> int:
        n = 0
        for table in self.tables.values():
            for block in table:
                self.blocks.unmake(block)
                n += 1
        self.tables.clear()
        return n


def score_candidates(blocks: BeamBlocks, scores: List[float], cutoff: float) -> int:
    kept = 0
    for score in scores:
        block = blocks.make()  # clean: near miss, one unmake for both arms behind the if
        if score < cutoff:
            delta = 0
        else:
            delta = 1
        blocks.unmake(block)
        kept += delta
    return kept


def best_candidate(blocks: BeamBlocks, scores: List[float]) -> int:
    held = {i: blocks.make() for i in range(len(scores))}  # leak: the winner's block is taken out and not unmade
    winner = max(range(len(scores)), key=scores.__getitem__)
    held.pop(winner)
    for block in held.values():
        blocks.unmake(block)
    return winner


def worst_candidate(blocks: BeamBlocks, scores: List[float]) -> int:
    held = {i: blocks.make() for i in range(len(scores))}  # clean: near miss, the loser's block unmade first, the others after
    loser = min(range(len(scores)), key=scores.__getitem__)
    blocks.unmake(held.pop(loser))
    for block in held.values():
        blocks.unmake(block)
    return loser
