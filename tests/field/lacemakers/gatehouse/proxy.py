"""The proxy: every request holds a ticket of the turnstile and a link upstream."""
import asyncio
import logging

log = logging.getLogger("gatehouse")


class Upstream(Exception):
    pass


class Proxy:
    def __init__(self, stile, links, hosts):
        self.stile = stile
        self.links = links
        self.hosts = hosts
        self._sessions = {}
        self._jobs = set()

    async def handle(self, body):
        ticket = await self.stile.admit_wait()  # clean: with exits it, since keep is never set here
        with ticket:
            link = self.links.hire_any(self.hosts)  # clean: dismissed in finally
            if link is None:
                raise Upstream("no links")
            try:
                return await link.ask(body)
            finally:
                self.links.dismiss(link)

    async def handle_retry(self, body, tries=3):
        for _ in range(tries):
            link = self.links.hire_any(self.hosts)  # leak: the retry hires anew after an empty reply
            if link is None:
                await asyncio.sleep(0.05)
                continue
            reply = await link.ask(body)
            if reply is not None:
                self.links.dismiss(link)
                return reply
        raise Upstream("retries")

    async def handle_bulk(self, bodies):
        ticket = self.stile.admit(len(bodies))  # leak: marked to be kept, and no session takes it when there are no links
        if ticket is None:
            raise Upstream("full")
        with ticket:
            ticket.keep = True
            link = self.links.hire_any(self.hosts)  # clean: near miss, in the background job, which dismisses it
            if link is None:
                return None
            job = asyncio.create_task(self._bulk(ticket, link, bodies))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)
            return job

    async def _bulk(self, ticket, link, bodies):
        try:
            return [await link.ask(b) for b in bodies]
        finally:
            self.links.dismiss(link)
            self.stile.exit(ticket)

    def open_session(self, sid):
        if sid in self._sessions:
            return False
        ticket = self.stile.admit()  # clean: exited without a link, else in the session
        if ticket is None:
            return False
        link = self.links.hire_any(self.hosts)  # clean: in the session until close_session
        if link is None:
            self.stile.exit(ticket)
            return False
        self._sessions[sid] = (ticket, link)
        return True

    def close_session(self, sid):
        entry = self._sessions.pop(sid, None)
        if entry is None:
            return
        ticket, link = entry
        self.links.dismiss(link)
        self.stile.exit(ticket)

    async def say(self, sid, body):
        _, link = self._sessions[sid]
        return await link.ask(body)
