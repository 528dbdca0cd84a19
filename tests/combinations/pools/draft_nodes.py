# take: P.sprout()
# give: P.prune(X)
# gets: value
# type: DraftNursery
class DraftNode:
    __slots__ = ("token", "logp", "parent", "_next_free")

    def __init__(self):
        self.token = self.logp = self.parent = self._next_free = None


class DraftNursery:
    """Speculative tree nodes. Free ones are chained through _next_free; grows in gulps of 32."""

    GULP = 32

    def __init__(self):
        self._free_head = None
        self.allocated = 0
        self.live = 0

    def _gulp(self):
        for _ in range(self.GULP):
            node = DraftNode()
            node._next_free, self._free_head = self._free_head, node
        self.allocated += self.GULP

    def sprout(self):
        if self._free_head is None:
            self._gulp()
        node = self._free_head
        self._free_head, node._next_free = node._next_free, None
        self.live += 1
        return node

    def prune(self, node):
        node.token = node.logp = node.parent = None
        node._next_free, self._free_head = self._free_head, node
        self.live -= 1
