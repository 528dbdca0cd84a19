"""Per-node lanes (one lane = one concurrent generation) shared by tenants."""
import asyncio
import collections
import contextlib
import logging
import time

log = logging.getLogger(__name__)


class TenantBlocked(Exception):
    pass


class Throttled(Exception):
    def __init__(self, retry_after):
        super().__init__(f"retry after {retry_after}s")
        self.retry_after = retry_after


class Lane:
    def __init__(self, no):
        self.no = no
        self.tenant = None
        self.since = 0.0


class LanePool:
    def __init__(self, n):
        self._idle = [Lane(i) for i in range(n)]
        self._waiters = collections.deque()
        self.blocked = set()

    async def enter(self, tenant):
        if tenant in self.blocked:
            raise TenantBlocked(tenant)
        if self._idle:
            lane = self._idle.pop()  # clean: handed to the caller
        else:
            lane = await self._queue()  # clean: handed to the caller
        lane.tenant = tenant
        lane.since = time.monotonic()
        return lane

    async def _queue(self):
        fut = asyncio.get_running_loop().create_future()
        self._waiters.append(fut)
        try:
            return await fut  # clean: near miss, a grant that crosses a cancellation is passed on below
        except asyncio.CancelledError:
            if fut.done() and not fut.cancelled():
                self.leave(fut.result())
            raise

    def try_enter(self, tenant):
        if tenant in self.blocked or not self._idle:
            return None
        lane = self._idle.pop()  # clean: handed to the caller
        lane.tenant = tenant
        lane.since = time.monotonic()
        return lane

    def leave(self, lane):
        lane.tenant = None
        while self._waiters:
            fut = self._waiters.popleft()
            if fut.done():
                continue
            fut.set_result(lane)
            return
        self._idle.append(lane)

    def steal_oldest(self):
        """Takes the lane that has been idle for longest, for maintenance."""
        self._idle.sort(key=lambda l: l.since)
        if not self._idle:
            return None
        lane = self._idle.pop(0)  # leak: a lane without history is not handed out and not put back
        if not lane.since:
            return None
        return lane


@contextlib.asynccontextmanager
async def lane_for(pool, tenant):
    lane = await pool.enter(tenant)  # leak: no finally, the body of the caller may raise Throttled
    log.debug("%s on lane %d", tenant, lane.no)
    yield lane
    pool.leave(lane)


class LaneGuard:
    def __init__(self, pool, tenant):
        self.pool = pool
        self.tenant = tenant
        self.lane = None

    async def __aenter__(self):
        self.lane = await self.pool.enter(self.tenant)  # clean: kept in the guard until __aexit__
        return self.lane

    async def __aexit__(self, exc_type, exc, tb):
        lane, self.lane = self.lane, None
        if lane is not None:
            self.pool.leave(lane)
        return exc_type is Throttled


class Engine:
    def __init__(self, rate):
        self.rate = rate
        self.window = collections.Counter()

    async def generate(self, lane, prompt):
        self.window[lane.tenant] += len(prompt)
        if self.window[lane.tenant] > self.rate:
            raise Throttled(2.0)
        await asyncio.sleep(0.001 * len(prompt))
        return prompt[::-1]


class Dispatcher:
    def __init__(self, pool, engine):
        self.pool = pool
        self.engine = engine
        self.jobs = asyncio.Queue()
        self.tasks = set()
        self.results = {}
        self.reserved = {}

    async def ask(self, tenant, prompt):
        async with lane_for(self.pool, tenant) as lane:  # leak: Throttled from generate() passes through the manager, which has no finally
            return await self.engine.generate(lane, prompt)

    async def ask_quietly(self, tenant, prompt):
        async with LaneGuard(self.pool, tenant) as lane:  # clean: near miss, Throttled is swallowed, but only after the lane was left
            return await self.engine.generate(lane, prompt)

    async def worker(self):
        while True:
            job = await self.jobs.get()
            if job is None:
                return
            try:
                lane = await self.pool.enter(job["tenant"])  # leak: an expired job is skipped by the continue below
            except TenantBlocked:
                job["status"] = 403
                continue
            if time.monotonic() > job["deadline"]:
                job["status"] = 504
                continue
            try:
                self.results[job["id"]] = await self.engine.generate(lane, job["prompt"])
            except Throttled as exc:
                job["status"] = 429
                job["retry"] = exc.retry_after
            finally:
                self.pool.leave(lane)

    async def background(self, tenant, job_id, prompt):
        lane = await self.pool.enter(tenant)  # clean: near miss, the task owns it and leaves it in its finally
        task = asyncio.create_task(self._serve(job_id, lane, prompt))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, job_id, lane, prompt):
        try:
            self.results[job_id] = await self.engine.generate(lane, prompt)
        except Throttled:
            self.results[job_id] = None
        finally:
            self.pool.leave(lane)

    async def with_retry(self, tenant, prompt, tries=3):
        for attempt in range(tries):
            lane = await self.pool.enter(tenant)  # leak: after Throttled the loop enters again without leaving
            try:
                out = await self.engine.generate(lane, prompt)
            except Throttled as exc:
                log.info("attempt %d of %s throttled", attempt, tenant)
                await asyncio.sleep(exc.retry_after)
                continue
            self.pool.leave(lane)
            return out
        return None

    async def debate(self, left, right, prompt):
        a, b = await asyncio.gather(self.pool.enter(left), self.pool.enter(right))  # leak: one tenant blocked raises, the lane of the other is lost with the gather
        try:
            return await asyncio.gather(self.engine.generate(a, prompt), self.engine.generate(b, prompt))
        finally:
            self.pool.leave(a)
            self.pool.leave(b)

    def reserve(self, tenant, count):
        got = []
        for _ in range(count):
            lane = self.pool.try_enter(tenant)  # clean: near miss, all of them are left when one is missing, else they go to the table
            if lane is None:
                for g in got:
                    self.pool.leave(g)
                return False
            got.append(lane)
        self.reserved.setdefault(tenant, []).extend(got)
        return True

    def unreserve(self, tenant):
        for lane in self.reserved.pop(tenant, ()):
            self.pool.leave(lane)

    async def maintain(self, scrub):
        lane = self.pool.steal_oldest()  # clean: None-checked, left after the scrub
        if lane is None:
            return
        try:
            await scrub(lane.no)
        finally:
            self.pool.leave(lane)

    async def shutdown(self, workers):
        for _ in range(workers):
            await self.jobs.put(None)
        await asyncio.gather(*self.tasks)
        for tenant in list(self.reserved):
            self.unreserve(tenant)
