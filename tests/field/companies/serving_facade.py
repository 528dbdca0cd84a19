"""Facades over the KV pool of a serving engine: three layers, each adds a little."""
import dataclasses as dc
import logging
import typing as t
from functools import partial

logger = logging.getLogger(__name__)


class KVPool:
    def __init__(self, n: int):
        self._free = set(range(n))

    def acquire_block(self) -> t.Optional[int]:
        return self._free.pop() if self._free else None  # clean: handed to the caller

    def release_block(self, b: int) -> None:
        self._free.add(b)

    def acquire_where(self, pred: t.Callable[[int], bool]) -> t.Optional[int]:
        for b in self._free:
            if pred(b):
                self._free.discard(b)  # clean: handed to the caller
                return b
        return None

    def acquire_random(self, pred: t.Callable[[int], bool], tries: int = 4) -> t.Optional[int]:
        for _ in range(tries):
            if not self._free:
                break
            b = self._free.pop()  # leak: a block that does not please is not added again
            if pred(b):
                return b
        return None


@dc.dataclass
class Grant:
    tenant: str
    blocks: t.List[int]
    on_close: t.Optional[t.Callable[[], None]] = None

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()
            self.on_close = None


class TenantView:
    def __init__(self, pool: KVPool, tenant: str, quota: int):
        self.pool = pool
        self.tenant = tenant
        self.quota = quota
        self.used = 0

    def acquire_block(self) -> t.Optional[int]:
        if self.used >= self.quota:
            return None
        b = self.pool.acquire_block()  # clean: counted and handed to the caller
        if b is not None:
            self.used += 1
        return b

    def acquire_block_strict(self) -> t.Optional[int]:
        b = self.pool.acquire_block()  # leak: over the quota the block is neither released nor handed on
        if b is None or self.used >= self.quota:
            return None
        self.used += 1
        return b

    def release_block(self, b: int) -> None:
        self.used -= 1
        self.pool.release_block(b)


class GrantService:
    def __init__(self, views: t.Dict[str, TenantView]):
        self.views = views
        self.grants: t.List[Grant] = []

    def _undo(self, view: TenantView, blocks: t.List[int]) -> None:
        for b in blocks:
            view.release_block(b)

    def grant(self, tenant: str, n: int) -> t.Optional[Grant]:
        view = self.views[tenant]
        blocks: t.List[int] = []
        while len(blocks) < n:
            b = view.acquire_block()  # clean: near miss, undone on a shortage, otherwise the grant closes
            if b is None:
                self._undo(view, blocks)
                return None
            blocks.append(b)
        return Grant(tenant, blocks, partial(self._undo, view, blocks))

    def grant_part(self, tenant: str, n: int) -> t.Optional[Grant]:
        view = self.views[tenant]
        blocks: t.List[int] = []
        while len(blocks) < n:
            b = view.acquire_block()  # leak: the undo leaves out the first block
            if b is None:
                self._undo(view, blocks[1:])
                return None
            blocks.append(b)
        return Grant(tenant, blocks, partial(self._undo, view, blocks))

    def headroom(self, tenant: str, n: int) -> int:
        view = self.views[tenant]
        got = [view.acquire_block() for _ in range(n)]  # leak: counted and dropped
        return sum(b is not None for b in got)

    def keep(self, tenant: str, n: int) -> bool:
        g = self.grant(tenant, n)  # clean: in the list, close_all() closes
        if g is None:
            return False
        self.grants.append(g)
        return True

    def keep_unique(self, tenant: str, n: int) -> bool:
        g = self.grant(tenant, n)  # leak: for a tenant with a grant the new one is dropped
        if g is None:
            return False
        if any(o.tenant == tenant for o in self.grants):
            return False
        self.grants.append(g)
        return True

    def close_all(self) -> None:
        for g in self.grants:
            g.close()
        self.grants.clear()

    def close_tenant(self, tenant: str) -> None:
        rest = []
        for g in self.grants:
            if g.tenant == tenant:
                g.close()
            else:
                rest.append(g)
        self.grants = rest


class Facade:
    def __init__(self, svc: GrantService):
        self.svc = svc
        self.scratch = svc.grant("system", 1)  # leak: stop() overwrites it before the close

    def run(self, tenant: str, n: int, fn: t.Callable[[t.List[int]], t.Any]) -> t.Any:
        g = self.svc.grant(tenant, n)  # clean: closed in the finally
        if g is None:
            raise MemoryError(tenant)
        try:
            return fn(g.blocks)
        finally:
            g.close()

    def run_twice(self, a: str, b: str, n: int, fn: t.Callable[..., t.Any]) -> t.Any:
        ga = self.svc.grant(a, n)  # leak: not closed when the second tenant gets none
        if ga is None:
            return None
        gb = self.svc.grant(b, n)  # clean: closed with the first
        if gb is None:
            logger.info("no blocks for %s", b)
            return None
        out = fn(ga.blocks, gb.blocks)
        gb.close()
        ga.close()
        return out

    def run_blocks(self, tenant: str, n: int, fn: t.Callable[[t.List[int]], t.Any]) -> t.Any:
        return fn(self.svc.grant(tenant, n).blocks)  # leak: the grant is a temporary, only its blocks go on

    def start(self, tenant: str, n: int) -> t.Callable[[], None]:
        g = self.svc.grant(tenant, n)  # clean: near miss, the returned callable closes it
        if g is None:
            return lambda: None
        return g.close

    def session(self, tenant: str, n: int, steps: int) -> int:
        stop = self.start(tenant, n)  # clean: called behind the loop
        done = 0
        for i in range(steps):
            if i % 7 == 6:
                break
            done += 1
        stop()
        return done

    def session_short(self, tenant: str, n: int, steps: int) -> int:
        stop = self.start(tenant, n)  # leak: zero steps return without calling it
        if steps == 0:
            return 0
        stop()
        return steps

    def stop(self) -> None:
        self.scratch = None
        if self.scratch is not None:
            self.scratch.close()
        self.svc.close_all()
