"""Static input buffers for captured decode graphs."""
from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Iterable, Iterator, Optional

import torch


@dataclass
class InputSet:
    """Tensors a graph was captured with."""

    batch: int
    number: int
    ids: torch.Tensor
    positions: torch.Tensor

    def __lt__(self, other: "InputSet") -> bool:
        return (self.batch, self.number) < (other.batch, other.number)


class InputDepot:
    """Heap of unused input sets, smallest batch on top."""

    def __init__(self, batches: Iterable[int]) -> None:
        self._heap = [InputSet(b, n, torch.zeros(b), torch.zeros(b)) for n, b in enumerate(batches)]
        heapq.heapify(self._heap)

    def sign_out(self, batch: int) -> Optional[InputSet]:
        """Smallest unused set that fits, or None."""
        passed: list[InputSet] = []
        found = None
        while self._heap and found is None:
            top = heapq.heappop(self._heap)  # clean: near miss, sets too small are pushed back below
            if top.batch >= batch:
                found = top
            else:
                passed.append(top)
        for item in passed:
            heapq.heappush(self._heap, item)
        return found

    def sign_out_tight(self, batch: int, slack: int) -> Optional[InputSet]:
        if not self._heap:
            return None
        top = heapq.heappop(self._heap)  # leak: a set outside the slack is popped and not pushed
        if not batch <= top.batch <= batch + slack:
            return None
        return top

    def sign_in(self, item: InputSet) -> None:
        heapq.heappush(self._heap, item)


@dataclass
class Step:
    size: int
    inputs: Optional[InputSet] = None
    borrowed: bool = False


class GraphRunner:
    """Replays graphs on signed-out inputs."""

    def __init__(self, depot: InputDepot, resident: InputSet) -> None:
        self.depot = depot
        self.resident = resident
        self.steps: list[Step] = []
        self.current: Optional[InputSet] = None

    def prepare(self, step: Step) -> bool:
        if step.size <= self.resident.batch:
            step.inputs, step.borrowed = self.resident, True
        else:
            step.inputs = self.depot.sign_out(step.size)  # clean: near miss, complete signs in what is not borrowed
            step.borrowed = False
        if step.inputs is None:
            return False
        self.steps.append(step)
        return True

    def complete(self, step: Step) -> None:
        self.steps.remove(step)
        if not step.borrowed:
            self.depot.sign_in(step.inputs)
        step.inputs = None

    def replay(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        inputs = self.depot.sign_out(ids.numel())  # leak: a partial batch returns before sign_in
        if inputs is None:
            return None
        inputs.ids[: ids.numel()].copy_(ids)
        if ids.numel() < inputs.batch:
            return inputs.ids[: ids.numel()] * 2
        out = inputs.ids * 2
        self.depot.sign_in(inputs)
        return out

    def replay_padded(self, ids: torch.Tensor) -> Optional[torch.Tensor]:
        inputs = self.depot.sign_out(ids.numel())  # clean: near miss, both arms meet at sign_in
        if inputs is None:
            return None
        if ids.numel() < inputs.batch:
            inputs.ids.zero_()
        inputs.ids[: ids.numel()].copy_(ids)
        out = (inputs.ids * 2)[: ids.numel()]
        self.depot.sign_in(inputs)
        return out

    def switch_to(self, batch: int) -> bool:
        self.current = self.depot.sign_out(batch)  # leak: the set in current is overwritten at each switch
        return self.current is not None

    def leave_current(self) -> None:
        if self.current is not None:
            self.depot.sign_in(self.current)
            self.current = None

    def microbatches(self, ids: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        inputs = self.depot.sign_out(size)  # clean: signed in by finally, also when the consumer stops
        if inputs is None:
            return
        try:
            for part in ids.split(size):
                inputs.ids[: part.numel()].copy_(part)
                yield inputs.ids[: part.numel()]
        finally:
            self.depot.sign_in(inputs)

    def pairs(self, batches: list[int]) -> Iterator[tuple[int, InputSet]]:
        """Each set belongs to the consumer, who signs it in."""
        for batch in batches:
            inputs = self.depot.sign_out(batch)  # clean: near miss, yielded to the consumer who owns it
            if inputs is None:
                break
            yield batch, inputs

    def warm_all(self, batches: list[int]) -> int:
        done = 0
        for batch, inputs in self.pairs(batches):  # clean: every yielded set is signed in
            inputs.positions.fill_(batch)
            self.depot.sign_in(inputs)
            done += 1
        return done

    def largest_that_fits(self, batches: list[int]) -> int:
        best = 0
        for batch, inputs in self.pairs(batches):  # leak: only sets that beat the best are signed in
            if batch > best:
                best = batch
                self.depot.sign_in(inputs)
        return best
