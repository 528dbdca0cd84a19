"""CUDA graph runner: captured batch sizes with static input buffers that are claimed per replay."""
from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Sequence

try:
    import torch
except ImportError:
    torch = None

logger = logging.getLogger(__name__)


class StaticInputs:
    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.ids: List[int] = [0] * batch_size

    def load(self, ids: Sequence[int]) -> None:
        self.ids[: len(ids)] = list(ids)


class InputArena:
    def __init__(self, sizes: Sequence[int], copies: int = 2) -> None:
        self.sizes = sorted(sizes)
        self._ready: Dict[int, List[StaticInputs]] = {
            size: [StaticInputs(size) for _ in range(copies)] for size in self.sizes
        }

    def claim(self, batch_size: int) -> Optional[StaticInputs]:
        at = bisect.bisect_left(self.sizes, batch_size)
        if at == len(self.sizes):
            return None
        stack = self._ready[self.sizes[at]]
        return stack.pop() if stack else None

    def disclaim(self, inputs: StaticInputs) -> None:
        self._ready[inputs.batch_size].append(inputs)

    def idle(self) -> int:
        return sum(len(stack) for stack in self._ready.values())


@dataclass
class ReplayState:
    ids: List[int]
    inputs: Optional[StaticInputs] = None
    owns_inputs: bool = False


class GraphRunner:
    def __init__(self, arena: InputArena, eager: Callable[[Sequence[int]], List[int]], use_graph: bool = True) -> None:
        self.arena = arena
        self.eager = eager
        self.use_graph = use_graph
        self.carry: Optional[StaticInputs] = None
        self.captured: Dict[int, StaticInputs] = {}
        self.baseline: Dict[int, StaticInputs] = {}

    def _replay(self, inputs: StaticInputs, n: int) -> List[int]:
        return [t + 1 for t in inputs.ids[:n]]

    def run(self, ids: Sequence[int], inputs: Optional[StaticInputs] = None) -> List[int]:
        owned = inputs is None
        if owned:
            inputs = self.arena.claim(len(ids))  # clean: near miss, owned still says so when it is disclaimed
            if inputs is None:
                return self.eager(ids)
        inputs.load(ids)
        out = self._replay(inputs, len(ids))
        if owned:
            self.arena.disclaim(inputs)
        return out

    def run_padded(self, ids: Sequence[int], inputs: Optional[StaticInputs] = None) -> List[int]:
        if inputs is None:
            inputs = self.arena.claim(len(ids))  # leak: owned is computed after the rebinding and is never true
        owned = inputs is None
        if inputs is None:
            return self.eager(ids)
        inputs.load(ids)
        out = self._replay(inputs, inputs.batch_size)
        if owned:
            self.arena.disclaim(inputs)
        return out[: len(ids)]

    def run_guarded(self, ids: Sequence[int]) -> List[int]:
        inputs = None
        if self.use_graph and len(ids) > 0:
            inputs = self.arena.claim(len(ids))  # clean: near miss, later branch depends on inputs alone
        if inputs is not None:
            inputs.load(ids)
            out = self._replay(inputs, len(ids))
        else:
            out = self.eager(ids)
        if inputs is not None:
            self.arena.disclaim(inputs)
        return out

    def run_mixed(self, ids: Sequence[int], prefill: bool) -> List[int]:
        inputs = None
        if self.use_graph:
            inputs = self.arena.claim(len(ids))  # leak: with prefill set the graph's inputs are claimed and not disclaimed
        if inputs is None:
            return self.eager(ids)
        inputs.load(ids)
        out = self._replay(inputs, len(ids))
        if self.use_graph and not prefill:
            self.arena.disclaim(inputs)
        return out

    def prepare(self, state: ReplayState) -> bool:
        if state.inputs is None:
            state.inputs = self.arena.claim(len(state.ids))  # clean: near miss, the flag in the state makes release disclaim it
            state.owns_inputs = state.inputs is not None
        return state.inputs is not None

    def release(self, state: ReplayState) -> None:
        if state.owns_inputs:
            self.arena.disclaim(state.inputs)
        state.inputs, state.owns_inputs = None, False

    def prepare_shared(self, states: Sequence[ReplayState]) -> bool:
        """One buffer for all micro-batches; the first state owns it."""
        shared = self.arena.claim(max(len(s.ids) for s in states))  # clean: near miss, the first state's release disclaims it
        if shared is None:
            return False
        for i, state in enumerate(states):
            self.release(state)
            state.inputs = shared
            state.owns_inputs = i == 0
        return True

    def prepare_draft(self, state: ReplayState) -> bool:
        inputs = self.arena.claim(len(state.ids))  # leak: owns_inputs is left False, so release only clears the field
        if inputs is None:
            return False
        self.release(state)
        state.inputs = inputs
        return True

    def step(self, ids: Sequence[int]) -> List[int]:
        """Keeps the previous step's inputs until this step has read them."""
        inputs = self.arena.claim(len(ids))  # clean: near miss, becomes carry, the carry of before is disclaimed
        if inputs is None:
            return self.eager(ids)
        inputs.load(ids)
        previous, self.carry = self.carry, inputs
        if previous is not None:
            self.arena.disclaim(previous)
        return self._replay(inputs, len(ids))

    def finish(self) -> None:
        if self.carry is not None:
            self.arena.disclaim(self.carry)
            self.carry = None

    def capture(self, size: int) -> None:
        inputs = self.arena.claim(size)  # leak: a second capture of a size replaces the entry
        if inputs is None:
            logger.info("no static inputs for %d", size)
            return
        self.captured[size] = inputs

    def capture_all(self) -> int:
        for size in self.arena.sizes:
            if size in self.baseline:
                continue
            inputs = self.arena.claim(size)  # clean: kept in baseline, uncapture disclaims
            if inputs is None:
                break
            self.baseline[size] = inputs
        return len(self.baseline)

    def uncapture(self) -> None:
        for table in (self.captured, self.baseline):
            for inputs in table.values():
                self.arena.disclaim(inputs)
            table.clear()

    def warm(self, sizes: Sequence[int]) -> List[int]:
        failed = []
        for size in sizes:
            inputs = self.arena.claim(size)  # leak: a size whose replay is empty is skipped past disclaim
            if inputs is None:
                failed.append(size)
                continue
            if not self._replay(inputs, size - 1):
                failed.append(size)
                continue
            self.arena.disclaim(inputs)
        return failed


