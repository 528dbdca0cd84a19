"""Memory budgets in a tree: a child takes from itself and from all above it."""


class Budget:
    def __init__(self, limit, parent=None):
        self.limit, self.parent = limit, parent
        self.used = 0

    def _chain(self):
        node = self
        while node is not None:
            yield node
            node = node.parent

    def _give(self, upto, nbytes):
        for node in self._chain():
            if node is upto:
                return
            node.used -= nbytes

    def try_take(self, nbytes):
        for node in self._chain():
            if node.used + nbytes > node.limit:
                self._give(node, nbytes)
                return False
            node.used += nbytes
        return True

    def give(self, nbytes):
        self._give(None, nbytes)

    def child(self, limit):
        return Budget(limit, self)


class HashJoin:
    def __init__(self, budget, spill):
        self.budget = budget
        self.spill = spill
        self.held = 0

    def add(self, rows):
        size = 64 * len(rows)
        if self.budget.try_take(size):  # clean: summed in held, given by close
            self.held += size
            return True
        self.spill.write(rows)
        return False

    def close(self):
        self.budget.give(self.held)
        self.held = 0


def sort_rows(budget, rows, key):
    size = 48 * len(rows)
    if not budget.try_take(size):  # leak: sorted input is not given back
        return None
    if all(key(a) <= key(b) for a, b in zip(rows, rows[1:])):
        return rows
    out = sorted(rows, key=key)
    budget.give(size)
    return out


def fits(budget, n):
    ok = budget.try_take(n)  # clean: given back at once
    if ok:
        budget.give(n)
    return ok
