"""Prefix tree over token ids with the indices of their keys and values."""
import heapq
import itertools
import time

import numpy as np


class Node:
    _ids = itertools.count()

    def __init__(self, key, value, parent=None):
        self.id = next(Node._ids)
        self.key = key
        self.value = value
        self.host = None
        self.parent = parent
        self.children = {}
        self.locks = 0
        self.used = time.monotonic()

    def __lt__(self, other):
        return self.used < other.used


class Pin:
    """Holds the path from a node to the root in memory."""

    def __init__(self, tree, node):
        self.tree = tree
        self.node = node
        while node is not tree.root:
            node.locks += 1
            node = node.parent

    def release(self):
        node, self.node = self.node, None
        while node is not None and node is not self.tree.root:
            node.locks -= 1
            node = node.parent


def common(a, b):
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n


class RadixTree:
    def __init__(self, pool, host_pool=None):
        self.pool = pool
        self.host_pool = host_pool
        self.root = Node((), np.empty(0, dtype=np.int64))

    def match(self, key):
        node, got = self.root, []
        while key and key[0] in node.children:
            child = node.children[key[0]]
            n = common(child.key, key)
            if n < len(child.key):
                child = self._split(child, n)
            child.used = time.monotonic()
            got.append(child.value)
            node, key = child, key[n:]
        return node, np.concatenate(got) if got else np.empty(0, dtype=np.int64)

    def _split(self, child, n):
        upper = Node(child.key[:n], child.value[:n], child.parent)
        upper.locks = child.locks
        upper.children = {child.key[n]: child}
        child.parent.children[child.key[0]] = upper
        child.parent, child.key, child.value = upper, child.key[n:], child.value[n:]
        if child.host is not None:
            upper.host, child.host = child.host[:n], child.host[n:]
        return upper

    def pin(self, node):
        return Pin(self, node)  # clean: returned to the caller

    def insert(self, key, value):
        """Takes over the indices behind what the tree has already, returns how many it had.

        The caller frees its own indices of that many tokens.
        """
        node, had = self.match(key)
        rest = key[len(had):]
        if rest:
            child = Node(rest, value[len(had):], node)
            node.children[rest[0]] = child
        return len(had)

    def _leaves(self):
        stack, out = [self.root], []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and not node.locks and node is not self.root:
                out.append(node)
        return out

    def evict(self, n):
        leaves = self._leaves()
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < n:
            node = heapq.heappop(leaves)
            self.pool.free(node.value)
            freed += len(node.value)
            parent = node.parent
            del parent.children[node.key[0]]
            if not parent.children and not parent.locks and parent is not self.root:
                heapq.heappush(leaves, parent)
        return freed

    # second level

    def back_up(self, node, copy):
        if node.host is not None or self.host_pool is None:
            return False
        host = self.host_pool.alloc(len(node.value))  # leak: evict() removes the node and frees only its value
        if host is None:
            return False
        copy(node.value, host)
        node.host = host
        return True

    def reload(self, node, copy, floor=64):
        """Fresh device indices for a node from its copy on the host."""
        if node.host is None:
            return None
        idx = self.pool.alloc(len(node.host))  # leak: a node below the floor is not worth it and returns without its indices
        if idx is None:
            return None
        if len(node.key) < floor:
            return None
        copy(node.host, idx)
        old, node.value = node.value, idx
        self.pool.free(old)
        return node