def borrow_inputs(runner: GraphRunner, size: int) -> StaticInputs:
    """Falls back to private inputs when the arena has none."""
    return runner.arena.claim(size) or StaticInputs(size)  # clean: handed to the caller


def profile(runner: GraphRunner, size: int, rounds: int) -> int:
    inputs = borrow_inputs(runner, size)  # leak: the caller's buffer is not ours to run, so run does not disclaim and neither does profile
    total = 0
    for _ in range(rounds):
        total += len(runner.run([1] * size, inputs))
    return total


def compare(runner: GraphRunner, ids: Sequence[int]) -> bool:
    inputs = runner.arena.claim(len(ids))  # clean: disclaimed here after run left it alone
    if inputs is None:
        return True
    same = runner.run(ids, inputs) == runner.eager(ids)
    runner.arena.disclaim(inputs)
    return same


if __name__ == "__main__":
    runner = GraphRunner(InputArena([1, 2, 4]), lambda ids: [t + 1 for t in ids])
    assert runner.run([1, 2]) == [2, 3]
    assert runner.run_guarded([1]) == [2]
    st = [ReplayState([1]), ReplayState([1, 2])]
    assert runner.prepare_shared(st)
    for s in st:
        runner.release(s)
    runner.step([1]), runner.step([2]), runner.finish()
    assert runner.capture_all() == 3
    runner.uncapture()
    assert compare(runner, [3, 4])
    assert runner.arena.idle() == 6
