"""Chunked prefill for long prompts.

Every step packs decode tokens first, then fills the remaining token budget with
chunks of waiting prompts.  Each chunk needs KV pages, one metadata slot and,
for the first chunk of a multimodal prompt, a staging buffer for embeddings.
"""
from __future__ import annotations

import logging
import threading
from collections import deque

import torch

logger = logging.getLogger("prefill")


class PageBitmap:
    """KV pages tracked in a bool tensor on the host."""

    def __init__(self, n_pages: int, page_tokens: int = 32):
        self.bits = torch.zeros(n_pages, dtype=torch.bool)
        self.page_tokens = page_tokens

    def available(self) -> int:
        return int((~self.bits).sum())

    def claim(self, n: int) -> list[int]:
        idle = torch.nonzero(~self.bits).flatten()[:n]
        if idle.numel() < n:
            return []
        self.bits[idle] = True
        return idle.tolist()

    def unclaim(self, pages: list[int]) -> None:
        self.bits[pages] = False


class MetaSlots:
    """Rows of the attention metadata arrays; bounded by max_num_seqs."""

    def __init__(self, n: int):
        self._sem = threading.BoundedSemaphore(n)
        self._rows = deque(range(n))

    def enter(self, wait: bool = True) -> int:
        if not self._sem.acquire(blocking=wait):  # clean: released by leave when the row comes back
            return -1
        return self._rows.popleft()  # clean: returned to the caller

    def enter_pair(self) -> tuple[int, int] | None:
        if not self._sem.acquire(blocking=False):  # leak: first permit kept when the second is not available
            return None
        if not self._sem.acquire(blocking=False):  # clean: released by leave for the second row
            return None
        return self._rows.popleft(), self._rows.popleft()  # clean: both rows returned

    def leave(self, row: int) -> None:
        self._rows.append(row)
        self._sem.release()


class StagingPool:
    """Flat bf16 buffers for prompt embeddings, grouped by power of two size."""

    def __init__(self, hidden: int, cap: int = 8):
        self.hidden = hidden
        self.cap = cap
        self.by_size: dict[int, list[torch.Tensor]] = {}
        self.out = 0

    def lend(self, tokens: int) -> torch.Tensor | None:
        size = 1 << (tokens - 1).bit_length()
        shelf = self.by_size.setdefault(size, [])
        if shelf:
            self.out += 1
            return shelf.pop()  # clean: returned to the caller
        if self.out >= self.cap:
            return None
        self.out += 1
        return torch.empty(size, self.hidden, dtype=torch.bfloat16)

    def restore(self, buf: torch.Tensor) -> None:
        self.out -= 1
        self.by_size.setdefault(buf.shape[0], []).append(buf)


class Prompt:
    def __init__(self, rid: str, tokens: list[int], embeds: torch.Tensor | None = None):
        self.rid = rid
        self.tokens = tokens
        self.embeds = embeds
        self.done = 0
        self.pages: list[int] = []
        self.row = -1
        self.staging: torch.Tensor | None = None
        self.aborted = False

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.done


class PrefillLoop:
    def __init__(self, model, pages: PageBitmap, meta: MetaSlots, staging: StagingPool,
                 budget: int = 2048):
        self.model = model
        self.pages = pages
        self.meta = meta
        self.staging = staging
        self.budget = budget
        self.waiting: deque[Prompt] = deque()
        self.partial: dict[str, Prompt] = {}

    def submit(self, prompt: Prompt) -> None:
        self.waiting.append(prompt)

    def _pages_for(self, n: int) -> int:
        return -(-n // self.pages.page_tokens)

    def _admit(self, prompt: Prompt) -> bool:
        row = self.meta.enter(wait=False)  # leak: row kept when no staging buffer is left
        if row < 0:
            return False
        if prompt.embeds is not None:
            buf = self.staging.lend(prompt.embeds.shape[0])  # clean: moved to prompt.staging, retired with the prompt
            if buf is None:
                return False
            buf[: prompt.embeds.shape[0]].copy_(prompt.embeds)
            prompt.staging = buf
        prompt.row = row
        self.partial[prompt.rid] = prompt
        return True

    def _extend(self, prompt: Prompt, n: int) -> bool:
        have = len(prompt.pages)
        need = self._pages_for(prompt.done + n) - have
        if need <= 0:
            return True
        got = self.pages.claim(need)  # clean: near miss, an empty list holds nothing and a full one joins prompt.pages
        if not got:
            return False
        prompt.pages += got
        return True

    def step(self, decode_tokens: int) -> list[Prompt]:
        left = self.budget - decode_tokens
        finished: list[Prompt] = []
        while self.waiting and left > 0:
            prompt = self.waiting.popleft()
            if prompt.rid not in self.partial and not self._admit(prompt):
                self.waiting.appendleft(prompt)
                break
            n = min(left, prompt.remaining)
            if not self._extend(prompt, n):
                self.waiting.appendleft(prompt)
                break
            self.model.prefill(prompt.tokens[prompt.done : prompt.done + n], prompt.pages, prompt.row)
            prompt.done += n
            left -= n
            if prompt.remaining:
                self.waiting.appendleft(prompt)
            else:
                finished.append(prompt)
        return finished

    def retire(self, prompt: Prompt) -> None:
        self.partial.pop(prompt.rid, None)
        if prompt.pages:
            self.pages.unclaim(prompt.pages)
            prompt.pages = []
        if prompt.staging is not None:
            self.staging.restore(prompt.staging)
            prompt.staging = None
        if prompt.row >= 0:
            self.meta.leave(prompt.row)
            prompt.row = -1

    def abort(self, rid: str) -> bool:
        prompt = self.partial.get(rid)
        if prompt is None:
            return False
        prompt.aborted = True
        self.retire(prompt)
        return True

    def score_prompt(self, prompt: Prompt) -> float | None:
        """Prompt logprobs only: nothing stays resident afterwards."""
        row = self.meta.enter()  # clean: left in finally
        try:
            pages = self.pages.claim(self._pages_for(len(prompt.tokens)))  # leak: not unclaimed when logits are None
            if not pages:
                return None
            logits = self.model.prefill(prompt.tokens, pages, row)
            if logits is None:
                return None
            out = torch.log_softmax(logits.float(), -1).max(-1).values.sum().item()
            self.pages.unclaim(pages)
            return out
        finally:
            self.meta.leave(row)

    def split_cfg(self, cond: Prompt, uncond: Prompt) -> bool:
        rows = self.meta.enter_pair()  # clean: rows move to the two prompts, retire leaves them
        if rows is None:
            return False
        cond.row, uncond.row = rows
        self.partial[cond.rid] = cond
        self.partial[uncond.rid] = uncond
        return True

    def warmup(self, sizes: list[int]) -> None:
        for n in sizes:
            pages = self.pages.claim(self._pages_for(n))  # leak: break on a failed capture keeps the pages
            if not pages:
                continue
            ok = self.model.capture(n, pages)
            if not ok:
                logger.info("capture stops at %d tokens", n)
                break
            self.pages.unclaim(pages)

    def stage_images(self, prompt: Prompt, parts: list[torch.Tensor]) -> None:
        for part in parts:
            buf = self.staging.lend(part.shape[0])  # leak: prompt.staging is overwritten when there are several parts
            if buf is None:
                raise MemoryError(prompt.rid)
            buf[: part.shape[0]].copy_(part)
            prompt.staging = buf
