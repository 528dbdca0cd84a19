"""Assembly of a query plan with a builder that leases temporary tables."""
import itertools


class TempTables:
    def __init__(self, count):
        self._names = [f"tmp_{i}" for i in range(count)]

    def issue(self):
        return self._names.pop()

    def retire(self, name):
        self._names.append(name)


class Plan:
    def __init__(self, steps, temps, tables):
        self.steps = steps
        self.temps = temps
        self.tables = tables

    def execute(self, db):
        rows = [db.run(step) for step in self.steps]
        for name in self.temps:
            self.tables.retire(name)
        return rows[-1] if rows else None

    def explain(self):
        return "\n".join(f"{n}: {step}" for n, step in zip(itertools.count(1), self.steps))

    def discard(self):
        for name in self.temps:
            self.tables.retire(name)
        self.temps = []


class PlanBuilder:
    def __init__(self, tables):
        self.tables = tables
        self.steps = []
        self.temps = []

    def scan(self, table):
        self.steps.append(f"scan {table}")
        return self

    def spill(self):
        name = self.tables.issue()  # clean: kept by the builder, passed to the plan
        self.temps.append(name)
        self.steps.append(f"spill into {name}")
        return self

    def build(self):
        return Plan(self.steps, self.temps, self.tables)


def spilling(tables, table):
    return PlanBuilder(tables).scan(table).spill().build()  # clean: the plan is handed to the caller


def count(db, tables, table):
    plan = spilling(tables, table)  # clean: execute retires
    plan.steps.append("count")
    return plan.execute(db)


def explain(tables, table):
    return spilling(tables, table).explain()  # leak: explained and dropped


def cheapest(db, tables, names):
    best = None
    for name in names:
        plan = spilling(tables, name)  # leak: the plans that lose are not discarded
        if best is None or len(plan.explain()) < len(best.explain()):
            best = plan
    return best.execute(db) if best else None


def explain_all(tables, names):
    texts = []
    for name in names:
        plan = spilling(tables, name)  # clean: discarded
        texts.append(plan.explain())
        plan.discard()
    return texts
