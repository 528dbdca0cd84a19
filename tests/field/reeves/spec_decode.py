"""Speculative decoding: paired draft and target sessions, tree drafts and verification."""
from collections import deque
from typing import NamedTuple


class CachePool:
    def __init__(self, name, n):
        self.name = name
        self._handles = deque(f"{name}/{i}" for i in range(n))
        self._lengths = {}

    def checkout(self, length=0):
        if not self._handles:
            return None
        handle = self._handles.popleft()
        self._lengths[handle] = length
        return handle

    def checkin(self, handle):
        del self._lengths[handle]
        self._handles.append(handle)

    def grow(self, handle, n):
        self._lengths[handle] += n


class Pair(NamedTuple):
    draft: str
    target: str


class Session:
    def __init__(self, rid, pair, prompt):
        self.rid = rid
        self.pair = pair
        self.text = list(prompt)
        self.branches = []
        self.best = None
        self.accepted = 0
        self.rounds = 0


class SpecDecoder:
    def __init__(self, drafts: CachePool, targets: CachePool, width=4):
        self.drafts = drafts
        self.targets = targets
        self.width = width
        self.sessions = {}
        self.fallback = {}

    def open_pair(self, n):
        draft = self.drafts.checkout(n)  # clean: near miss, handed on in the pair or checked in below
        if draft is None:
            return None
        target = self.targets.checkout(n)  # clean: near miss, handed on in the pair
        if target is None:
            self.drafts.checkin(draft)
            return None
        return Pair(draft, target)

    def start(self, rid, prompt):
        pair = self.open_pair(len(prompt))  # leak: stop() checks in the target of the pair and not the draft
        if pair is None:
            return False
        self.sessions[rid] = Session(rid, pair, prompt)
        return True

    def start_plain(self, rid, prompt):
        """No draft model: target cache alone."""
        if rid in self.fallback:
            return False
        handle = self.targets.checkout(len(prompt))  # clean: near miss, stop() checks in a plain handle too
        if handle is None:
            return False
        self.fallback[rid] = (handle, list(prompt))
        return True

    def propose(self, rid, draft_model):
        s = self.sessions[rid]
        for _ in range(self.width):
            handle = self.drafts.checkout(len(s.text))  # clean: near miss, verify() and stop() check in
            if handle is None:
                break
            s.branches.append((handle, draft_model(handle, s.text)))
        return len(s.branches)

    def verify(self, rid, target_model):
        s = self.sessions[rid]
        scored = [(target_model(s.pair.target, tokens), handle, tokens) for handle, tokens in s.branches]
        if not scored:
            return 0
        n, _, tokens = max(scored, key=lambda item: item[0])
        while s.branches:
            handle, _ = s.branches.pop()
            self.drafts.checkin(handle)
        s.text += tokens[:n]
        self.targets.grow(s.pair.target, n)
        s.accepted += n
        s.rounds += 1
        return n

    def remember_best(self, rid):
        """Keeps a copy of the cache at the longest accepted length, for a later rewind."""
        s = self.sessions[rid]
        copy = self.targets.checkout(len(s.text))  # leak: a second call overwrites it, stop() sees the last
        if copy is None:
            return False
        s.best = (copy, len(s.text))
        return True

    def rewind(self, rid):
        s = self.sessions[rid]
        if s.best is None:
            return False
        handle, length = s.best
        del s.text[length:]
        self.targets.checkin(handle)
        s.best = None
        return True

    def stop(self, rid):
        if rid in self.fallback:
            handle, text = self.fallback.pop(rid)
            self.targets.checkin(handle)
            return text
        s = self.sessions.pop(rid)
        for handle, _ in s.branches:
            self.drafts.checkin(handle)
        if s.best is not None:
            self.targets.checkin(s.best[0])
        self.targets.checkin(s.pair.target)
        return s.text


class TreeDraft:
    """Token tree whose inner nodes own a draft cache each."""

    def __init__(self, pool: CachePool):
        self.pool = pool
        self.kids = {}
        self.handle = None

    def expand(self, path, tokens):
        node = self
        for token in path:
            node = node.kids[token]
        for token in tokens:
            child = node.kids.get(token)
            if child is None:
                child = node.kids[token] = TreeDraft(self.pool)
            if child.handle is None:
                child.handle = self.pool.checkout(len(path) + 1)  # leak: prune() deletes it with the node
        return len(node.kids)

    def prune(self, keep):
        for token in [t for t in self.kids if t != keep]:
            del self.kids[token]

    def clear(self):
        for child in self.kids.values():
            child.clear()
        self.kids.clear()
        if self.handle is not None:
            self.pool.checkin(self.handle)
            self.handle = None


class FlatDraft:
    def __init__(self, pool: CachePool):
        self.pool = pool
        self.handles = []

    def widen(self, n):
        self.handles += [h for _ in range(n) if (h := self.pool.checkout()) is not None]  # clean: near miss, narrow, clear

    def narrow(self, keep):
        gone, self.handles = self.handles[keep:], self.handles[:keep]
        for handle in gone:
            self.pool.checkin(handle)

    def clear(self):
        self.narrow(0)
