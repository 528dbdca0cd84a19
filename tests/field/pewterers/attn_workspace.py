"""Split-KV decode attention with scratch tensors rented from a workspace."""
from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Dict, List, Optional, Sequence, Tuple

Vector = List[float]


class Scratch:
    __slots__ = ("values", "numel")

    def __init__(self, numel: int) -> None:
        self.values: Vector = [0.0] * numel
        self.numel = numel

    def zero_(self) -> "Scratch":
        self.values[:] = [0.0] * self.numel
        return self

    def clone(self) -> Vector:
        return list(self.values)


class Workspace:
    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._shelf: Dict[int, List[Scratch]] = defaultdict(list)
        self.limit = limit
        self.rented = 0

    def rent(self, numel: int) -> Optional[Scratch]:
        with self._lock:
            if self.rented >= self.limit:
                return None
            self.rented += 1
            shelf = self._shelf[numel]
            scratch = shelf.pop() if shelf else Scratch(numel)
        return scratch.zero_()

    def hand_in(self, scratch: Scratch) -> None:
        with self._lock:
            self.rented -= 1
            self._shelf[scratch.numel].append(scratch)


class WorkspaceFull(RuntimeError):
    pass


class ScratchArea:
    """Raises instead of returning None; what the kernels below use."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def take(self, numel: int) -> Scratch:
        scratch = self._workspace.rent(numel)  # clean: near miss, raises only for None
        if scratch is None:
            raise WorkspaceFull(numel)
        return scratch

    def take_pair(self, numel: int) -> Tuple[Scratch, Scratch]:
        first = self.take(numel)  # clean: near miss, handed in before the error goes on
        try:
            second = self.take(numel)  # clean: returned in the pair
        except WorkspaceFull:
            self.drop(first)
            raise
        return first, second

    def drop(self, scratch: Scratch) -> None:
        self._workspace.hand_in(scratch)


def partial_attention(area: ScratchArea, q: Vector, keys: Sequence[Vector],
                      values: Sequence[Vector]) -> Tuple[Scratch, float, float]:
    """Unnormalised output of one split, its max and its sum of exponents."""
    out = area.take(len(q))  # clean: returned, the caller drops it
    scores = [sum(a * b for a, b in zip(q, k)) for k in keys]
    peak = max(scores)
    total = 0.0
    for score, value in zip(scores, values):
        weight = math.exp(score - peak)
        total += weight
        for i, v in enumerate(value):
            out.values[i] += weight * v
    return out, peak, total


class SplitDecoder:
    def __init__(self, area: ScratchArea, split: int) -> None:
        self.area = area
        self.split = split

    def _splits(self, n: int) -> List[Tuple[int, int]]:
        return [(i, min(n, i + self.split)) for i in range(0, n, self.split)]

    def attend(self, q: Vector, keys: Sequence[Vector], values: Sequence[Vector],
               out: Optional[Scratch] = None) -> Vector:
        owned = out is None
        if out is None:
            out = self.area.take(len(q))  # clean: near miss, dropped below under the same flag
        parts = []
        for lo, hi in self._splits(len(keys)):
            parts.append(partial_attention(self.area, q, keys[lo:hi], values[lo:hi]))  # clean: near miss, unpacked and dropped in the merge loop
        top = max((p[1] for p in parts), default=0.0)
        denom = sum(p[2] * math.exp(p[1] - top) for p in parts) or 1.0
        for scratch, peak, _ in parts:
            scale = math.exp(peak - top) / denom
            for i, v in enumerate(scratch.values):
                out.values[i] += scale * v
            self.area.drop(scratch)
        result = out.clone()
        if owned:
            self.area.drop(out)
        return result

    def attend_single(self, q: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> Vector:
        out, _, total = partial_attention(self.area, q, keys, values)  # leak: the normalised copy is returned, the scratch dropped on the floor
        return [v / total for v in out.clone()]

    def logsumexp(self, q: Vector, keys: Sequence[Vector], values: Sequence[Vector]) -> float:
        _, peak, total = partial_attention(self.area, q, keys, values)  # leak: the scratch is discarded in the unpacking
        return peak + math.log(total)

    def attend_windowed(self, q: Vector, keys: Sequence[Vector], values: Sequence[Vector],
                        window: int, out: Optional[Scratch] = None) -> Vector:
        owned = False
        if out is None or out.numel != len(q):
            out = self.area.take(len(q))  # leak: owned is never set, the scratch is not dropped
        part, _, total = partial_attention(self.area, q, keys[-window:], values[-window:])  # clean: dropped after the copy
        for i, v in enumerate(part.values):
            out.values[i] = v / total
        self.area.drop(part)
        result = out.clone()
        if owned:
            self.area.drop(out)
        return result

    def attend_masked(self, q: Vector, keys: Sequence[Vector], values: Sequence[Vector],
                      mask: Sequence[bool]) -> Optional[Vector]:
        acc, tmp = self.area.take_pair(len(q))  # leak: an all-masked row returns None with both rented
        live = [i for i, m in enumerate(mask) if m]
        if not live:
            return None
        for i in live:
            tmp.values[:] = values[i]
            acc.values[:] = [a + t for a, t in zip(acc.values, tmp.values)]
        result = [a / len(live) for a in acc.values]
        self.area.drop(tmp)
        self.area.drop(acc)
        return result

    def rotate(self, q: Vector, layers: Sequence[float]) -> Vector:
        """Ping-pong between two scratch tensors."""
        cur, nxt = self.area.take_pair(len(q))  # clean: near miss, swapped by name only, both dropped
        cur.values[:] = q
        for angle in layers:
            nxt.values[:] = [v * math.cos(angle) for v in cur.values]
            cur, nxt = nxt, cur
        result = cur.clone()
        self.area.drop(cur)
        self.area.drop(nxt)
        return result

    def residual(self, x: Vector, scales: Sequence[float]) -> Vector:
        acc = self.area.take(len(x))  # leak: lost when the loop rebinds acc
        acc.values[:] = x
        for scale in scales:
            step = self.area.take(len(x))  # leak: becomes acc and is lost at the next turn
            step.values[:] = [a + scale * b for a, b in zip(acc.values, x)]
            acc = step
        result = acc.clone()
        self.area.drop(acc)
        return result
