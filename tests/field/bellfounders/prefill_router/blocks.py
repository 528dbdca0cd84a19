"""Ledger of the KV blocks of each decode node, kept by the router."""
from typing import Dict, List, Set


class NotEnough(Exception):
    def __init__(self, node: str, want: int, have: int):
        super().__init__(f"{node}: {want} blocks wanted, {have} free")
        self.node = node


class BlockLedger:
    def __init__(self, nodes: Dict[str, int]):
        self._free: Dict[str, Set[int]] = {n: set(range(c)) for n, c in nodes.items()}

    def book(self, node: str, n: int) -> List[int]:
        free = self._free[node]
        if len(free) < n:
            raise NotEnough(node, n, len(free))
        return [free.pop() for _ in range(n)]  # clean: handed to the caller

    def unbook(self, node: str, blocks: List[int]) -> None:
        self._free[node].update(blocks)

    def book_spread(self, shares: Dict[str, int]) -> Dict[str, List[int]]:
        """Books on several nodes or on none."""
        plan: Dict[str, List[int]] = {}
        try:
            for node, n in shares.items():
                plan[node] = self.book(node, n)  # clean: near miss, the plan is unbooked when a later node refuses
        except NotEnough:
            for node, blocks in plan.items():
                self.unbook(node, blocks)
            raise
        return plan

    def room(self, node: str) -> int:
        return len(self._free[node])

    def roomiest(self) -> str:
        return max(self._free, key=self.room)
