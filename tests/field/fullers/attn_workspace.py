"""Split-K decode attention: workspaces for partial outputs and the wrappers that plan over them."""
from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Workspace:
    offset: int
    data: List[float]


class WorkspaceArena:
    """Equal-sized workspaces cut from one device allocation."""

    def __init__(self, count: int, width: int) -> None:
        self.width = width
        self._backing = [Workspace(i * width, [0.0] * width) for i in range(count)]
        self._free = list(self._backing)

    def grab(self) -> Optional[Workspace]:
        return self._free.pop() if self._free else None

    def put_back(self, ws: Workspace) -> None:
        ws.data[:] = [0.0] * self.width
        self._free.append(ws)

    def __len__(self) -> int:
        return len(self._free)


class PrefillWrapper:
    """`begin_forward` plans a batch, `end_forward` ends it."""

    def __init__(self, arena: WorkspaceArena) -> None:
        self.arena = arena
        self._ws: Optional[Workspace] = None
        self._splits = 1

    def begin_forward(self, lengths: Sequence[int]) -> None:
        self.end_forward()
        self._splits = max(1, max(lengths) // self.arena.width)
        if self._splits > 1:
            self._ws = self.arena.grab()  # clean: near miss, end_forward has put the former one back

    def end_forward(self) -> None:
        if self._ws is not None:
            self.arena.put_back(self._ws)
            self._ws = None


class DecodeWrapper:
    def __init__(self, arena: WorkspaceArena) -> None:
        self.arena = arena
        self._ws: Optional[Workspace] = None
        self._splits = 1

    def begin_forward(self, lengths: Sequence[int]) -> None:
        splits = max(1, max(lengths) // self.arena.width)
        if splits > 1:
            self._ws = self.arena.grab()  # leak: end_forward puts back by the splits, which a short batch planned after resets
        self._splits = splits

    def end_forward(self) -> None:
        if self._splits > 1:
            self.arena.put_back(self._ws)
            self._ws = None
            self._splits = 1


class GraphRunner:
    """Keeps a workspace for each captured batch size until `reset`."""

    def __init__(self, arena: WorkspaceArena) -> None:
        self.arena = arena
        self._graphs: Dict[int, Workspace] = {}

    def capture(self, batch_size: int) -> bool:
        if batch_size in self._graphs:
            return True
        ws = self.arena.grab()  # clean: None-checked, kept in the table until reset
        if ws is None:
            return False
        self._graphs[batch_size] = ws
        return True

    def reset(self) -> None:
        while self._graphs:
            _, ws = self._graphs.popitem()
            self.arena.put_back(ws)


class AttentionKernel:
    def __init__(self, arena: WorkspaceArena) -> None:
        self.arena = arena

    def _partials(self, scores: Sequence[float]) -> Optional[Tuple[Workspace, Workspace]]:
        out = self.arena.grab()  # leak: dropped when there is no workspace left for the lse
        lse = self.arena.grab() if out is not None else None  # clean: returned in the pair
        if out is None or lse is None:
            return None
        for i, s in enumerate(scores[: self.arena.width]):
            out.data[i] = s
            lse.data[i] = math.exp(s)
        return out, lse

    def forward(self, scores: Sequence[float]) -> List[float]:
        pair = self._partials(scores)  # clean: None-checked, both are put back
        if pair is None:
            return [s for s in scores]
        out, lse = pair
        total = sum(lse.data) or 1.0
        merged = [o * e / total for o, e in zip(out.data, lse.data)]
        for ws in pair:
            self.arena.put_back(ws)
        return merged[: len(scores)]

    def log_sum(self, scores: Sequence[float]) -> float:
        pair = self._partials(scores)  # leak: only the lse is put back
        if pair is None:
            return math.log(sum(math.exp(s) for s in scores))
        _, lse = pair
        value = math.log(sum(lse.data))
        self.arena.put_back(lse)
        return value

    def merge(self, parts: Sequence[Sequence[float]], into: Optional[Workspace] = None) -> List[float]:
        own = into is None
        acc = self.arena.grab() if own else into  # clean: near miss, put back when it is the method's own
        if acc is None:
            raise MemoryError("attention arena exhausted")
        for part in parts:
            for i, value in enumerate(part):
                acc.data[i] += value
        merged = list(acc.data)
        if own:
            self.arena.put_back(acc)
        return merged


def main() -> None:
    arena = WorkspaceArena(4, 8)
    prefill = PrefillWrapper(arena)
    prefill.begin_forward([32])
    prefill.begin_forward([64])
    prefill.end_forward()
    runner = GraphRunner(arena)
    assert runner.capture(1) and runner.capture(1)
    runner.reset()
    kernel = AttentionKernel(arena)
    assert len(kernel.forward([0.1, 0.2])) == 2
    assert kernel.merge([[1.0], [2.0]])[0] == 3.0
    assert len(arena) == 4


if __name__ == "__main__":
    main()
