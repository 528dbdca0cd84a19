# take: P.nearest(key)
# give: P.home(X)
# gets: optional
# type: NumaBuffers
from typing import Dict, Optional, Sequence, Set, Tuple

Placed = Tuple[str, int]


class NumaBuffers:
    """Host bounce buffers kept by NUMA node; a foreign node's buffer beats none at all."""

    def __init__(self, nodes: Sequence[str], per_node: int):
        self._sets: Dict[str, Set[int]] = {}
        for k, node in enumerate(nodes):
            self._sets[node] = set(range(k * per_node, (k + 1) * per_node))
        self.remote_hits = 0

    def nearest(self, node: str) -> Optional[Placed]:
        local = self._sets.get(node)
        if local:
            return node, local.pop()
        for other, bufs in self._sets.items():
            if bufs:
                self.remote_hits += 1
                return other, bufs.pop()
        return None

    def home(self, placed: Placed) -> None:
        node, buf = placed
        assert buf not in self._sets[node], "buffer came home twice"
        self._sets[node].add(buf)
