"""Memory of a query executor: grants from a budget, operators that spill, plans that own operators."""
import os
import tempfile
import threading
from contextlib import ExitStack


class Grant:
    def __init__(self, size, label):
        self.size = size
        self.label = label


class MemoryBudget:
    """charge() gives a Grant or None, refund() ends it, widen() makes a live grant larger."""

    def __init__(self, total):
        self.total = total
        self.used = 0
        self._lock = threading.Lock()

    def charge(self, size, label):
        with self._lock:
            if self.used + size > self.total:
                return None
            self.used += size
            return Grant(size, label)

    def widen(self, grant, extra):
        with self._lock:
            if self.used + extra > self.total:
                return False
            self.used += extra
            grant.size += extra
            return True

    def refund(self, grant):
        with self._lock:
            self.used -= grant.size
            grant.size = 0


class SubBudget:
    """A share of a parent budget for one query; the share is refunded by dissolve()."""

    def __init__(self, parent, share, label):
        self.parent = parent
        self.label = label
        self.whole = parent.charge(share, label)  # clean: dissolve refunds it
        self.inner = MemoryBudget(share if self.whole is not None else 0)

    def charge(self, size, label):
        return self.inner.charge(size, f"{self.label}/{label}")  # clean: handed to the caller

    def refund(self, grant):
        self.inner.refund(grant)

    def dissolve(self):
        if self.whole is not None:
            self.parent.refund(self.whole)
            self.whole = None


class Operator:
    def __init__(self, budget, name):
        self.budget = budget
        self.name = name
        self.grant = None

    def open(self, size):
        if self.grant is None:
            self.grant = self.budget.charge(size, self.name)  # clean: near miss, close refunds it
        return self.grant is not None

    def close(self):
        if self.grant is not None:
            self.budget.refund(self.grant)
            self.grant = None


class Sort(Operator):
    """External sort: runs that do not fit are written to temporary files."""

    def __init__(self, budget, keys):
        super().__init__(budget, "sort")
        self.keys = keys
        self.rows = []
        self.runs = []

    def push(self, row):
        self.rows.append(row)
        if len(self.rows) * 64 <= self.grant.size:
            return
        if not self.budget.widen(self.grant, 4096):  # clean: near miss, the refund in close covers it
            self.spill()

    def spill(self):
        self.rows.sort(key=lambda row: tuple(row[k] for k in self.keys))
        path = os.path.join(tempfile.gettempdir(), f"run-{id(self)}-{len(self.runs)}")
        with open(path, "w", encoding="utf-8") as out:  # clean: with closes it
            for row in self.rows:
                out.write(repr(row) + "\n")
        self.runs.append(path)
        self.rows = []

    def merge(self):
        streams = []
        for path in self.runs:
            streams.append(open(path, encoding="utf-8"))  # leak: the streams are read and never closed
        lines = sorted(line for stream in streams for line in stream)
        for path in self.runs:
            os.unlink(path)
        self.runs = []
        return lines

    def close(self):
        self.rows = []
        super().close()


class HashJoin(Operator):
    def __init__(self, budget, key):
        super().__init__(budget, "hash-join")
        self.key = key
        self.table = {}
        self.partitions = []

    def build(self, rows):
        for row in rows:
            self.table.setdefault(row[self.key], []).append(row)

    def repartition(self, count):
        """Splits the table; every partition has a grant of its own from here on."""
        grants = [self.budget.charge(1024, f"part-{i}") for i in range(count)]  # leak: lost if one is None
        if any(grant is None for grant in grants):
            return False
        self.partitions = [(grant, {}) for grant in grants]
        for value, rows in self.table.items():
            self.partitions[hash(value) % count][1][value] = rows
        self.table = {}
        return True

    def close(self):
        for grant, part in self.partitions:
            part.clear()
            self.budget.refund(grant)
        self.partitions = []
        super().close()


class Aggregate(Operator):
    """Groups in memory with a second grant for distinct values."""

    def __init__(self, budget, key):
        super().__init__(budget, "aggregate")
        self.key = key
        self.groups = {}
        self.distinct = None

    def want_distinct(self, size):
        if self.distinct is None:
            self.distinct = self.budget.charge(size, "distinct")  # leak: close skips it with groups
        return self.distinct is not None

    def add(self, row):
        group = self.groups.setdefault(row[self.key], set())
        group.add(tuple(sorted(row.items())))

    def close(self):
        if self.distinct is not None and not self.groups:
            self.budget.refund(self.distinct)
        self.distinct = None
        self.groups.clear()
        super().close()


def run_sorted(budget, rows, keys):
    sort = Sort(budget, keys)
    if not sort.open(8192):  # clean: near miss, False took nothing and close refunds
        return None
    for row in rows:
        sort.push(row)
    sort.spill()
    lines = sort.merge()
    sort.close()
    return lines


def run_join(budget, left, right, key):
    """Rows of right that have a partner in left."""
    join = HashJoin(budget, key)
    if not join.open(16384):  # leak: an empty left side returns before the operator is closed
        return None
    join.build(left)
    if not join.table:
        return []
    matched = [row for row in right if row[key] in join.table]
    join.close()
    return matched


def plan_memory(budget, sizes):
    """Grants for all operators of a plan or nothing."""
    with ExitStack() as stack:
        grants = []
        for label, size in sizes.items():
            grant = budget.charge(size, label)  # clean: near miss, the stack refunds or all go out
            if grant is None:
                return None
            stack.callback(budget.refund, grant)
            grants.append(grant)
        stack.pop_all()
        return grants


def explain(budget, sizes):
    """Would the plan fit? Says how much of the budget it takes."""
    grants = plan_memory(budget, sizes)  # leak: the grants are summed up and not refunded
    if grants is None:
        return "does not fit"
    taken = sum(grant.size for grant in grants)
    return f"{taken} of {budget.total}"


def execute(budget, sizes, steps):
    grants = plan_memory(budget, sizes)  # clean: refunded in finally
    if grants is None:
        return []
    try:
        return [step(grant) for step, grant in zip(steps, grants)]
    finally:
        for grant in grants:
            budget.refund(grant)


def run_query(budget, share, work):
    sub = SubBudget(budget, share, "query")  # clean: dissolved in finally
    try:
        grant = sub.charge(share // 2, "work")  # clean: near miss, None-checked, refunded before the return
        if grant is None:
            return None
        result = work(grant.size)
        sub.refund(grant)
        return result
    finally:
        sub.dissolve()
