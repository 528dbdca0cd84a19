"""Speculative decoding: a draft and a target worker with caches of their own."""
from __future__ import annotations


class CacheLines:
    def __init__(self, n, role):
        self.role = role
        self._stock = list(range(n))

    def get_line(self):
        if not self._stock:
            return None
        return self._stock.pop()  # clean: the caller gets the line

    def get_lines(self, n):
        if len(self._stock) < n:
            return []
        lines = []
        while len(lines) < n:
            lines.append(self._stock.pop())  # clean: all of them are returned
        return lines

    def put_line(self, line):
        self._stock.append(line)

    def put_lines(self, lines):
        self._stock.extend(lines)


class DraftModel:
    def propose(self, token, k):
        return [(token * 31 + i) % 997 for i in range(k)]


class TargetModel:
    def verify(self, tokens):
        n = 0
        for t in tokens:
            if t % 5 == 0:
                break
            n += 1
        return n


class SpecWorker:
    def __init__(self, draft, target, draft_lines, target_lines, k):
        self.draft = draft
        self.target = target
        self.draft_lines = draft_lines
        self.target_lines = target_lines
        self.k = k
        self.target_held = {}
        self.draft_held = {}
        self.bonus = {}

    def begin(self, sid):
        if sid in self.target_held:
            return False
        t = self.target_lines.get_lines(self.k + 1)  # clean: finish() puts the target's lines back
        if not t:
            return False
        self.target_held[sid] = t
        d = self.draft_lines.get_lines(self.k)  # leak: finish() frees the target's lines only
        self.draft_held[sid] = d
        return True

    def finish(self, sid):
        lines = self.target_held.pop(sid, None)
        if lines:
            self.target_lines.put_lines(lines)

    def step(self, sid, token):
        scratch = self.draft_lines.get_lines(self.k)  # leak: total rejection returns without putting them back
        if not scratch:
            return [token]
        proposal = self.draft.propose(token, self.k)
        n = self.target.verify(proposal)
        if n == 0:
            return [token]
        self.draft_lines.put_lines(scratch)
        return proposal[:n]

    def step_partial(self, sid, token):
        scratch = self.draft_lines.get_lines(self.k)  # clean: near miss, the rejected tail goes back now, the accepted head too
        if not scratch:
            return [token]
        proposal = self.draft.propose(token, self.k)
        n = self.target.verify(proposal)
        self.draft_lines.put_lines(scratch[n:])
        accepted = proposal[:n]
        self.draft_lines.put_lines(scratch[:n])
        return accepted

    def step_trim(self, sid, token):
        scratch = self.draft_lines.get_lines(self.k)  # leak: the accepted head of the lines is forgotten
        if not scratch:
            return [token]
        proposal = self.draft.propose(token, self.k)
        n = self.target.verify(proposal)
        self.draft_lines.put_lines(scratch[n:])
        return proposal[:n]

    def add_bonus(self, sid):
        if sid in self.bonus:
            return self.bonus[sid]
        line = self.target_lines.get_line()  # clean: near miss, guarded by the lookup, drop_bonus() puts it back
        if line is not None:
            self.bonus[sid] = line
        return line

    def drop_bonus(self):
        for line in self.bonus.values():
            self.target_lines.put_line(line)
        self.bonus.clear()


class TreeNode:
    def __init__(self, token, line, parent=None):
        self.token = token
        self.line = line
        self.parent = parent
        self.kids = []


class TreeSpeculator:
    def __init__(self, lines, draft):
        self.lines = lines
        self.draft = draft

    def expand(self, root, width, depth):
        if depth == 0:
            return 0
        n = 0
        for token in self.draft.propose(root.token, width):
            line = self.lines.get_line()  # leak: pruned tokens never become a node and keep their line
            if line is None:
                return n
            if token % 2 and depth > 1:
                continue
            kid = TreeNode(token, line, root)
            root.kids.append(kid)
            n += 1 + self.expand(kid, width, depth - 1)
        return n

    def collapse(self, root):
        for kid in root.kids:
            self.collapse(kid)
            self.lines.put_line(kid.line)
        root.kids.clear()

    def run(self, token, width):
        line = self.lines.get_line()  # clean: put back after the subtree collapsed
        if line is None:
            return token
        root = TreeNode(token, line)
        self.expand(root, width, 2)
        best = max((k.token for k in root.kids), default=token)
        self.collapse(root)
        self.lines.put_line(line)
        return best


class NgramSpeculator:
    def __init__(self, lines, history):
        self.lines = lines
        self.history = history

    def lookup(self, token):
        line = self.lines.get_line()  # leak: a hit in the history returns past the put
        if line is None:
            return []
        for i in range(len(self.history) - 1, -1, -1):
            if self.history[i] == token:
                return self.history[i + 1:i + 4]
        self.lines.put_line(line)
        return []

    def lookup_last(self, token):
        line = self.lines.get_line()  # clean: near miss, break lands before the put
        if line is None:
            return []
        found = []
        for i in range(len(self.history) - 1, -1, -1):
            if self.history[i] == token:
                found = self.history[i + 1:i + 4]
                break
        self.lines.put_line(line)
        return found
