# take: P.alloc_node()
# give: P.free_node(X)
# gets: optional
class Pool:
    def __init__(self, count):
        self._next = list(range(1, count)) + [-1]
        self._head = 0

    def alloc_node(self):
        if self._head == -1:
            return None
        node = self._head
        self._head = self._next[node]
        return node

    def free_node(self, node):
        self._next[node] = self._head
        self._head = node
