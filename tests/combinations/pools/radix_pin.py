# take: P.pin_prefix(key)
# give: P.unpin_prefix(X)
# gets: value
# type: PrefixTrie
class TrieNode:
    def __init__(self, parent=None, edge=""):
        self.parent = parent
        self.edge = edge
        self.children = {}
        self.lock_ref = 0


class PrefixTrie:
    def __init__(self):
        self.root = TrieNode()
        self.evictable_size_ = self.protected_size_ = 0

    def insert(self, text):
        node = self.root
        for ch in text:
            if ch not in node.children:
                node.children[ch] = TrieNode(node, ch)
                self.evictable_size_ += 1
            node = node.children[ch]

    def pin_prefix(self, text):
        """Lock the longest cached prefix against eviction; gives its last node."""
        node = self.root
        for ch in text:
            if ch not in node.children:
                break
            node = node.children[ch]
            if node.lock_ref == 0:
                self.evictable_size_ -= 1
                self.protected_size_ += 1
            node.lock_ref += 1
        return node

    def unpin_prefix(self, node):
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.evictable_size_ += 1
                self.protected_size_ -= 1
            node = node.parent
