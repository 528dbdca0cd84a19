"""Captured decode graphs. Each batch bucket owns static inputs; a runner borrows a bucket for a step."""

import bisect
import logging
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class StaticInputs:
    def __init__(self, bucket: int, hidden: int):
        self.bucket = bucket
        self.ids = torch.zeros(bucket, dtype=torch.int64)
        self.positions = torch.zeros(bucket, dtype=torch.int64)
        self.out = torch.zeros(bucket, hidden)
        self.busy = False


class InputBank:
    """A few sets of static inputs for each bucket."""

    def __init__(self, hidden: int, copies: int = 2):
        self.sets: Dict[int, List[StaticInputs]] = {
            b: [StaticInputs(b, hidden) for _ in range(copies)] for b in BUCKETS
        }

    def borrow(self, n: int) -> Optional[StaticInputs]:
        i = bisect.bisect_left(BUCKETS, n)
        for b in BUCKETS[i:]:
            for s in self.sets[b]:
                if not s.busy:
                    s.busy = True
                    return s
        return None

    def settle(self, s: StaticInputs) -> None:
        s.busy = False


class OutputRing:
    """Host-side output tensors; used in a ring but returned out of order."""

    def __init__(self, hidden: int, depth: int):
        self._spare = [torch.zeros(BUCKETS[-1], hidden) for _ in range(depth)]

    def next_output(self) -> Optional[torch.Tensor]:
        if not self._spare:
            return None
        return self._spare.pop(0)

    def hand_in(self, t: torch.Tensor) -> None:
        self._spare.append(t)


class Borrowed:
    """Either wraps inputs the caller owns or borrows its own; only the latter are settled."""

    def __init__(self, bank: InputBank, n: int, given: Optional[StaticInputs] = None):
        self.bank = bank
        self.owned = given is None
        self.inputs = bank.borrow(n) if given is None else given  # clean: near miss, close() settles it when it is owned

    def close(self) -> None:
        if self.owned and self.inputs is not None:
            self.bank.settle(self.inputs)
            self.inputs = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Pending:
    def __init__(self, step: int, inputs: StaticInputs, host: torch.Tensor, n: int):
        self.step = step
        self.inputs = inputs
        self.host = host
        self.n = n


class GraphRunner:
    def __init__(self, graphs, bank: InputBank, ring: OutputRing):
        self.graphs = graphs
        self.bank = bank
        self.ring = ring
        self.pending: Dict[int, Pending] = {}
        self._sticky: Optional[StaticInputs] = None
        self._own_sticky = False

    @staticmethod
    def _fill(s: StaticInputs, ids: torch.Tensor, positions: torch.Tensor) -> None:
        n = ids.shape[0]
        s.ids[:n].copy_(ids)
        s.ids[n:].zero_()
        s.positions[:n].copy_(positions)

    def _replay(self, s: StaticInputs) -> None:
        self.graphs[s.bucket].replay()

    def step(self, ids, positions, given: Optional[StaticInputs] = None) -> Optional[torch.Tensor]:
        with Borrowed(self.bank, ids.shape[0], given) as b:  # clean: closed on exit
            if b.inputs is None:
                return None
            self._fill(b.inputs, ids, positions)
            self._replay(b.inputs)
            return b.inputs.out[:ids.shape[0]].clone()

    def step_inline(self, ids, positions, given: Optional[StaticInputs] = None) -> Optional[torch.Tensor]:
        mine = given is None
        s = self.bank.borrow(ids.shape[0]) if mine else given  # leak: not settled when the bucket has no graph
        if s is None:
            return None
        if s.bucket not in self.graphs:
            logger.debug("bucket %d is not captured", s.bucket)
            return None
        self._fill(s, ids, positions)
        self._replay(s)
        out = s.out[:ids.shape[0]].clone()
        if mine:
            self.bank.settle(s)
        return out

    def step_padded(self, ids, positions) -> Optional[torch.Tensor]:
        s = self.bank.borrow(ids.shape[0])  # leak: an uncaptured bucket is overwritten by a larger one
        if s is not None and s.bucket not in self.graphs:
            s = self.bank.borrow(s.bucket + 1)  # clean: settled before the return
        if s is None:
            return None
        self._fill(s, ids, positions)
        self._replay(s)
        out = s.out[:ids.shape[0]].clone()
        self.bank.settle(s)
        return out

    # -- overlapped steps -------------------------------------------------

    def launch(self, step: int, ids, positions) -> bool:
        s = self.bank.borrow(ids.shape[0])  # clean: settled when no output is spare, else held by the Pending
        if s is None:
            return False
        host = self.ring.next_output()  # clean: held by the Pending until collect()
        if host is None:
            self.bank.settle(s)
            return False
        self._fill(s, ids, positions)
        self._replay(s)
        self.pending[step] = Pending(step, s, host, ids.shape[0])
        return True

    def launch_or_eager(self, step: int, ids, positions, eager) -> torch.Tensor:
        host = self.ring.next_output()  # leak: not handed in when the step runs eagerly
        s = self.bank.borrow(ids.shape[0])  # clean: held by the Pending, or settled when there is no host output
        if s is None:
            return eager(ids, positions)
        if host is None:
            self.bank.settle(s)
            return eager(ids, positions)
        self._fill(s, ids, positions)
        self._replay(s)
        self.pending[step] = Pending(step, s, host, ids.shape[0])
        return s.out[:ids.shape[0]]

    def collect(self, step: int) -> Optional[torch.Tensor]:
        p = self.pending.pop(step, None)
        if p is None:
            return None
        p.host[:p.n].copy_(p.inputs.out[:p.n])
        res = p.host[:p.n].clone()
        self.bank.settle(p.inputs)
        self.ring.hand_in(p.host)
        return res

    def drain(self) -> None:
        for step in list(self.pending):
            self.collect(step)

    # -- sticky inputs ----------------------------------------------------

    def stick(self, n: int, given: Optional[StaticInputs] = None) -> bool:
        """Keep one set of inputs over many steps."""
        self.unstick()
        self._own_sticky = given is None
        self._sticky = given if given is not None else self.bank.borrow(n)  # clean: near miss, unstick() settles it under the flag set above
        return self._sticky is not None

    def unstick(self) -> None:
        s, self._sticky = self._sticky, None
        if s is not None and self._own_sticky:
            self.bank.settle(s)
        self._own_sticky = False

    def widen(self, n: int) -> bool:
        if self._sticky is not None and self._sticky.bucket >= n:
            return True
        wider = self.bank.borrow(n)  # clean: becomes the sticky set once the narrow one is settled
        if wider is None:
            return False
        self.unstick()
        self._sticky, self._own_sticky = wider, True
        return True

    def lend_sticky(self, other: "GraphRunner") -> None:
        """The other runner takes the set over."""
        other.unstick()
        other._sticky, other._own_sticky = self._sticky, self._own_sticky
        self._sticky = None
        self._own_sticky = False

    def capture_all(self, capture) -> int:
        done = 0
        for b in BUCKETS:
            s = self.bank.borrow(b)  # leak: continue keeps the set busy when borrow() gave a larger bucket
            if s is None:
                break
            if s.bucket != b:
                continue
            self.graphs[b] = capture(s)
            self.bank.settle(s)
            done += 1
        return done
