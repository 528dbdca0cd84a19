from __future__ import annotations

from dataclasses import dataclass, field

from .memory import PagePool, SupportsFree


@dataclass
class RequestState:
    rid: str
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    done: bool = False

    def need(self, page_size: int) -> int:
        return -(-len(self.prompt) // page_size)

    def release(self, pool: SupportsFree) -> None:
        pool.free_pages(self.pages)
        self.pages = []


def grab(pool: PagePool, state: RequestState, page_size: int) -> bool:
    want = state.need(page_size)
    got = pool.allocate_pages(want)  # clean: near miss, a partial allotment goes back
    if len(got) < want:
        pool.free_pages(got)
        return False
    state.pages = state.pages + got
    return True


def grab_greedy(pool: PagePool, state: RequestState, page_size: int) -> bool:
    want = state.need(page_size)
    got = pool.allocate_pages(want)  # leak: a partial allotment is dropped
    if len(got) < want:
        return False
    state.pages = state.pages + got
    return True


def lookahead(pool: PagePool, state: RequestState, k: int) -> list[int]:
    """Pages for k speculative tokens, owned by the caller."""
    extra = pool.allocate_pages(k)  # clean: handed to the caller
    return extra
