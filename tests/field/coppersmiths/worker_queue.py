"""Pool of sandbox workers. A worker is a process with a pipe; idle ones sit in an asyncio queue."""
import asyncio
import logging
import weakref
from typing import Any, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger(__name__)


class Worker:
    def __init__(self, wid: int, proc: asyncio.subprocess.Process):
        self.wid = wid
        self.proc = proc
        self.jobs = 0

    @property
    def dead(self) -> bool:
        return self.proc.returncode is not None

    async def call(self, line: str) -> str:
        self.jobs += 1
        self.proc.stdin.write(line.encode() + b"\n")
        await self.proc.stdin.drain()
        return (await self.proc.stdout.readline()).decode()


class WorkerPool:
    def __init__(self, argv: List[str], n: int):
        self.argv = argv
        self.n = n
        self._idle: "asyncio.Queue[Worker]" = asyncio.Queue()

    async def start(self) -> None:
        for i in range(self.n):
            self._idle.put_nowait(await self._spawn(i))

    async def _spawn(self, wid: int) -> Worker:
        proc = await asyncio.create_subprocess_exec(*self.argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        return Worker(wid, proc)

    async def hire(self) -> Worker:
        w = await self._idle.get()  # clean: near miss, a dead one is replaced under the same id
        if w.dead:
            w = await self._spawn(w.wid)
        return w

    async def hire_within(self, secs: float) -> Optional[Worker]:
        try:
            w = await asyncio.wait_for(self._idle.get(), secs)  # leak: a worn worker is taken out of the queue and None returned
        except asyncio.TimeoutError:
            return None
        if w.jobs > 10_000:
            log.info("worker %d worn", w.wid)
            return None
        return w

    def hire_now(self) -> Optional[Worker]:
        try:
            return self._idle.get_nowait()
        except asyncio.QueueEmpty:
            return None

    def dismiss(self, w: Worker) -> None:
        self._idle.put_nowait(w)


class Sandbox:
    """One user's sandbox; keeps its worker from open() to close()."""

    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.worker: Optional[Worker] = None

    async def open(self) -> "Sandbox":
        if self.worker is None:
            self.worker = await self.pool.hire()  # clean: close() dismisses it
        return self

    async def reopen(self) -> None:
        self.worker = await self.pool.hire()  # leak: the worker already held is overwritten

    def close(self) -> None:
        if self.worker is not None:
            self.pool.dismiss(self.worker)
            self.worker = None

    async def __aenter__(self) -> "Sandbox":
        return await self.open()  # clean: __aexit__ closes

    async def __aexit__(self, *exc) -> None:
        self.close()


class Executor:
    def __init__(self, pool: WorkerPool):
        self.pool = pool
        self.assigned: Dict[str, Worker] = {}
        self.tasks: List[asyncio.Task] = []

    async def evaluate(self, code: str) -> str:
        w = await self.pool.hire()  # clean: dismissed in finally
        try:
            return await w.call(code)
        finally:
            self.pool.dismiss(w)

    async def evaluate_opportunistic(self, code: str) -> Optional[str]:
        w = self.pool.hire_now()  # leak: empty answer returns before dismiss
        if w is None:
            return None
        ans = await w.call(code)
        if not ans:
            return None
        self.pool.dismiss(w)
        return ans

    async def _run_on(self, w: Worker, code: str, done: Callable[[str], None]) -> None:
        try:
            done(await w.call(code))
        finally:
            self.pool.dismiss(w)

    async def schedule(self, code: str, done: Callable[[str], None]) -> None:
        w = await self.pool.hire()  # clean: near miss, the task owns it and dismisses it
        self.tasks.append(asyncio.create_task(self._run_on(w, code, done)))

    async def schedule_if(self, code: str, done: Callable[[str], None], allowed: Callable[[str], bool]) -> bool:
        w = await self.pool.hire()  # leak: disallowed code never reaches the task that dismisses w
        if allowed(code):
            self.tasks.append(asyncio.create_task(self._run_on(w, code, done)))
            return True
        return False

    async def assign(self, user: str) -> Worker:
        w = self.assigned.get(user)
        if w is None:
            w = await self.pool.hire()  # clean: near miss, kept in assigned until unassign()
            prior = self.assigned.setdefault(user, w)
            if prior is not w:
                self.pool.dismiss(w)
                w = prior
        return w

    def unassign(self, user: str) -> None:
        w = self.assigned.pop(user, None)  # clean: dismissed
        if w is not None:
            self.pool.dismiss(w)

    async def hand_over(self, a: str, b: str) -> bool:
        w = self.assigned.pop(a, None)  # leak: when b has a worker, w is in no table any more
        if w is None:
            return False
        if b in self.assigned:
            return False
        self.assigned[b] = w
        return True

    async def race(self, code: str) -> Optional[str]:
        w1 = self.pool.hire_now()  # clean: dismissed in finally
        if w1 is None:
            return None
        w2 = None
        try:
            w2 = self.pool.hire_now()  # clean: near miss, dismissed in finally when it was hired
            if w2 is None:
                return await w1.call(code)
            a, b = await asyncio.gather(w1.call(code), w2.call(code))
            return a or b
        finally:
            if w2 is not None:
                self.pool.dismiss(w2)
            self.pool.dismiss(w1)

    async def in_sandbox(self, lines: List[str]) -> List[str]:
        async with Sandbox(self.pool) as sb:  # clean: async with
            return [await sb.worker.call(x) for x in lines]
