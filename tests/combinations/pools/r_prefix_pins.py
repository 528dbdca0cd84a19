# take: P.lock_path(key)
# give: P.unlock_path(key)
# gets: nothing
# type: PrefixTrie


class _Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.kids = {}
        self.lock_ref = 0


class PrefixTrie:
    """Nodes with lock_ref > 0 aren't evictable."""

    def __init__(self):
        self.root = _Node()
        self.evictable_nodes = 0
        self.protected_nodes = 0

    def _descend(self, text):
        node = self.root
        for ch in text:
            if ch not in node.kids:
                node.kids[ch] = _Node(node)
                self.evictable_nodes += 1
            node = node.kids[ch]
        return node

    def _shift(self, node, delta):
        while node is not self.root:
            was = node.lock_ref > 0
            node.lock_ref += delta
            assert node.lock_ref >= 0
            moved = int(node.lock_ref > 0) - int(was)
            self.protected_nodes += moved
            self.evictable_nodes -= moved
            node = node.parent

    def lock_path(self, text):
        self._shift(self._descend(text), +1)

    def unlock_path(self, text):
        self._shift(self._descend(text), -1)
