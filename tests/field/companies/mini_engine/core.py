from __future__ import annotations

import logging

import torch

from .memory import PagePool, ScratchPool
from .requests import RequestState, grab, lookahead

logger = logging.getLogger(__name__)


class EngineCore:
    def __init__(self, pages: PagePool, scratch: ScratchPool, page_size: int = 16) -> None:
        self.pages = pages
        self.scratch = scratch
        self.page_size = page_size
        self.states: dict[str, RequestState] = {}
        self.logits = scratch.borrow_scratch()  # clean: shutdown() returns it

    def add(self, rid: str, prompt: list[int]) -> bool:
        st = RequestState(rid, prompt)
        if not grab(self.pages, st, self.page_size):  # clean: near miss, False grabbed nothing, True is in the states
            return False
        self.abort(rid)
        self.states[rid] = st
        return True

    def add_unless_known(self, rid: str, prompt: list[int]) -> bool:
        st = RequestState(rid, prompt)
        if not grab(self.pages, st, self.page_size):  # leak: a known id drops the new state with its pages
            return False
        if rid in self.states:
            logger.warning("duplicate request id %s", rid)
            return False
        self.states[rid] = st
        return True

    def abort(self, rid: str) -> None:
        st = self.states.pop(rid, None)
        if st is not None:
            st.release(self.pages)

    def speculate(self, rid: str, k: int) -> int:
        extra = lookahead(self.pages, self.states[rid], k)  # leak: accepted pages are kept, the rest is not freed
        accepted = int(self.logits[: len(extra)].gt(0).sum())
        self.states[rid].pages.extend(extra[:accepted])
        return accepted

    def speculate_trim(self, rid: str, k: int) -> int:
        extra = lookahead(self.pages, self.states[rid], k)  # clean: near miss, kept part and rest are both accounted for
        accepted = int(self.logits[: len(extra)].gt(0).sum())
        self.states[rid].pages.extend(extra[:accepted])
        self.pages.free_pages(extra[accepted:])
        return accepted

    def sample(self, n: int) -> torch.Tensor:
        buf = self.scratch.borrow_scratch()  # leak: log_softmax gives a new tensor, the borrowed one is lost
        buf.copy_(self.logits)
        buf = torch.log_softmax(buf, dim=0)
        ids = buf.topk(n).indices
        self.scratch.return_scratch(buf)
        return ids

    def sample_into(self, n: int) -> torch.Tensor:
        buf = self.scratch.borrow_scratch()  # clean: near miss, the softmax is written into it
        torch.softmax(self.logits, dim=0, out=buf)
        ids = buf.topk(n).indices
        self.scratch.return_scratch(buf)
        return ids

    def reap(self) -> int:
        gone = [rid for rid, st in self.states.items() if st.done]
        for rid in gone:
            self.abort(rid)
        return len(gone)

    def shutdown(self) -> None:
        for rid in list(self.states):
            self.abort(rid)
        self.scratch.return_scratch(self.logits)
