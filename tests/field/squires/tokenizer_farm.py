"""Tokenizer processes behind an asyncio front end.

A worker is a process with a loaded vocabulary, talking over stdin/stdout, one request at a time. check_out()
finds one, check_in() takes it back. Workers that were killed are replaced when they are checked in.
"""
import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("tokenfarm")


class FarmClosed(Exception):
    pass


class NoWorker(Exception):
    pass


class BadUtf8(ValueError):
    pass


@dataclass
class Worker:
    vocab: str
    process: asyncio.subprocess.Process
    served: int = 0
    log_lines: deque = field(default_factory=lambda: deque(maxlen=50))

    async def call(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        await self.process.stdin.drain()
        reply = json.loads(await self.process.stdout.readline())
        self.served += 1
        if reply.get("error") == "utf8":
            raise BadUtf8(reply["detail"])
        return reply

    @property
    def alive(self):
        return self.process.returncode is None


class Farm:
    def __init__(self, vocab, size, max_served=100_000):
        self.vocab, self.size, self.max_served = vocab, size, max_served
        self._idle = deque()
        self._changed = asyncio.Condition()
        self._closed = False

    async def start(self):
        for _ in range(self.size):
            self._idle.append(await self._spawn())  # clean: goes to the idle workers

    async def _spawn(self):
        process = await asyncio.create_subprocess_exec(  # clean: owned by the worker that is returned
            sys.executable, "-m", "tokenfarm.child", self.vocab,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        return Worker(self.vocab, process)

    async def check_out(self):
        async with self._changed:
            await self._changed.wait_for(lambda: self._idle or self._closed)
            if self._closed:
                raise FarmClosed(self.vocab)
            return self._idle.popleft()  # clean: returned to the caller

    def check_out_now(self):
        if not self._idle:
            raise NoWorker(self.vocab)
        return self._idle.popleft()  # clean: returned to the caller

    async def check_in(self, worker):
        if self._closed or not worker.alive or worker.served > self.max_served:
            if worker.alive:
                worker.process.terminate()
            if self._closed:
                return
            worker = await self._spawn()  # clean: near miss, rebinds the worker that just ended, goes to the idle workers
        async with self._changed:
            self._idle.append(worker)
            self._changed.notify()

    async def check_out_matching(self, max_served):
        """A worker that is not about to be recycled, for long documents."""
        async with self._changed:
            for _ in range(len(self._idle)):
                worker = self._idle.popleft()  # leak: a worker that died while idle is taken out and dropped, with its place in the farm
                if not worker.alive:
                    log.warning("idle worker of %s died", self.vocab)
                    continue
                if worker.served <= max_served:
                    return worker
                self._idle.append(worker)
        raise NoWorker(f"{self.vocab}: nobody has served less than {max_served}")

    async def close(self):
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._idle:
            worker = self._idle.popleft()  # clean: terminated for good
            worker.process.terminate()
            await worker.process.wait()


@contextlib.asynccontextmanager
async def worker_of(farm):
    worker = await farm.check_out()  # clean: checked in by the finally
    try:
        yield worker
    finally:
        await farm.check_in(worker)


async def encode(farm, text):
    async with worker_of(farm) as worker:  # clean: context manager
        reply = await worker.call(op="encode", text=text)
    return reply["ids"]


async def count_tokens(farm, texts):
    """Texts that are no valid utf-8 count as zero."""
    counts = []
    for text in texts:
        worker = await farm.check_out()  # leak: the continue for a bad text goes to the next one with a new worker
        try:
            reply = await worker.call(op="count", text=text)
        except BadUtf8 as exc:
            log.info("counted as zero: %s", exc)
            counts.append(0)
            continue
        counts.append(reply["count"])
        await farm.check_in(worker)
    return counts


async def stream_decode(farm, chunks):
    """Decode ids as they arrive; incomplete characters are kept back by the worker."""
    worker = await farm.check_out()  # leak: first_sentence() leaves its loop early and nothing after the yield runs
    async for ids in chunks:
        reply = await worker.call(op="decode_partial", ids=ids)
        if reply["text"]:
            yield reply["text"]
    await farm.check_in(worker)


async def first_sentence(farm, chunks):
    text = ""
    async for piece in stream_decode(farm, chunks):
        text += piece
        if ". " in text:
            return text.split(". ")[0] + "."
    return text


async def translate_ids(source, target, ids):
    """Ids of one vocabulary to ids of another."""
    reader = await source.check_out()  # clean: near miss, checked in by its own finally around everything else
    try:
        writer = target.check_out_now()  # clean: checked in by the finally
        try:
            text = (await reader.call(op="decode", ids=ids))["text"]
            return (await writer.call(op="encode", text=text))["ids"]
        finally:
            await target.check_in(writer)
    except NoWorker:
        return None
    finally:
        await source.check_in(reader)


async def compare_vocabs(left, right, text):
    a = await left.check_out()  # leak: FarmClosed or NoWorker from the right farm is raised while it is held
    b = right.check_out_now() if right is not left else await right.check_out_matching(10_000)  # clean: checked in by the finally
    try:
        return len((await a.call(op="encode", text=text))["ids"]) - len((await b.call(op="encode", text=text))["ids"])
    finally:
        await left.check_in(a)
        await right.check_in(b)


class DocumentEncoder:
    """Encodes documents in the background; a task owns its worker until it is done."""

    def __init__(self, farm):
        self.farm = farm
        self._tasks = set()
        self._pinned = {}

    async def submit(self, doc):
        worker = await self.farm.check_out_matching(50_000)  # clean: near miss, handed to the task, whose callback checks it in
        task = asyncio.create_task(worker.call(op="encode", text=doc.text), name=doc.id)
        self._tasks.add(task)
        task.add_done_callback(lambda t: self._finished(t, worker))
        return task

    def _finished(self, task, worker):
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("document %s: %s", task.get_name(), task.exception())
        back = asyncio.ensure_future(self.farm.check_in(worker))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)

    async def pin(self, session):
        """A session with added special tokens needs the same worker each time."""
        if session.id not in self._pinned:
            worker = await self.farm.check_out()  # leak: unpin() of a session that added no tokens drops the entry only
            await worker.call(op="add_tokens", tokens=session.special_tokens)
            self._pinned[session.id] = worker
        return self._pinned[session.id]

    async def unpin(self, session):
        worker = self._pinned.pop(session.id, None)
        if worker is not None and session.special_tokens:
            await worker.call(op="reset")
            await self.farm.check_in(worker)

    async def drain(self):
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def bench(farm, text, rounds):
    held = []
    try:
        with contextlib.suppress(NoWorker):
            while True:
                held.append(farm.check_out_now())  # clean: near miss, all of the list is checked in by the finally
        await asyncio.gather(*(w.call(op="bench", text=text, rounds=rounds) for w in held))
    finally:
        for worker in held:
            await farm.check_in(worker)
