from __future__ import annotations

import logging
from typing import Any, List, Optional

from .handoff import Handoff, Outbox
from .pages import TenantView

log = logging.getLogger(__name__)


class PrefillWorker:
    def __init__(self, view: TenantView, model: Any, page_tokens: int) -> None:
        self.view = view
        self.model = model
        self.page_tokens = page_tokens
        self.outbox = Outbox(view)

    def _npages(self, tokens: List[int]) -> int:
        return -(-len(tokens) // self.page_tokens)

    def prefill(self, rid: str, tokens: List[int]) -> Optional[Handoff]:
        if self.outbox.get(rid) is not None:
            return self.outbox.get(rid)
        pages = self.view.draw(self._npages(tokens))  # clean: in the outbox's handoff until ack()
        if pages is None:
            return None
        first = self.model.prefill(tokens, pages)
        h = Handoff(rid, first, pages)
        self.outbox.add(h)
        return h

    def prefill_local(self, rid: str, tokens: List[int]) -> Optional[int]:
        """One token only, nothing is handed to decode."""
        pages = self.view.draw(self._npages(tokens))  # leak: not refilled when the first token is the end token
        if pages is None:
            return None
        first = self.model.prefill(tokens, pages)
        if first == self.model.eos:
            log.debug("%s ended at once", rid)
            return first
        self.view.refill(pages)
        return first

    def prefill_chunks(self, rid: str, chunks: List[List[int]]) -> bool:
        if self.outbox.get(rid) is not None:
            return True
        got: List[int] = []
        for c in chunks:
            pages = self.view.draw_soft(self._npages(c))  # clean: near miss, got is refilled on shortage, else in the outbox
            if pages is None:
                self.view.refill(got)
                return False
            got += pages
            self.model.extend(c, pages)
        self.outbox.add(Handoff(rid, self.model.sample(), got))
        return True

    def embed(self, tokens: List[int]) -> Any:
        pages = self.view.draw(self._npages(tokens))  # clean: refilled in finally
        if pages is None:
            raise MemoryError("embed")
        try:
            return self.model.embed(tokens, pages)
        finally:
            self.view.refill(pages)
