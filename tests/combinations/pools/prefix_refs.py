# take: P.inc_lock(key)
# give: P.dec_lock(key)
# gets: nothing
class Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.lock_ref = 0


class Pool:
    def __init__(self):
        self.root = Node()

    def inc_lock(self, node):
        while node is not self.root:
            node.lock_ref += 1
            node = node.parent

    def dec_lock(self, node):
        while node is not self.root:
            node.lock_ref -= 1
            node = node.parent
