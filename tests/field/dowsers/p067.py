"""Radix tree of prefixes: a lock on a node protects it and its parents from eviction."""


class RadixNode:
    def __init__(self, parent=None, tokens=()):
        self.parent = parent
        self.tokens = tokens
        self.children = {}
        self.lock_ref = 0


class RadixTree:
    def __init__(self):
        self.root = RadixNode()
        self.root.lock_ref = 1
        self.protected = 0

    def inc_lock_ref(self, node):
        while node is not self.root:
            if node.lock_ref == 0:
                self.protected += len(node.tokens)
            node.lock_ref += 1
            node = node.parent

    def dec_lock_ref(self, node):
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.protected -= len(node.tokens)
            node = node.parent


class PrefillAdder:
    def __init__(self, tree: RadixTree, budget):
        self.tree = tree
        self.budget = budget

    def add(self, req, node):
        self.tree.inc_lock_ref(node)  # leak: over budget, returns with the path locked
        if req.extend_len > self.budget:
            return False
        self.budget -= req.extend_len
        req.last_node = node
        return True

    def finish(self, req):
        self.tree.dec_lock_ref(req.last_node)

    def add_chunk(self, req, node):
        self.tree.inc_lock_ref(node)  # clean: in req.last_node or unlocked
        if self.budget <= 0:
            self.tree.dec_lock_ref(node)
            return False
        req.last_node = node
        return True

    def estimate(self, req, node, evictable):
        self.tree.inc_lock_ref(node)  # clean: finally
        try:
            return evictable() - req.extend_len
        finally:
            self.tree.dec_lock_ref(node)

    def advance(self, req, nodes):
        for node in nodes:
            self.tree.inc_lock_ref(node)  # leak: a node whose tokens end continues locked
            if not node.children:
                continue
            req.seen += len(node.tokens)
            self.tree.dec_lock_ref(node)
