"""Radix-style prefix cache over reference counted KV pages."""
import time
from typing import Optional


class Page:
    __slots__ = ("index", "refs")

    def __init__(self, index):
        self.index = index
        self.refs = 0


class PageTable:
    def __init__(self, count):
        self.pages = [Page(i) for i in range(count)]
        self.idle = list(self.pages)

    def new_page(self) -> Optional[Page]:
        if not self.idle:
            return None
        page = self.idle.pop()
        page.refs = 1
        return page

    def retain(self, page) -> Page:
        page.refs += 1
        return page

    def release(self, page):
        page.refs -= 1
        if page.refs == 0:
            self.idle.append(page)

    def release_all(self, pages):
        for page in pages:
            self.release(page)


class Node:
    def __init__(self, key, page, parent=None):
        self.key = key
        self.page = page
        self.parent = parent
        self.children = {}
        self.touched = time.monotonic()


class PrefixTree:
    def __init__(self, table: PageTable):
        self.table = table
        self.root = Node(None, None)
        self.hits = 0

    def walk(self, keys):
        node, path = self.root, []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            child.touched = time.monotonic()
            path.append(child)
            node = child
        self.hits += len(path)
        return path

    def insert(self, parent, key, page):
        """Replaces whatever lies under the key: the newest computation wins."""
        node = Node(key, self.table.retain(page), parent)  # leak: a second insert of a key overwrites it
        parent.children[key] = node
        return node

    def evict_leaf(self, node):
        if node.children:
            return False
        del node.parent.children[node.key]
        self.table.release(node.page)
        return True

    def evict_oldest(self, budget):
        leaves, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node is not self.root and not node.children:
                leaves.append(node)
        leaves.sort(key=lambda n: n.touched)
        return sum(self.evict_leaf(n) for n in leaves[:budget])


class SystemPrompts:
    """Prompts that the operator keeps resident by name."""

    def __init__(self, table: PageTable):
        self.table = table
        self.by_name = {}
        self.anchors = {}

    def publish(self, name, pages):
        old = self.by_name.get(name)
        self.by_name[name] = [self.table.retain(p) for p in pages]  # clean: near miss, old list released below
        if old is not None:
            self.table.release_all(old)

    def anchor(self, name, page):
        if name in self.anchors:
            self.table.release(self.anchors.pop(name))
        self.anchors[name] = self.table.retain(page)  # leak: reset() clears the anchors unreleased

    def withdraw(self, name):
        pages = self.by_name.pop(name, ())
        self.table.release_all(pages)
        if (page := self.anchors.pop(name, None)) is not None:
            self.table.release(page)

    def reset(self):
        while self.by_name:
            _, pages = self.by_name.popitem()
            self.table.release_all(pages)
        self.anchors.clear()


class Prefill:
    """One prompt on its way through the model."""

    def __init__(self, tree: PrefixTree, keys):
        self.tree = tree
        self.keys = keys
        self.shared = []
        self.own = []
        self.tail = None

    def begin(self):
        table = self.tree.table
        path = self.tree.walk(self.keys)
        self.shared = [table.retain(n.page) for n in path]  # clean: near miss, commit and abandon release
        for _ in self.keys[len(path):]:
            page = table.new_page()  # clean: near miss, commit releases its own count after the tree took one
            if page is None:
                self.abandon()
                return False
            self.own.append(page)
        self.tail = table.new_page()  # leak: abandon() releases tail, commit() sets it to None and loses it
        return self.tail is not None or self._no_tail()

    def _no_tail(self):
        self.abandon()
        return False

    def commit(self):
        table = self.tree.table
        path = self.tree.walk(self.keys[:len(self.shared)])
        node = path[-1] if path else self.tree.root
        for key, page in zip(self.keys[len(self.shared):], self.own):
            node = self.tree.insert(node, key, page)
        table.release_all(self.shared)
        table.release_all(self.own)
        self.shared, self.own, self.tail = [], [], None
        return True

    def abandon(self):
        table = self.tree.table
        table.release_all(self.shared)
        table.release_all(self.own)
        if self.tail is not None:
            table.release(self.tail)
        self.shared, self.own, self.tail = [], [], None


def prefill(tree, keys, run_model):
    job = Prefill(tree, keys)
    if not job.begin():
        return False
    if not run_model([p.index for p in job.own]):
        job.abandon()
        return False
    return job.commit()
