# TAKE: X = self._head | self._head = X.next
# PUT: X.next = self._head | self._head = X
# EMPTY: self._head is None
# BAD: X.size < n
class Node:
    def __init__(self, size):
        self.size = size
        self.next = None


class Chain:
    def __init__(self, count, size):
        self._head = None
        for _ in range(count):
            node = Node(size)
            node.next = self._head
            self._head = node

    def acquire(self):
        node = self._head
        if node is None:
            return None
        self._head = node.next
        return node

    def release(self, node):
        node.next = self._head
        self._head = node
