"""A free list threaded through a numpy array, for tree nodes of speculative drafts."""
import numpy as np

NIL = -1


class DraftNodes:
    def __init__(self, count):
        self.next = np.arange(1, count + 1, dtype=np.int32)
        self.next[-1] = NIL
        self.token = np.zeros(count, dtype=np.int32)
        self.first = 0

    def new_node(self, token):
        node = self.first
        if node == NIL:
            return NIL
        self.first = int(self.next[node])
        self.next[node] = NIL
        self.token[node] = token
        return node

    def del_node(self, node):
        self.next[node] = self.first
        self.first = node


class Drafter:
    def __init__(self, nodes: DraftNodes, small):
        self.nodes = nodes
        self.small = small
        self.path = []

    def grow(self, token):
        node = self.nodes.new_node(token)  # clean: appended to the path, clear() deletes it
        if node != NIL:
            self.path.append(node)

    def clear(self):
        for node in self.path:
            self.nodes.del_node(node)
        self.path.clear()

    def try_token(self, token, threshold):
        node = self.nodes.new_node(token)  # leak: an improbable token returns without del_node
        if node == NIL:
            return None
        p = self.small.prob(self.path, token)
        if p < threshold:
            return None
        self.path.append(node)
        return p

    def lookahead(self, tokens):
        best = 0.0
        for t in tokens:
            node = self.nodes.new_node(t)  # clean: deleted on each turn
            if node == NIL:
                break
            best = max(best, self.small.prob(self.path, t))
            self.nodes.del_node(node)
        return best

    def replace_root(self, token):
        root = self.nodes.new_node(token)  # leak: overwritten when the end token is made
        if self.small.is_end(token):
            root = self.nodes.new_node(0)  # clean: goes into the path
        self.path[:0] = [root]
