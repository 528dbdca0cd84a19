import asyncio
import logging

from .pages import OutOfPages, PagePool, Slots

log = logging.getLogger("specserve.engine")

PAGE = 16


class Diverged(Exception):
    """The target model produced something that is not a number."""


def pages_for(tokens):
    return -(-tokens // PAGE)


class Engine:
    def __init__(self, target, draft, target_pages, draft_pages, batch):
        self.target = target
        self.draft = draft
        self.pages = PagePool("target", target_pages)
        self.draft_pages = PagePool("draft", draft_pages)
        self.slots = Slots(batch)

    async def admit(self, req, timeout):
        """Slot first, pages second. False when the pages did not come in time."""
        slot = await self.slots.take()  # leak: on the timeout the slot is not put back
        try:
            req.pages = await asyncio.wait_for(self.pages.reserve(pages_for(len(req.prompt))), timeout)  # clean: near miss, the request owns them and retire() gives them back
        except asyncio.TimeoutError:
            log.info("request %d waited too long", req.id)
            return False
        req.slot = slot
        self.target.prefill(req.slot, req.prompt, req.pages)
        return True

    def retire(self, req):
        if req.slot >= 0:
            self.slots.put(req.slot)
            req.slot = -1
        pages, req.pages = req.pages, []
        self.pages.give(pages)

    def attach_draft(self, req):
        """Without draft pages the request is decoded in the ordinary way."""
        if req.draft_pages:
            return True
        pages = self.draft_pages.try_reserve(pages_for(req.length))  # leak: retire() gives back the target pages and forgets these
        if pages is None:
            return False
        req.draft_pages = pages
        self.draft.prefill(req.slot, req.prompt + req.output, pages)
        return True

    def detach_draft(self, req):
        pages, req.draft_pages = req.draft_pages, []
        self.draft_pages.give(pages)

    def grow(self, req, tokens):
        need = pages_for(req.length + tokens) - len(req.pages)
        if need > 0:
            req.pages += self.pages.reserve_now(need)  # clean: near miss, joined to the pages of the request

    def speculate(self, req, count):
        """Tokens that the target model agrees with, at least one."""
        tail = self.pages.reserve_now(pages_for(count))  # leak: Diverged from _verify passes by, and step() handles it
        proposal = self.draft.propose(req.slot, count)
        tokens = self._verify(req, proposal, tail)
        keep = max(0, pages_for(req.length + len(tokens)) - len(req.pages))
        req.pages += tail[:keep]
        self.pages.give(tail[keep:])
        return tokens

    def _verify(self, req, proposal, tail):
        logits = self.target.score(req.slot, proposal, req.pages + tail)
        if not logits.isfinite().all():
            raise Diverged("request %d" % req.id)
        best = logits.argmax(-1).tolist()
        count = 0
        while count < len(proposal) and proposal[count] == best[count]:
            count += 1
        return best[:count + 1]

    def step(self, req, count=4):
        """One round for one request; False when it has to be given up."""
        try:
            if self.attach_draft(req):
                req.emit(self.speculate(req, count))
            else:
                self.grow(req, 1)
                req.emit([self.target.decode(req.slot, req.pages)])
        except OutOfPages as exc:
            log.warning("%s", exc)
            return False
        except Diverged as exc:
            log.error("%s", exc)
            return False
        return True

    def score(self, tokens):
        """Log likelihood of a text, outside of the batch."""
        pages = self.pages.reserve_now(pages_for(len(tokens)))  # clean: given back in the finally
        try:
            logits = self.target.score(-1, tokens, pages)
            if not logits.isfinite().all():
                raise Diverged("score")
            return float(logits.log_softmax(-1).max(-1).values.sum())
        finally:
            self.pages.give(pages)

    def compact(self, req):
        """Move a request to low pages, so that the high ones can be unmapped."""
        fresh = self.pages.try_reserve(len(req.pages))  # clean: near miss, swapped with the old pages, and one set goes back
        if fresh is None:
            return False
        if max(fresh, default=0) < max(req.pages, default=0):
            self.target.copy_pages(req.pages, fresh)
            fresh, req.pages = req.pages, fresh
        self.pages.give(fresh)
        return True
