# HOLD: X.refs += 1
# DROP: X.refs -= 1
class Node:
    def __init__(self, key):
        self.key = key
        self.refs = 0


class Tree:
    def __init__(self):
        self.nodes = {}

    def pin(self, node):
        node.refs += 1

    def unpin(self, node):
        node.refs -= 1
