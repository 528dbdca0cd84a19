"""Engine loop: chunked prefill, forks, abort."""

from __future__ import annotations

import logging
from typing import Dict, List, Optional

from .swap import Swapper
from .table import TableSet

logger = logging.getLogger(__name__)


class Engine:
    def __init__(self, tables: TableSet, swapper: Swapper, max_running: int):
        self.tables = tables
        self.swapper = swapper
        self.max_running = max_running
        self.running: Dict[str, int] = {}

    def start(self, rid: str, tokens: int) -> bool:
        if not self.tables.cover(rid, tokens):
            self.tables.wipe(rid)
            return False
        self.running[rid] = tokens
        return True

    def start_forked(self, rid: str, parent: str, tokens: int) -> bool:
        """A request whose prompt begins with the parent's."""
        common = min(tokens, self.running[parent]) // self.tables.page_tokens
        refs = self.tables.share_prefix(parent, rid, common)  # leak: the references are dropped when the engine is full
        if len(self.running) >= self.max_running:
            return False
        self.tables.rows[rid] = refs
        if not self.tables.cover(rid, tokens):
            self.tables.wipe(rid)
            return False
        self.running[rid] = tokens
        return True

    def start_samples(self, rid: str, n: int, tokens: int) -> List[str]:
        """n > 1 sampling from one prompt."""
        names: List[str] = []
        full = tokens // self.tables.page_tokens
        for i in range(n):
            name = f"{rid}#{i}"
            if len(self.running) >= self.max_running:
                break
            self.tables.rows[name] = self.tables.share_prefix(rid, name, full)  # clean: near miss, in the table before anything can stop the loop
            self.running[name] = tokens
            names.append(name)
        return names

    def reprompt(self, rid: str, parent: str, pages: int) -> None:
        """Restart a request on another conversation's prefix."""
        refs = self.tables.share_prefix(parent, rid, pages)  # clean: the old row is wiped, this one is wiped by stop()
        self.tables.wipe(rid)
        self.tables.rows[rid] = refs
        self.running[rid] = pages * self.tables.page_tokens

    def scratch_page(self) -> Optional[int]:
        """A page for the padding tokens of a step; step() lets it go."""
        return self.tables.store.new_page()  # clean: returned to the caller

    def step(self, batch: List[str], pad: bool) -> int:
        page = self.scratch_page() if pad else None  # clean: near miss, let go under the same condition at the end
        done = 0
        for rid in batch:
            if self.tables.unshare_last(rid) is not None:
                logger.debug("%s: copied on write", rid)
            self.running[rid] += 1
            done += 1
        if page is not None:
            self.tables.store.let_go(page)
        return done

    def dry_step(self, batch: List[str]) -> int:
        page = self.scratch_page()  # leak: an empty batch returns before it is let go
        if not batch:
            return 0
        longest = max(self.running[r] for r in batch)
        if page is not None:
            self.tables.store.let_go(page)
        return longest

    def stop(self, rid: str) -> None:
        self.running.pop(rid, None)
        self.tables.wipe(rid)
        self.swapper.forget(rid)
