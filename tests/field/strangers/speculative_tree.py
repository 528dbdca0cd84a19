"""Draft trees: every node holds a page, accepted paths keep theirs."""


class TreePages:
    def __init__(self):
        self.high = 0
        self.spare = []

    def page_in(self):
        if self.spare:
            return self.spare.pop()
        self.high += 1
        return self.high

    def page_out(self, page):
        self.spare.append(page)


class Node:
    def __init__(self, token, page, parent=None):
        self.token = token
        self.page = page
        self.parent = parent
        self.children = []


class Tree:
    def __init__(self, pages, token):
        self.pages = pages
        self.root = Node(token, pages.page_in())  # clean: near miss, destroy walks the tree from the root

    def expand(self, node, tokens):
        for token in tokens:
            child = Node(token, self.pages.page_in(), node)  # clean: near miss, destroyed recursively with its parent
            node.children.append(child)

    def destroy(self, node=None):
        node = node or self.root
        for child in node.children:
            self.destroy(child)
        node.children = []
        self.pages.page_out(node.page)

    def accept(self, node, chosen):
        """Keep the chosen child, destroy its siblings."""
        for child in node.children:
            if child is not chosen:
                self.destroy(child)
        node.children = [chosen]


class LinearDraft:
    def __init__(self, pages):
        self.pages = pages
        self.chain = []

    def push(self, token):
        self.chain.append((token, self.pages.page_in()))  # leak: cut throws away the tail with its pages
        return len(self.chain)

    def cut(self, n):
        self.chain = self.chain[:n]

    def close(self):
        for _, page in self.chain:
            self.pages.page_out(page)
        self.chain = []


class StackDraft:
    def __init__(self, pages):
        self.pages = pages
        self.stack = []

    def push(self, token):
        self.stack.append((token, self.pages.page_in()))  # clean: near miss, cut pages the tail out first
        return len(self.stack)

    def cut(self, n):
        tail, self.stack = self.stack[n:], self.stack[:n]
        for _, page in tail:
            self.pages.page_out(page)

    def close(self):
        self.cut(0)


def verify(pages, draft, target):
    page = pages.page_in()  # leak: a mismatch returns from inside the loop
    for i, (d, t) in enumerate(zip(draft, target)):
        if d != t:
            return i
    pages.page_out(page)
    return len(draft)


def verify_flag(pages, draft, target):
    page = pages.page_in()  # clean: near miss, the mismatch breaks and paging out comes behind the loop
    matched = 0
    for d, t in zip(draft, target):
        if d != t:
            break
        matched += 1
    pages.page_out(page)
    return matched
