# take: P.take_node()
# give: P.add_node(X)
# gets: optional
class Node:
    def __init__(self, index):
        self.index = index
        self.next = None


class Pool:
    def __init__(self, count):
        self._head = None
        for index in range(count):
            node = Node(index)
            node.next = self._head
            self._head = node

    def take_node(self):
        node = self._head
        if node is None:
            return None
        self._head = node.next
        node.next = None
        return node

    def add_node(self, node):
        node.next = self._head
        self._head = node
