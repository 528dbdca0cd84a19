# take: P.pin_path(key)
# give: P.unpin_path(X)
# gets: optional
# type: PromptTrie
class _Node:
    __slots__ = ("parent", "kids", "pins")

    def __init__(self, parent=None):
        self.parent, self.kids, self.pins = parent, {}, 0


class PromptTrie:
    """Character trie of cached prompts; a pinned node and all above it can't be evicted."""

    def __init__(self):
        self.root = _Node()

    def insert(self, text):
        node = self.root
        for ch in text:
            node = node.kids.setdefault(ch, _Node(node))
        return node

    def pin_path(self, text):
        node = self.root
        for ch in text:
            if ch not in node.kids:
                break
            node = node.kids[ch]
        if node is self.root:
            return None
        self._shift(node, +1)
        return node

    def unpin_path(self, node):
        self._shift(node, -1)

    def _shift(self, node, delta):
        while node is not self.root:
            node.pins += delta
            assert node.pins >= 0
            node = node.parent
