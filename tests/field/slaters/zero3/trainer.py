from __future__ import annotations

from typing import Dict, List, Optional

from .coordinator import Coordinator, SubModule
from .param import PartitionedParam, TiedParam
from .pool import ParamBufferPool


class Trainer:
    def __init__(self, modules: List[SubModule], coord: Coordinator) -> None:
        self.modules = modules
        self.coord = coord

    def forward(self, x: float) -> float:
        for i, m in enumerate(self.modules):
            if not self.coord.fetch(m):  # clean: released right after the module ran
                break
            if i + 1 < len(self.modules):
                self.coord.prefetch(self.modules[i + 1])
            x += sum(p.full.values[0] for p in m.params)
            self.coord.release(m)
        self.coord.settle()
        return x

    def evaluate(self, batches: List[List[float]]) -> Optional[float]:
        total = 0.0
        for m in self.modules:
            if not self.coord.fetch(m):  # leak: an empty batch breaks out of the inner loop and continues past release
                return None
            scores: List[float] = []
            for b in batches:
                if not b:
                    break
                scores.append(sum(b) * m.params[0].full.values[0])
            if len(scores) < len(batches):
                continue
            total += sum(scores)
            self.coord.release(m)
        return total

    def consolidate(self) -> Dict[str, List[float]]:
        state: Dict[str, List[float]] = {}
        for m in self.modules:
            with self.coord.gathered(m) as ok:  # clean: with
                if not ok:
                    continue
                for p in m.params:
                    state[p.name] = list(p.full.values[:len(p.shard) * p.world])
        return state

    def inspect(self, name: str) -> Optional[List[float]]:
        for m in self.modules:
            for p in m.params:
                if p.name == name and p.gather():  # leak: the values are copied and the user is never taken away
                    return list(p.full.values)
        return None


def build(world: int = 2) -> Trainer:
    pool = ParamBufferPool([4, 8], 4)
    embed = TiedParam("embed", [1.0, 2.0], world, pool, persistent=True)
    mlp = PartitionedParam("mlp", [0.5, 0.5, 0.5, 0.5], world, pool)
    return Trainer([SubModule("embed", [embed]), SubModule("mlp", [mlp]), SubModule("head", [embed])], Coordinator())


def main() -> None:
    tr = build()
    print(tr.forward(0.0), tr.evaluate([[1.0], [2.0]]), sorted(tr.consolidate()), tr.modules[0].params[0].pool.lent)


if __name__ == "__main__":
    main()
