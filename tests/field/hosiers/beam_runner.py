"""Beam search and CUDA-graph batch runner: state rows with copy-on-branch, graph input slots."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

import torch


class StateRows:
    """Rows in the recurrent-state cache of a hybrid model; rows are copied, never shared."""

    def __init__(self, n: int, width: int) -> None:
        self.cache = torch.zeros(n, width)
        self._vacant = list(range(n))

    def checkout_row(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def clone_row(self, src: int) -> Optional[int]:
        dst = self.checkout_row()  # clean: handed to the caller
        if dst is None:
            return None
        self.cache[dst].copy_(self.cache[src])
        return dst

    def retire_row(self, row: int) -> None:
        self.cache[row].zero_()
        self._vacant.append(row)


@dataclass(order=True)
class Beam:
    score: float
    row: int = field(compare=False)
    tokens: list[int] = field(compare=False, default_factory=list)


class BeamSearch:
    def __init__(self, rows: StateRows, width: int, score: Callable[[int], list[tuple[int, float]]]) -> None:
        self.rows = rows
        self.width = width
        self.score = score
        self.beams: list[Beam] = []
        self.hypotheses: list[Beam] = []
        self.eos = 2

    def start(self, prompt: list[int]) -> bool:
        if self.beams:
            return False
        row = self.rows.checkout_row()  # clean: in the first beam, stop retires the beams' rows
        if row is None:
            return False
        self.beams = [Beam(0.0, row, list(prompt))]
        return True

    def step(self) -> None:
        grown: list[Beam] = []
        for beam in self.beams:
            for token, logp in self.score(beam.row)[:self.width]:
                row = self.rows.clone_row(beam.row)  # clean: near miss, survivors keep it, losers retire
                if row is None:
                    break
                grown.append(Beam(beam.score + logp, row, beam.tokens + [token]))
        for beam in self.beams:
            self.rows.retire_row(beam.row)
        grown.sort(reverse=True)
        for loser in grown[self.width:]:
            self.rows.retire_row(loser.row)
        self.beams = grown[:self.width]

    def finish_ended(self) -> int:
        """Ended beams keep their tokens only."""
        alive = []
        for beam in self.beams:
            if beam.tokens[-1] == self.eos:
                self.rows.retire_row(beam.row)
                self.hypotheses.append(Beam(beam.score, -1, beam.tokens))
            else:
                alive.append(beam)
        self.beams = alive
        return len(self.hypotheses)

    def stop(self) -> list[Beam]:
        for beam in self.beams:
            self.rows.retire_row(beam.row)
        self.beams = []
        return sorted(self.hypotheses, reverse=True)


class DiverseBeamSearch:
    """Groups are advanced in turn; each group has rows of its own."""

    def __init__(self, rows: StateRows, groups: int, score: Callable[[int], list[tuple[int, float]]]) -> None:
        self.rows = rows
        self.groups: list[list[Beam]] = [[] for _ in range(groups)]
        self.score = score

    def start(self, prompt: list[int]) -> int:
        n = 0
        self.stop()
        for group in self.groups:
            row = self.rows.checkout_row()  # clean: in its group, stop retires the rows of all groups
            if row is None:
                break
            group.append(Beam(0.0, row, list(prompt)))
            n += 1
        return n

    def step_group(self, g: int, width: int) -> None:
        grown: list[Beam] = []
        for beam in self.groups[g]:
            for token, logp in self.score(beam.row)[:width]:
                row = self.rows.clone_row(beam.row)  # leak: the beams cut off by the slice keep their rows
                if row is None:
                    break
                grown.append(Beam(beam.score + logp, row, beam.tokens + [token]))
        for beam in self.groups[g]:
            self.rows.retire_row(beam.row)
        self.groups[g] = sorted(grown, reverse=True)[:width]

    def stop(self) -> None:
        for group in self.groups:
            while group:
                self.rows.retire_row(group.pop().row)


class GraphSlots:
    """Input slots of captured graphs: static buffers, addressed by (batch size, index)."""

    def __init__(self, sizes: list[int], copies: int) -> None:
        self._open: dict[int, list[int]] = {s: list(range(copies)) for s in sorted(sizes)}

    def attach(self, batch: int) -> Optional[tuple[int, int]]:
        for size, free in self._open.items():
            if size >= batch and free:
                return size, free.pop()
        return None

    def detach(self, slot: tuple[int, int]) -> None:
        size, i = slot
        self._open[size].append(i)


class GraphRunner:
    def __init__(self, slots: GraphSlots, rows: StateRows, replay: Callable) -> None:
        self.slots = slots
        self.rows = rows
        self.replay = replay
        self.current: Optional[tuple[int, int]] = None
        self.eager_steps = 0

    def run_micro(self, ids: list[int], parts: int) -> list[torch.Tensor]:
        outs = []
        step = max(1, len(ids) // parts)
        slot = None
        for i in range(0, len(ids), step):
            slot = self.slots.attach(step)  # leak: detached once, after the loop
            if slot is None:
                return outs
            outs.append(self.replay(slot, ids[i:i + step]).clone())
        if slot is not None:
            self.slots.detach(slot)
        return outs

    def run_padded(self, ids: list[int]) -> Optional[torch.Tensor]:
        slot = self.slots.attach(len(ids))  # clean: near miss, the padding row has its own exit
        if slot is None:
            return None
        pad = self.rows.checkout_row()  # leak: retired only if padding was needed
        if pad is None:
            self.slots.detach(slot)
            return None
        out = self.replay(slot, ids + [pad] * (slot[0] - len(ids)))
        if slot[0] > len(ids):
            self.rows.retire_row(pad)
        self.slots.detach(slot)
        return out

    def begin(self, batch: int) -> bool:
        if self.current is None:
            self.current = self.slots.attach(batch)  # clean: near miss, end detaches the current one
        return self.current is not None

    def rebatch(self, batch: int) -> bool:
        bigger = self.slots.attach(batch)  # clean: becomes current after the old one is detached
        if bigger is None:
            return False
        self.end()
        self.current = bigger
        return True

    def end(self) -> None:
        if self.current is not None:
            self.slots.detach(self.current)
        self.current = None

    def capture_order(self, sizes: list[int]) -> list[int]:
        taken: dict[int, tuple[int, int]] = {}
        order = []
        for size in sizes:
            slot = self.slots.attach(size)  # leak: sizes that share a graph size overwrite the key
            if slot is None:
                break
            taken[slot[0]] = slot
            order.append(slot[0])
        for slot in taken.values():
            self.slots.detach(slot)
        return order
