"""Multi-tenant quotas: tokens per tenant and KV blocks per request."""
import logging
import threading
from dataclasses import dataclass, field
from typing import ClassVar, Dict, Iterable, List, NewType, Optional, Tuple, Union

log = logging.getLogger(__name__)
TenantId = NewType("TenantId", str)


class QuotaExceeded(Exception):
    def __init__(self, tenant: TenantId, want: int) -> None:
        super().__init__(f"{tenant} wants {want}")
        self.tenant = tenant


@dataclass(frozen=True)
class Charge:
    tenant: TenantId
    tokens: int


class QuotaBook:
    default_limit: ClassVar[int] = 10_000

    def __init__(self, limits: Dict[TenantId, int]) -> None:
        self.limits = limits
        self.used: Dict[TenantId, int] = {}
        self._lock = threading.RLock()

    def charge(self, tenant: TenantId, tokens: int) -> Charge:
        with self._lock:
            used = self.used.get(tenant, 0)
            if used + tokens > self.limits.get(tenant, self.default_limit):
                raise QuotaExceeded(tenant, tokens)
            self.used[tenant] = used + tokens
            return Charge(tenant, tokens)

    def refund(self, c: Charge) -> None:
        with self._lock:
            self.used[c.tenant] -= c.tokens


class BlockPool:
    def __init__(self, n: int) -> None:
        self.free_ids: List[int] = list(range(n))

    def allocate(self, n: int) -> Optional[List[int]]:
        if n > len(self.free_ids):
            return None
        ids = self.free_ids[-n:] if n else []  # clean: handed out as a list
        del self.free_ids[len(self.free_ids) - n:]
        return ids

    def free(self, ids: Iterable[int]) -> None:
        self.free_ids.extend(ids)


@dataclass
class Req:
    rid: str
    tenant: TenantId
    tokens: int
    blocks: List[int] = field(default_factory=list)
    charge: Optional[Charge] = None
    priority: int = 0


class Admission:
    def __init__(self, book: QuotaBook, pool: BlockPool, block_size: int = 16) -> None:
        self.book = book
        self.pool = pool
        self.bs = block_size
        self.live: Dict[str, Req] = {}

    def need(self, r: Req) -> int:
        return -(-r.tokens // self.bs)

    def admit(self, r: Req) -> bool:
        try:
            charge = self.book.charge(r.tenant, r.tokens)  # clean: near miss, refunded when no blocks are left, else in the request
        except QuotaExceeded:
            return False
        blocks = self.pool.allocate(self.need(r))  # clean: in the request, finish() frees them
        if blocks is None:
            self.book.refund(charge)
            return False
        r.charge, r.blocks = charge, blocks
        self.live[r.rid] = r
        return True

    def finish(self, rid: str) -> None:
        r = self.live.pop(rid)
        self.pool.free(r.blocks)
        r.blocks = []
        if r.charge is not None:
            self.book.refund(r.charge)
            r.charge = None

    def admit_fast(self, r: Req) -> bool:
        charge = self.book.charge(r.tenant, r.tokens)  # leak: without blocks the charge stays booked
        blocks = self.pool.allocate(self.need(r))  # clean: stored, or None
        if blocks is None:
            log.info("no room for %s", r.rid)
            return False
        r.charge = charge
        r.blocks = blocks
        self.live[r.rid] = r
        return True

    def extend(self, r: Req, extra: int) -> bool:
        more = self.pool.allocate(extra)  # clean: near miss, added to the blocks that finish() frees
        if more is None:
            return False
        r.blocks += more
        return True

    def regrow(self, r: Req, n: int) -> bool:
        more = self.pool.allocate(n)  # leak: put over the blocks the request had
        if more is None:
            return False
        r.blocks = more
        return True

    def preempt_for(self, r: Req) -> bool:
        for victim in sorted(self.live.values(), key=lambda v: v.priority):
            if victim.priority >= r.priority:
                break
            self.finish(victim.rid)
            if self.admit(r):  # clean: the request is live and finished later
                return True
        return False

    def estimate(self, r: Req) -> int:
        blocks = self.pool.allocate(self.need(r))  # clean: freed before the count is returned
        if blocks is None:
            return -1
        n = len(blocks)
        self.pool.free(blocks)
        return n

    def speculative(self, r: Req, k: int) -> Tuple[bool, int]:
        blocks = self.pool.allocate(k + 1)  # leak: frees all but the first block
        if blocks is None:
            return False, 0
        self.pool.free(blocks[1:])
        return True, len(blocks)

    def charge_all(self, reqs: List[Req]) -> Union[List[Charge], None]:
        charges: List[Charge] = []
        for r in reqs:
            try:
                charges.append(self.book.charge(r.tenant, r.tokens))  # leak: a tenant over quota ends it with None and the earlier charges
            except QuotaExceeded as exc:
                log.warning("batch refused: %s", exc)
                return None
        return charges

    def charge_all_or_refund(self, reqs: List[Req]) -> Optional[List[Charge]]:
        charges: List[Charge] = []
        for r in reqs:
            try:
                charges.append(self.book.charge(r.tenant, r.tokens))  # clean: near miss, the handler refunds what was charged
            except QuotaExceeded:
                while charges:
                    self.book.refund(charges.pop())
                return None
        return charges

    def simulate(self, reqs: List[Req]) -> bool:
        charges = self.charge_all_or_refund(reqs)  # clean: refunded one by one
        if charges is None:
            return False
        for c in charges:
            self.book.refund(c)
        return True

    def can_charge(self, reqs: List[Req]) -> bool:
        return self.charge_all_or_refund(reqs) is not None  # leak: a successful charge is compared with None and lost


def transfer(book: QuotaBook, src: Charge, dst: TenantId) -> Optional[Charge]:
    moved = book.charge(dst, src.tokens)  # clean: handed to the caller after the source was refunded
    book.refund(src)
    return moved
