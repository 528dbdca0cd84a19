"""Plans give every value of a graph a block, counting the ops that still read it."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple


@dataclass
class Op:
    name: str
    fn: Callable[..., None]
    inputs: List[str]
    output: str
    shape: Tuple[int, ...]

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n


class PlanError(RuntimeError):
    pass


@dataclass
class Plan:
    heap: Any
    ops: List[Op]
    outputs: List[str]
    blocks: Dict[str, Any] = field(default_factory=dict)
    shapes: Dict[str, Tuple[int, ...]] = field(default_factory=dict)

    def assign(self) -> bool:
        """A block for each output, or none at all."""
        for op in self.ops:
            if op.output in self.blocks:
                continue
            block = self.heap.cut(op.numel)  # clean: kept in blocks, which unassign() mends when one is missing
            if block is None:
                self.unassign()
                return False
            self.blocks[op.output] = block
            self.shapes[op.output] = op.shape
        return True

    def unassign(self) -> None:
        while self.blocks:
            _, block = self.blocks.popitem()
            self.heap.mend(block)

    def bind_input(self, name: str, shape: Tuple[int, ...]) -> Any:
        n = 1
        for s in shape:
            n *= s
        block = self.heap.cut(n)  # leak: binding a name that has its shape already returns the old block and drops this one
        if block is None:
            raise PlanError(f"no room for input {name}")
        if self.shapes.get(name) == shape and name in self.blocks:
            return self.blocks[name]
        old = self.blocks.pop(name, None)
        if old is not None:
            self.heap.mend(old)
        self.blocks[name] = block
        self.shapes[name] = shape
        return block

    def scratch_for(self, op: Op, factor: int) -> Optional[Any]:
        return self.heap.cut(op.numel * factor)  # clean: returned to the caller

    def peak(self) -> int:
        return sum(b.hi - b.lo for b in self.blocks.values())
