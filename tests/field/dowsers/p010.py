"""Per-step token budget of a continuous-batching scheduler."""
from dataclasses import dataclass


@dataclass
class TokenBudget:
    limit: int
    spent: int = 0

    @property
    def left(self) -> int:
        return self.limit - self.spent

    def charge(self, n: int) -> bool:
        if n > self.limit - self.spent:
            return False
        self.spent += n
        return True

    def refund(self, n: int) -> None:
        self.spent -= n


class Scheduler:
    def __init__(self, budget: TokenBudget, blocks):
        self.budget = budget
        self.blocks = blocks
        self.running = []

    def admit(self, req):
        if not self.budget.charge(req.prompt_len):  # leak: no blocks, the tokens are not refunded
            return False
        if not self.blocks.fits(req.prompt_len):
            return False
        self.running.append(req)
        return True

    def retire(self, req):
        self.running.remove(req)
        self.budget.refund(req.prompt_len)

    def try_chunk(self, req, size, runner):
        if not self.budget.charge(size):  # clean: refunded in finally
            return None
        try:
            return runner.chunk(req, size)
        finally:
            self.budget.refund(size)

    def fill(self, waiting, runner):
        for req in waiting:
            if not self.budget.charge(req.remaining):  # leak: continue on a stale request skips the refund
                break
            if req.stale:
                continue
            runner.step(req)
            self.budget.refund(req.remaining)

    def requeue(self, req, runner):
        if self.budget.charge(1):  # clean: refunded at once when the probe is over
            runner.probe(req)
            self.budget.refund(1)
