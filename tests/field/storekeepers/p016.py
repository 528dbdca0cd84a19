class KVBlocks:
    def __init__(self, n):
        self.refs = [0] * n

    def take_ref(self):
        idx = self.refs.index(0)
        self.refs[idx] = 1
        return idx

    def drop_ref(self, idx):
        self.refs[idx] -= 1


class TreeNode:
    def __init__(self, tokens, block):
        self.tokens = tokens
        self.block = block
        self.children = {}
        self.hits = 0


class PrefixTree:
    def __init__(self, blocks):
        self.blocks = blocks
        self.root = TreeNode((), None)
        self.size = 0

    def insert(self, chunks):
        node = self.root
        for chunk in chunks:
            child = node.children.get(chunk)
            if child is None:
                block = self.blocks.take_ref()  # leak: evict drops only the node, not its subtree
                child = TreeNode(chunk, block)
                node.children[chunk] = child
                self.size += 1
            child.hits += 1
            node = child
        return node

    def match(self, chunks):
        node, found = self.root, []
        for chunk in chunks:
            node = node.children.get(chunk)
            if node is None:
                break
            found.append(node.block)
        return found

    def evict(self, chunk):
        node = self.root.children.pop(chunk, None)
        if node is not None:
            self.blocks.drop_ref(node.block)
            self.size -= 1


class Branches:
    """A separate small tree for beam candidates."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.root = None

    def seed(self, token):
        if self.root is not None:
            self.prune(self.root)
        self.root = TreeNode((token,), self.blocks.take_ref())  # clean: prune drops the whole tree

    def fork(self, parent, token):
        if token in parent.children:
            return parent.children[token]
        block = self.blocks.take_ref()  # clean: prune walks the children
        child = TreeNode(parent.tokens + (token,), block)
        parent.children[token] = child
        return child

    def prune(self, node):
        for child in node.children.values():
            self.prune(child)
        node.children.clear()
        self.blocks.drop_ref(node.block)

    def finish(self):
        root, self.root = self.root, None
        if root is None:
            return ()
        self.prune(root)
        return root.tokens
