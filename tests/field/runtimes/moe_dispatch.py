"""Expert-parallel dispatch: send/receive slots and capacity rows per expert."""
from collections import defaultdict
from dataclasses import dataclass, field

import torch


class RowPool:
    """Rows of a big dispatch buffer, lent as lists of row ids."""

    def __init__(self, rows, hidden, device="cpu"):
        self.buffer = torch.zeros(rows, hidden, device=device)
        self._open = list(range(rows))

    def claim_rows(self, n):
        if n > len(self._open):
            return None
        rows, self._open = self._open[:n], self._open[n:]  # clean: the slice is returned
        return rows

    def claim_row(self):
        return self._open.pop() if self._open else None  # clean: returned

    def yield_rows(self, rows):
        self._open.extend(rows)

    def yield_row(self, row):
        self._open.append(row)


@dataclass
class Plan:
    rows: dict = field(default_factory=dict)
    overflow: list = field(default_factory=list)
    spare: list = field(default_factory=list)


class Dispatcher:
    def __init__(self, pool, experts, capacity):
        self._pool = pool
        self._experts = experts
        self._capacity = capacity
        self._standby = {}

    def plan(self, counts):
        plan = Plan()
        for expert in range(self._experts):
            n = min(counts[expert], self._capacity)
            if n == 0:
                continue
            rows = self._pool.claim_rows(n)  # clean: near miss, lives in the plan, which retire empties
            if rows is None:
                plan.overflow.append(expert)
                continue
            plan.rows[expert] = rows
        return plan

    def plan_with_spare(self, counts, spare):
        plan = self.plan(counts)  # clean: returned with the plan
        extra = self._pool.claim_rows(spare)  # leak: retire gives back the expert rows and not the spare ones
        if extra is not None:
            plan.spare = extra
        return plan

    def plan_strict(self, counts):
        plan = self.plan(counts)  # clean: near miss, retired before the None is returned
        if plan.overflow:
            self.retire(plan)
            return None
        return plan

    def plan_balanced(self, counts, tolerance):
        plan = self.plan(counts)  # leak: an unbalanced plan is replaced by None without being retired
        sizes = [len(r) for r in plan.rows.values()]
        if sizes and max(sizes) - min(sizes) > tolerance:
            plan = None
        return plan

    def retire(self, plan):
        for rows in plan.rows.values():
            self._pool.yield_rows(rows)
        plan.rows.clear()

    def dispatch(self, x, assignment):
        by_expert = defaultdict(list)
        for token, expert in enumerate(assignment):
            row = self._pool.claim_row()  # clean: near miss, on shortage everything so far is yielded, else handed out
            if row is None:
                for pairs in by_expert.values():
                    self._pool.yield_rows([r for _, r in pairs])
                return {}
            self._pool.buffer[row].copy_(x[token])
            by_expert[expert].append((token, row))
        return by_expert

    def combine(self, x, assignment, experts):
        routed = self.dispatch(x, assignment)  # clean: every list is yielded in the loop
        out = torch.zeros_like(x)
        for expert, pairs in routed.items():
            for token, row in pairs:
                out[token] = experts[expert](self._pool.buffer[row])
            self._pool.yield_rows([row for _, row in pairs])
        return out

    def combine_local(self, x, assignment, experts, local):
        routed = self.dispatch(x, assignment)  # leak: rows of experts that are not local are left out
        out = torch.zeros_like(x)
        for expert, pairs in routed.items():
            if expert not in local:
                continue
            for token, row in pairs:
                out[token] = experts[expert](self._pool.buffer[row])
                self._pool.yield_row(row)
        return out

    def reserve_standby(self, expert):
        if expert in self._standby:
            return self._standby[expert]
        rows = self._pool.claim_rows(self._capacity)  # clean: near miss, only when there was none, yielded by drop_standby
        if rows is not None:
            self._standby[expert] = rows
        return rows

    def resize_standby(self, expert, n):
        rows = self._pool.claim_rows(n)  # leak: when the old list is long enough it stays and the new rows are forgotten
        if rows is not None and n > len(self._standby.get(expert, ())):
            self._pool.yield_rows(self._standby.pop(expert, []))
            self._standby[expert] = rows
        return self._standby.get(expert)

    def drop_standby(self, expert=None):
        if expert is not None:
            rows = self._standby.pop(expert, [])
        else:
            rows = sum(self._standby.values(), [])
            self._standby = {}
        self._pool.yield_rows(rows)

    def top2(self, x, first, second, gate):
        out = torch.zeros_like(x)
        for token in range(x.shape[0]):
            a = self._pool.claim_row()  # leak: kept when no second row can be had
            if a is None:
                break
            b = self._pool.claim_row() if gate[token] < 1.0 else None  # clean: near miss, yielded whenever it is a row
            if b is None and gate[token] < 1.0:
                continue
            self._pool.buffer[a].copy_(first(x[token]) * gate[token])
            out[token] = self._pool.buffer[a]
            if b is not None:
                self._pool.buffer[b].copy_(second(x[token]) * (1 - gate[token]))
                out[token] += self._pool.buffer[b]
                self._pool.yield_row(b)
            self._pool.yield_row(a)
        return out


def rehearse(dispatcher, pool, counts):
    need = sum(counts)
    rows = pool.claim_rows(need)  # leak: the rows are lost when the plan is too tight
    if rows is None:
        return 0.0
    plan = dispatcher.plan_strict(counts)  # clean: retired below
    if plan is None:
        return 0.0
    ratio = need / max(1, sum(len(r) for r in plan.rows.values()))
    dispatcher.retire(plan)
    pool.yield_rows(rows)
    return ratio
