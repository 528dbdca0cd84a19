from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .pages import NoPages, PageStore
from .tables import BlockTables

log = logging.getLogger(__name__)


class Engine:
    def __init__(self, model, pages: int, page_size: int = 16) -> None:
        self.model = model
        self.store = PageStore(pages)
        self.tables = BlockTables(self.store, page_size)
        self.live: Dict[str, List[int]] = {}

    def submit(self, sid: str, prompt: List[int]) -> bool:
        if sid in self.live or not self.tables.create(sid, len(prompt)):  # clean: release() is called by finish()
            return False
        self.live[sid] = list(prompt)
        return True

    def submit_checked(self, sid: str, prompt: List[int]) -> bool:
        if not self.tables.create(sid, len(prompt)):  # leak: a refused prompt returns with the table still in place and sid not live
            return False
        if not self.model.accepts(prompt):
            log.info("%s refused", sid)
            return False
        self.live[sid] = list(prompt)
        return True

    def finish(self, sid: str) -> List[int]:
        toks = self.live.pop(sid, None)
        if toks is None:
            return []
        self.tables.release(sid)
        return toks

    def embed(self, tokens: List[int]) -> Optional[object]:
        try:
            pages = self.store.several(self.tables.pages_for(len(tokens)))  # clean: unref'd in the finally
        except NoPages:
            return None
        try:
            return self.model.embed(tokens, pages)
        finally:
            self.store.unref_all(pages)

    def warmup(self, sizes: List[int]) -> int:
        done = 0
        for n in sizes:
            try:
                pages = self.store.several(n)  # leak: sizes that the model skips continue without the unref
            except NoPages:
                break
            if not self.model.wants(n):
                continue
            self.model.dummy(pages)
            self.store.unref_all(pages)
            done += 1
        return done

    def self_draft(self, sid: str, n: int) -> List[int]:
        scratch = self.store.up_to(n)  # clean: near miss, unref'd in the finally however many came
        try:
            if len(scratch) < n:
                return []
            return self.model.draft(self.live[sid], scratch)
        finally:
            self.store.unref_all(scratch)
