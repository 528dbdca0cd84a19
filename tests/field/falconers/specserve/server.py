import asyncio
import logging
import time

from .engine import pages_for
from .pages import OutOfPages
from .request import RequestQueue, Stopped

log = logging.getLogger("specserve.server")


class Server:
    def __init__(self, engine, patience=5.0):
        self.engine = engine
        self.patience = patience
        self.queue = RequestQueue()
        self.tasks = set()
        self.prefixes = {}       # name of a system prompt -> pages
        self.warm = {}           # session -> (pages, time of last use)
        self.failed = 0

    async def main(self):
        try:
            while True:
                req = await self.queue.get()
                task = asyncio.create_task(self._run(req))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        except Stopped:
            if self.tasks:
                await asyncio.wait(self.tasks)

    async def _run(self, req):
        if not await self.engine.admit(req, self.patience):
            self.failed += 1
            return
        try:
            while not req.finished:
                if not self.engine.step(req):
                    self.failed += 1
                    break
                await asyncio.sleep(0)
        finally:
            self.engine.retire(req)

    # ---- shared system prompts

    def load_prefix(self, name, tokens):
        """Replaces a prefix of the same name."""
        pages = self.engine.pages.reserve_now(pages_for(len(tokens)))  # clean: near miss, in the table, where the set before is given back
        self.engine.target.prefill(-1, tokens, pages)
        old = self.prefixes.get(name, [])
        self.prefixes[name] = pages
        self.engine.pages.give(old)

    def load_prefixes(self, table):
        missing = []
        for name, tokens in table.items():
            try:
                self.load_prefix(name, tokens)
            except OutOfPages:
                missing.append(name)
        return missing

    def unload_prefixes(self):
        while self.prefixes:
            _, pages = self.prefixes.popitem()
            self.engine.pages.give(pages)

    # ---- sessions that come back

    def keep_warm(self, session, tokens):
        """Pages for the history of a session; the next turn starts from them."""
        pages = self.engine.pages.try_reserve(pages_for(len(tokens)))  # leak: a second turn of the session overwrites its entry
        if pages is None:
            return False
        self.engine.target.prefill(-1, tokens, pages)
        self.warm[session] = (pages, time.monotonic())
        return True

    def cool_down(self, max_age):
        now = time.monotonic()
        for session in [s for s, (_, used) in self.warm.items() if now - used > max_age]:
            pages, _ = self.warm.pop(session)
            self.engine.pages.give(pages)

    async def calibrate(self, prompts, lengths):
        """Verify time for some lengths; None when a length does not fit at all."""
        slot = await self.engine.slots.take()  # clean: put back in the finally also when a length does not fit
        times = {}
        try:
            for n in lengths:
                pages = self.engine.pages.try_reserve(pages_for(n))  # leak: an empty prompt list goes on to the next length
                if pages is None:
                    return None
                if not prompts:
                    log.info("nothing to measure for %d", n)
                    continue
                started = time.perf_counter()
                self.engine.target.score(slot, prompts[0][:n], pages)
                times[n] = time.perf_counter() - started
                self.engine.pages.give(pages)
        finally:
            self.engine.slots.put(slot)
        return times

    async def stop(self):
        self.queue.close()
        while self.tasks:
            await asyncio.sleep(0.05)
        self.cool_down(0.0)
        self.unload_prefixes()
