"""Concurrency credits and upstream sessions of the asynchronous gateway."""
import asyncio
import math


class Credits:
    def __init__(self, total):
        self._left = total
        self._changed = asyncio.Event()

    async def debit(self, n=1):
        while self._left < n:
            self._changed.clear()
            await self._changed.wait()
        self._left -= n
        return n

    def credit(self, n=1):
        self._left += n
        self._changed.set()


class SessionBank:
    def __init__(self, sessions):
        self._idle = asyncio.Queue()
        for session in sessions:
            self._idle.put_nowait(session)

    async def borrow(self):
        return await self._idle.get()

    async def put_back(self, session):
        await session.reset()
        self._idle.put_nowait(session)


class UpstreamDown(ConnectionError):
    pass


async def embed_texts(credits, client, texts):
    await credits.debit(math.ceil(len(texts) / 32))  # leak: the refund is rounded down, so a count that is no multiple of 32 loses one credit a call
    try:
        return await client.embed(texts)
    finally:
        credits.credit(len(texts) // 32)


async def rerank_texts(credits, client, query, texts):
    await credits.debit(math.ceil(len(texts) / 32))  # clean: the negated floor division is the same ceiling
    try:
        return await client.rerank(query, texts)
    finally:
        credits.credit(-(-len(texts) // 32))


class StreamRelay:
    def __init__(self, credits, upstream):
        self.credits = credits
        self.upstream = upstream
        self.task = None

    def start(self, prompt, sink):
        self.stop()
        self.task = asyncio.create_task(self._pump(prompt, sink))

    async def _pump(self, prompt, sink):
        await self.credits.debit()  # leak: stop() cancels the task, and CancelledError is no Exception
        try:
            await self.upstream.stream(prompt, sink)
        except Exception:
            self.credits.credit()
            raise
        else:
            self.credits.credit()

    def stop(self):
        if self.task is not None:
            self.task.cancel()
            self.task = None


class JobDispatcher:
    def __init__(self, credits):
        self.credits = credits
        self.tasks = {}

    async def submit(self, job):
        await self.credits.debit()  # leak: an expired job is cancelled before its task has run a step, so the body with the finally is never entered
        self.tasks[job.job_id] = asyncio.create_task(self._run(job))
        if job.expired():
            self.cancel(job.job_id)

    async def _run(self, job):
        try:
            await job.execute()
        finally:
            self.credits.credit()
            self.tasks.pop(job.job_id, None)

    def cancel(self, job_id):
        task = self.tasks.pop(job_id, None)
        if task is not None:
            task.cancel()


async def open_group(bank, size):
    async def open_one():
        session = await bank.borrow()  # leak: when one of them raises, gather passes that on and the sessions which the others return are lost
        if not await session.ping():
            await bank.put_back(session)
            raise UpstreamDown()
        return session

    return await asyncio.gather(*(open_one() for _ in range(size)))


async def open_quorum(bank, size):
    async def open_one():
        session = await bank.borrow()  # clean: gather returns the exceptions too, and the good sessions go back when one is missing
        if not await session.ping():
            await bank.put_back(session)
            raise UpstreamDown()
        return session

    results = await asyncio.gather(*(open_one() for _ in range(size)), return_exceptions=True)
    good = [r for r in results if not isinstance(r, BaseException)]
    if len(good) < size:
        for session in good:
            await bank.put_back(session)
        raise UpstreamDown()
    return good


async def complete(credits, client, prompt, max_tokens):
    await credits.debit(max_tokens)  # leak: a reply shorter than max_tokens gives back what it used, not what was set aside
    used = max_tokens
    try:
        reply = await client.complete(prompt, max_tokens)
        used = reply.completion_tokens
        return reply.text
    finally:
        credits.credit(used)


async def summarize(bank, document):
    session = await bank.borrow()  # leak: put_back() is a coroutine and is called without await, so it never runs
    try:
        parts = [await session.send(chunk) for chunk in document.chunks()]
        return "\n".join(parts)
    finally:
        bank.put_back(session)


async def fastest_reply(bank, request):
    async def attempt():
        session = await bank.borrow()  # leak: when both attempts end in the same turn of the loop, done holds two and one of them is taken out
        return session, await session.send(request)

    def finished(task):
        asyncio.ensure_future(bank.put_back(task.result()[0]))

    tasks = [asyncio.create_task(attempt()) for _ in range(2)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.add_done_callback(finished)
    session, reply = done.pop().result()
    await bank.put_back(session)
    return reply


class KeepWarm:
    def __init__(self, credits, engine, seconds):
        self.credits = credits
        self.engine = engine
        self.seconds = seconds
        self.timer = None

    async def touch(self, model):
        await self.credits.debit()  # leak: the next touch cancels the timer, and with it the credit that stood for this debit
        if self.timer is not None:
            self.timer.cancel()
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self.seconds, self._cool, model)

    def _cool(self, model):
        self.timer = None
        self.engine.offload(model)
        self.credits.credit()


class BackgroundScorer:
    def __init__(self, credits, model):
        self.credits = credits
        self.model = model
        self.tasks = set()

    async def score(self, text):
        await self.credits.debit()  # clean: done callbacks run for a task that ended, raised or was cancelled
        task = asyncio.create_task(self.model.score(text))
        self.tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task):
        self.tasks.discard(task)
        self.credits.credit()

    def shutdown(self):
        for task in self.tasks:
            task.cancel()


class StreamHandle:
    def __init__(self, credits, stream):
        self.credits = credits
        self.stream = stream

    async def aclose(self):
        self.credits.credit(2)
        await self.stream.aclose()

    @classmethod
    async def open(cls, credits, client, prompt):
        await credits.debit(2)  # clean: a failed or cancelled opening gives the credits back, an open handle gives them back in aclose()
        try:
            stream = await client.open_stream(prompt)
            if stream.status != 200:
                raise UpstreamDown(stream.status)
        except BaseException:
            credits.credit(2)
            raise
        return cls(credits, stream)
