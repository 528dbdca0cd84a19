"""Radix prefix cache: nodes are reference counted, unreferenced leaves may be evicted."""
from __future__ import annotations

import time


class RadixNode:
    def __init__(self, key=(), parent=None):
        self.key = tuple(key)
        self.parent = parent
        self.children = {}
        self.lock_ref = 0
        self.stamp = time.monotonic()


class RadixCache:
    """match() takes a reference on the path, unmatch() gives it back."""

    def __init__(self):
        self.root = RadixNode()
        self.pinned = 0

    def _walk(self, tokens):
        node, i = self.root, 0
        while i < len(tokens):
            child = node.children.get(tokens[i])
            if child is None or tokens[i:i + len(child.key)] != list(child.key):
                break
            i += len(child.key)
            node = child
        return node, i

    def match(self, tokens):
        node, n = self._walk(tokens)
        if n == 0:
            return None
        self._inc(node)  # clean: the caller gets the node and owes unmatch()
        return node

    def _inc(self, node):
        while node is not None and node is not self.root:
            if node.lock_ref == 0:
                self.pinned += 1
            node.lock_ref += 1  # clean: counted for the caller, _dec takes it off
            node = node.parent

    def _dec(self, node):
        while node is not None and node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                self.pinned -= 1
            node = node.parent

    def unmatch(self, node):
        node.stamp = time.monotonic()
        self._dec(node)

    def insert(self, tokens):
        node, n = self._walk(tokens)
        if n < len(tokens):
            child = RadixNode(tokens[n:], node)
            node.children[tokens[n]] = child
            node = child
        return node

    def insert_pinned(self, tokens):
        node = self.insert(tokens)
        self._inc(node)  # clean: the caller owns the pin
        return node

    def evict(self, leaf):
        if leaf.children or leaf.lock_ref:
            return 0
        del leaf.parent.children[leaf.key[0]]
        return len(leaf.key)


class Req:
    def __init__(self, rid, tokens, max_new=16):
        self.rid = rid
        self.tokens = list(tokens)
        self.max_new = max_new
        self.last_node = None
        self.aborted = False


class PrefillAdder:
    def __init__(self, cache, token_budget):
        self.cache = cache
        self.budget = token_budget
        self.accepted = []

    def add(self, req):
        node = self.cache.match(req.tokens)  # leak: the over-budget return never drops the reference
        cached = len(node.key) if node is not None else 0
        cost = len(req.tokens) - cached + req.max_new
        if cost > self.budget:
            return False
        self.budget -= cost
        self.accepted.append(req)
        if node is not None:
            self.cache.unmatch(node)
        return True

    def cached_len(self, tokens):
        node = self.cache.match(tokens)  # clean: near miss, None means nothing was counted
        if node is None:
            return 0
        n = len(node.key)
        self.cache.unmatch(node)
        return n

    def estimate(self, reqs):
        total = 0
        for req in reqs:
            node = self.cache.match(req.tokens)  # leak: an aborted request is skipped with its path counted
            if node is None:
                total += len(req.tokens)
                continue
            if req.aborted:
                continue
            total += len(req.tokens) - len(node.key)
            self.cache.unmatch(node)
        return total


class Batcher:
    def __init__(self, cache):
        self.cache = cache
        self.running = {}

    def start(self, req):
        if req.rid in self.running:
            return
        req.last_node = self.cache.insert_pinned(req.tokens)  # clean: finish() and abort_all() unmatch last_node
        self.running[req.rid] = req

    def extend(self, req, token):
        req.tokens.append(token)
        if len(req.tokens) % 8:
            return
        req.last_node = self.cache.insert_pinned(req.tokens)  # leak: overwrites last_node whose pin is still held

    def extend_chunked(self, req, chunk):
        req.tokens.extend(chunk)
        fresh = self.cache.insert_pinned(req.tokens)  # clean: near miss, the new pin is taken before the old one is dropped
        old, req.last_node = req.last_node, fresh
        if old is not None:
            self.cache.unmatch(old)

    def finish(self, req):
        self.running.pop(req.rid, None)
        if req.last_node is not None:
            self.cache.unmatch(req.last_node)
            req.last_node = None

    def abort_all(self):
        for req in list(self.running.values()):
            self.finish(req)

    def share(self, tokens):
        node = self.cache.match(tokens)  # clean: unmatched right after the look
        if node is None:
            return False
        shared = node.lock_ref > 1
        self.cache.unmatch(node)
        return shared


def pin_system_prompt(cache, prompt):
    cache.insert_pinned(prompt)  # leak: the node is dropped, nobody can unpin it
    return len(prompt)


def longest_hit(cache, candidates):
    best = None
    for tokens in candidates:
        node = cache.match(tokens)  # leak: a better candidate rebinds best and the worse one is never unmatched
        if node is None:
            continue
        if best is None or len(node.key) > len(best.key):
            best = node
        else:
            cache.unmatch(node)
    if best is None:
        return 0
    n = len(best.key)
    cache.unmatch(best)
    return n
