"""Async pool of code-execution sandboxes that turn completions into rewards."""
import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


class SandboxDead(Exception):
    """The box did not answer the ping."""


class SandboxTimeout(Exception):
    """The program under test ran too long."""


@dataclass
class ExecResult:
    stdout: str
    exit_code: int
    crashed: bool = False


@dataclass
class Problem:
    uid: str
    prelude: str = ""
    tests: list = field(default_factory=list)


class Sandbox:
    def __init__(self, name, channel):
        self.name = name
        self._channel = channel

    @classmethod
    async def boot(cls, name, image):
        reader, writer = None, None
        channel = (reader, writer)
        await asyncio.sleep(0)
        return cls(f"{image}/{name}", channel)

    async def ping(self):
        return self._channel is not None

    async def exec(self, code, timeout=10.0):
        result = await self._roundtrip(code, timeout)
        if result is None:
            raise SandboxTimeout(self.name)
        return result

    async def _roundtrip(self, code, timeout):
        await asyncio.sleep(0)
        return ExecResult(stdout="", exit_code=0)

    async def reset(self):
        await asyncio.sleep(0)

    async def destroy(self):
        self._channel = None


class SandboxPool:
    def __init__(self, image, size):
        self.image = image
        self.size = size
        self.closing = False
        self.dead = 0
        self._idle = asyncio.Queue()
        self._busy = set()

    async def start(self):
        for i in range(self.size):
            box = await Sandbox.boot(f"sbx-{i}", self.image)  # clean: enters the idle queue, close() destroys it
            self._idle.put_nowait(box)

    async def checkout(self):
        box = await self._idle.get()  # leak: a box that fails the ping is dropped with SandboxDead
        if not await box.ping():
            self.dead += 1
            logger.warning("%s is dead (%d so far)", box.name, self.dead)
            raise SandboxDead(box.name)
        self._busy.add(box.name)
        return box

    def checkout_nowait(self):
        try:
            box = self._idle.get_nowait()  # clean: returned to the caller
        except asyncio.QueueEmpty:
            return None
        self._busy.add(box.name)
        return box

    async def checkin(self, box):
        self._busy.discard(box.name)
        if self.closing:
            await box.destroy()
            return
        await box.reset()
        self._idle.put_nowait(box)

    @contextlib.asynccontextmanager
    async def lease(self):
        box = await self.checkout()  # clean: finally checks it in
        try:
            yield box
        finally:
            await self.checkin(box)

    async def close(self):
        self.closing = True
        while not self._idle.empty():
            box = self._idle.get_nowait()  # clean: destroyed on the next line
            await box.destroy()


class Grader:
    def __init__(self, pool, retries=3):
        self.pool = pool
        self.retries = retries
        self._sticky = {}
        self._sticky_lock = asyncio.Lock()
        self._detached = set()

    async def image_version(self):
        box = await self.pool.checkout()  # clean: the timeout is handled and the check-in follows
        try:
            version = (await box.exec("cat /etc/image-version", 2.0)).stdout.strip()
        except SandboxTimeout:
            version = None
        await self.pool.checkin(box)
        return version

    async def grade_unit(self, problem, completion):
        passed = 0
        async with self.pool.lease() as box:  # clean: context manager
            for test in problem.tests:
                result = await box.exec("\n".join((problem.prelude, completion, test)))
                passed += result.exit_code == 0
        return passed / max(1, len(problem.tests))

    async def grade_sql(self, problem, query):
        box = await self.pool.checkout()  # leak: a problem without tests returns before the try
        if not problem.tests:
            logger.debug("%s has no tests", problem.uid)
            return 0.0
        try:
            result = await box.exec(f"run-sql <<'Q'\n{query}\nQ")
            return float(result.stdout.strip() == problem.tests[0])
        finally:
            await self.pool.checkin(box)

    async def grade_pair(self, problem, chosen, rejected):
        """Run both sides on separate boxes at the same time."""
        left = await self.pool.checkout()  # leak: the second checkout may raise SandboxDead while this one is held
        right = await self.pool.checkout()  # clean: finally checks it in
        try:
            a, b = await asyncio.gather(
                left.exec(problem.prelude + chosen),
                right.exec(problem.prelude + rejected),
            )
            return float(a.exit_code == 0) - float(b.exit_code == 0)
        finally:
            await self.pool.checkin(left)
            await self.pool.checkin(right)

    async def grade_with_retry(self, problem, completion):
        for attempt in range(self.retries):
            box = await self.pool.checkout()  # leak: on a timeout the loop goes on to the next box without a check-in
            try:
                result = await box.exec(problem.prelude + completion)
            except SandboxTimeout:
                logger.info("%s attempt %d timed out", problem.uid, attempt)
                await asyncio.sleep(0.1 * 2 ** attempt)
                continue
            await self.pool.checkin(box)
            return float(result.exit_code == 0)
        return 0.0

    async def grade_if_idle(self, problem, completion):
        box = self.pool.checkout_nowait()  # clean: None returns early and everything else runs under finally
        if box is None:
            return None
        try:
            result = await box.exec(problem.prelude + completion)
        except SandboxTimeout:
            return 0.0
        finally:
            await self.pool.checkin(box)
        return float(result.exit_code == 0)

    async def session_box(self, session):
        """Multi-turn tool use keeps the same box for all the turns."""
        async with self._sticky_lock:
            box = self._sticky.get(session)
            if box is None:
                box = await self.pool.checkout()  # clean: near miss, kept in the table; end_session or close checks it in
                self._sticky[session] = box
        return box

    async def end_session(self, session):
        box = self._sticky.pop(session, None)
        if box is not None:
            await self.pool.checkin(box)

    async def grade_detached(self, problem, completion, on_score):
        box = await self.pool.checkout()  # clean: near miss, the task owns the box and checks it in
        task = asyncio.create_task(self._run_owned(box, problem, completion, on_score))
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)

    async def _run_owned(self, box, problem, completion, on_score):
        try:
            result = await box.exec(problem.prelude + completion)
            on_score(problem.uid, float(result.exit_code == 0))
        except SandboxTimeout:
            on_score(problem.uid, 0.0)
        finally:
            await self.pool.checkin(box)

    async def grade_batch(self, problem, completions):
        boxes = []
        for _ in completions:
            box = self.pool.checkout_nowait()  # leak: boxes with a crashed program are skipped in the check-in loop
            if box is None:
                break
            boxes.append(box)
        results = await asyncio.gather(*(b._roundtrip(c, 10.0) for b, c in zip(boxes, completions)))
        scores = []
        for box, result in zip(boxes, results):
            if result is None or result.crashed:
                scores.append(0.0)
                continue
            scores.append(float(result.exit_code == 0))
            await self.pool.checkin(box)
        return scores

    async def close(self):
        if self._detached:
            await asyncio.gather(*self._detached, return_exceptions=True)
        for session in list(self._sticky):
            await self.end_session(session)
        await self.pool.close()
