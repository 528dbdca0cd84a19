"""Token quota: an amount is held before a call and settled or refunded after it."""
from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Hold:
    tenant: str
    amount: int
    parent: str = ""
    from_parent: int = 0


@dataclass
class Call:
    call_id: str
    tenant: str
    prompt: str
    max_tokens: int
    internal: bool = False
    hold: Hold | None = None


class Ledger:
    def __init__(self, limits: dict[str, int]) -> None:
        self._left = dict(limits)
        self._lock = threading.Lock()

    def hold(self, tenant: str, amount: int) -> Hold | None:
        with self._lock:
            if self._left.get(tenant, 0) < amount:
                return None
            self._left[tenant] -= amount  # clean: written on the hold that the caller gets
            return Hold(tenant, amount)

    def hold_shared(self, tenant: str, parent: str, amount: int) -> Hold | None:
        """Takes from the tenant, and from the parent organisation what the tenant lacks."""
        with self._lock:
            own = min(self._left.get(tenant, 0), amount)
            self._left[tenant] = self._left.get(tenant, 0) - own  # leak: the tenant's part is not put back when the parent has too little
            rest = amount - own
            if rest > self._left.get(parent, 0):
                return None
            self._left[parent] = self._left.get(parent, 0) - rest  # clean: written on the hold that the caller gets
            return Hold(tenant, amount, parent, rest)

    def refund(self, hold: Hold) -> None:
        self.settle(hold, 0)

    def settle(self, hold: Hold, used: int) -> None:
        with self._lock:
            back = max(hold.amount - used, 0)
            to_parent = min(back, hold.from_parent)
            self._left[hold.tenant] += back - to_parent
            if to_parent:
                self._left[hold.parent] += to_parent


class Biller:
    """Takes over a hold if the call is billable, otherwise leaves it with the caller."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: list[tuple[Hold, int]] = []

    def take_over(self, call: Call, hold: Hold, used: int) -> bool:
        if call.internal or used == 0:
            return False
        self._pending.append((hold, used))
        return True

    def run_batch(self) -> int:
        batch, self._pending = self._pending, []
        for hold, used in batch:
            self._ledger.settle(hold, used)
        return len(batch)


class Metered:
    def __init__(self, ledger: Ledger, biller: Biller) -> None:
        self._ledger = ledger
        self._biller = biller
        self._calls: dict[str, Call] = {}

    @staticmethod
    def _generate(prompt: str, limit: int) -> list[str]:
        return prompt.split()[:limit]

    def simple(self, call: Call) -> list[str]:
        hold = self._ledger.hold(call.tenant, call.max_tokens)  # clean: near miss, the empty prompt refunds, the rest settles
        if hold is None:
            return []
        if not call.prompt:
            self._ledger.refund(hold)
            return []
        words = self._generate(call.prompt, call.max_tokens)
        self._ledger.settle(hold, len(words))
        return words

    def billed(self, call: Call) -> list[str]:
        hold = self._ledger.hold(call.tenant, call.max_tokens)  # leak: the biller leaves internal calls' holds here and the answer is not looked at
        if hold is None:
            return []
        words = self._generate(call.prompt, call.max_tokens)
        self._biller.take_over(call, hold, len(words))
        return words

    def billed_checked(self, call: Call) -> list[str]:
        hold = self._ledger.hold(call.tenant, call.max_tokens)  # clean: near miss, a hold the biller does not take is refunded
        if hold is None:
            return []
        words = self._generate(call.prompt, call.max_tokens)
        if not self._biller.take_over(call, hold, len(words)):
            self._ledger.refund(hold)
        return words

    def begin(self, call: Call) -> bool:
        if call.call_id in self._calls:
            return False
        call.hold = self._ledger.hold(call.tenant, call.max_tokens)  # leak: cancelling an internal call pops it without the refund
        if call.hold is None:
            return False
        self._calls[call.call_id] = call
        return True

    def end(self, call_id: str, used: int) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None and call.hold is not None:
            self._ledger.settle(call.hold, used)
            call.hold = None

    def cancel(self, call_id: str) -> bool:
        call = self._calls.pop(call_id, None)
        if call is None:
            return False
        if call.hold is not None and not call.internal:
            self._ledger.refund(call.hold)
        call.hold = None
        return True

    def best_of(self, call: Call, tries: int) -> list[str]:
        best: list[str] = []
        for _ in range(tries):
            hold = self._ledger.hold(call.tenant, call.max_tokens)  # leak: a full-length answer breaks out before it is settled
            if hold is None:
                break
            words = self._generate(call.prompt, call.max_tokens)
            if len(words) == call.max_tokens:
                best = words
                break
            self._ledger.settle(hold, len(words))
            best = max(best, words, key=len)
        return best

    def escalate(self, call: Call) -> Hold | None:
        """A hold of the full amount or of half of it, for the caller to settle."""
        hold = self._ledger.hold(call.tenant, call.max_tokens)  # clean: near miss, only rebound while it is None, then returned
        if hold is None:
            hold = self._ledger.hold(call.tenant, call.max_tokens // 2)  # clean: returned
        return hold

    def preview(self, call: Call) -> str:
        hold = self.escalate(call)  # clean: settled before the return
        if hold is None:
            return ""
        text = " ".join(self._generate(call.prompt, hold.amount))
        self._ledger.settle(hold, 0)
        return text
