"""Tokenisation in worker processes behind an asyncio front.

Workers are checked out of a pool, text that is under way counts against a gate of characters,
and the incremental detokenisers of running generations live as streams inside the workers.
"""
import asyncio
import collections
import contextlib
import logging

logger = logging.getLogger(__name__)


class SpawnFailed(RuntimeError):
    """The replacement of a dead worker did not come up."""


class WorkerDied(ConnectionError):
    """The pipe of a worker broke in the middle of a call."""


class TooLong(ValueError):
    """More characters than the model could ever read."""


class Permit:
    def __init__(self, gate, chars):
        self._gate = gate
        self.chars = chars

    def leave(self):
        if self.chars:
            self._gate._leave(self.chars)
            self.chars = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.leave()


class Gate:
    """At most `limit` characters of text inside, first come first served."""

    def __init__(self, limit):
        self.limit = limit
        self.inside = 0
        self._queue = collections.deque()

    async def enter(self, chars):
        chars = min(chars, self.limit)
        while self.inside + chars > self.limit:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            finally:
                with contextlib.suppress(ValueError):
                    self._queue.remove(turn)
        self.inside += chars
        return Permit(self, chars)

    def enter_nowait(self, chars):
        if self.inside + chars > self.limit:
            return None
        self.inside += chars
        return Permit(self, chars)

    def _leave(self, chars):
        self.inside -= chars
        for turn in self._queue:
            if not turn.done():
                turn.set_result(None)


class WorkerPool:
    def __init__(self, spawn, size):
        self._spawn = spawn
        self._idle = asyncio.LifoQueue()
        self.size = size
        self.respawned = 0
        for _ in range(size):
            self._idle.put_nowait(spawn())  # clean: idle from the start, shutdown() kills it

    def _respawn(self, worker):
        worker.kill()
        try:
            fresh = self._spawn()  # clean: a wrapper, the caller gets it in the place of the dead one
        except OSError as exc:
            raise SpawnFailed(str(exc)) from exc
        self.respawned += 1
        return fresh

    async def checkout(self):
        worker = await self._idle.get()  # leak: SpawnFailed leaves the pool one place smaller, the dead worker is not put back
        if not worker.alive():
            worker = self._respawn(worker)  # clean: returned to the caller of checkout
        return worker

    def checkin(self, worker):
        self._idle.put_nowait(worker)

    def shutdown(self):
        while not self._idle.empty():
            self._idle.get_nowait().kill()

    @contextlib.asynccontextmanager
    async def worker(self):
        w = await self.checkout()  # clean: checked in in finally
        try:
            yield w
        finally:
            self.checkin(w)


class StreamDecoder:
    """Turns token ids into text as they come, the state is kept by one of the workers."""

    def __init__(self, worker, sid):
        self.worker = worker
        self.sid = sid
        self.text = []

    async def push(self, ids):
        piece = await self.worker.call("push", self.sid, ids)
        if piece:
            self.text.append(piece)
        return piece

    async def close(self):
        if self.sid is not None:
            sid, self.sid = self.sid, None
            await self.worker.close_stream(sid)


class TokenizerService:
    def __init__(self, pool, gate, max_chars):
        self.pool = pool
        self.gate = gate
        self.max_chars = max_chars
        self.decoders = {}
        self.tasks = set()
        self.errors = collections.Counter()

    # encoding

    def _check(self, text):
        if len(text) > self.max_chars:
            raise TooLong(f"{len(text)} characters, at most {self.max_chars}")
        return text.replace("\r\n", "\n")

    async def _encode(self, text):
        permit = await self.gate.enter(len(text))  # leak: _check raises TooLong, handle() answers it and nobody leaves
        text = self._check(text)
        try:
            async with self.pool.worker() as w:  # clean: context manager
                return await w.call("encode", text)
        finally:
            permit.leave()

    async def handle(self, request):
        try:
            return {"ids": await self._encode(request["text"])}
        except TooLong as exc:
            self.errors["too_long"] += 1
            return {"error": str(exc)}

    async def encode_retrying(self, text, tries=3):
        for attempt in range(tries):
            worker = await self.pool.checkout()  # leak: on WorkerDied the loop checks out another one without checking this one in
            try:
                ids = await worker.call("encode", text)
            except WorkerDied:
                self.errors["died"] += 1
                logger.warning("worker died, attempt %d", attempt)
                continue
            self.pool.checkin(worker)
            return ids
        raise WorkerDied(f"{tries} workers died with the same text")

    async def encode_batch(self, texts):
        """Every text under its own permit, all of them at the same time."""

        async def one(text):
            with await self.gate.enter(len(text)):  # clean: the permit is a context manager
                async with self.pool.worker() as w:  # clean: context manager, also when the task is cancelled
                    return await w.call("encode", text)

        return await asyncio.gather(*(one(t) for t in texts))

    async def hedged(self, text, patience=0.05):
        """Asks a second worker when the first one is slow, the later answer is thrown away."""
        first = asyncio.create_task(self._ask(text))
        done, _ = await asyncio.wait({first}, timeout=patience)
        if done:
            return first.result()
        second = asyncio.create_task(self._ask(text))
        done, pending = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    async def _ask(self, text):
        worker = await self.pool.checkout()  # leak: hedged() cancels the slower task inside of the call
        ids = await worker.call("encode", text)
        self.pool.checkin(worker)
        return ids

    async def count(self, text):
        """Cheap length estimate, refuses instead of waiting."""
        permit = self.gate.enter_nowait(len(text))  # clean: it is None or left in finally
        if permit is None:
            return -1
        try:
            async with self.pool.worker() as w:  # clean: context manager
                return await w.call("count", text)
        except WorkerDied:
            return -1
        finally:
            permit.leave()

    # decoding

    async def open_decoder(self, rid, prompt_ids):
        async with self.pool.worker() as w:  # clean: the stream outlives the checkout by design, the worker does not
            sid = await w.open_stream()  # leak: abort() takes the decoder out of the table and never closes its stream
            dec = self.decoders[rid] = StreamDecoder(w, sid)
            await dec.push(prompt_ids)
        return dec

    async def finish(self, rid):
        dec = self.decoders.pop(rid, None)
        if dec is None:
            return ""
        await dec.close()
        return "".join(dec.text)

    def abort(self, rid):
        dec = self.decoders.pop(rid, None)
        if dec is not None:
            logger.info("%s aborted after %d pieces", rid, len(dec.text))

    async def decode_once(self, batches):
        async with self.pool.worker() as w:  # clean: context manager
            sid = await w.open_stream()  # clean: near miss, close() of the decoder in finally closes it
            dec = StreamDecoder(w, sid)
            try:
                for ids in batches:
                    await dec.push(ids)
                return "".join(dec.text)
            finally:
                await dec.close()

    # warm up

    async def warm(self, samples):
        held = []
        try:
            for _ in range(self.pool.size):
                held.append(await self.pool.checkout())  # clean: all of held are checked in in finally
            await asyncio.gather(*(w.call("warm", samples) for w in held))
        except SpawnFailed:
            logger.exception("only %d workers are warm", len(held))
        finally:
            for w in held:
                self.pool.checkin(w)

    async def submit(self, text, callback):
        """Returns once there is room, the rest is done by a task."""
        permit = await self.gate.enter(len(text))  # clean: near miss, the done callback of the task leaves
        task = asyncio.create_task(self.encode_retrying(text))
        self.tasks.add(task)

        def over(t):
            self.tasks.discard(t)
            permit.leave()
            if not t.cancelled() and t.exception() is None:
                callback(t.result())

        task.add_done_callback(over)
