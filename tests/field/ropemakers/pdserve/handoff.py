"""What travels from prefill to decode, and helpers both sides use."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from .pages import PagePool, RoomTable


@dataclass
class Job:
    rid: str
    prompt: List[int]
    max_new: int
    room: int = -1
    pages: List[int] = field(default_factory=list)
    failed: Optional[str] = None


def grow(pool: PagePool, job: Job, tokens: int) -> bool:
    """Make sure the job has pages for so many tokens."""
    missing = pool.pages_for(tokens) - len(job.pages)
    if missing <= 0:
        return True
    more = pool.alloc_pages(missing)  # clean: added to the job's pages
    if more is None:
        return False
    job.pages.extend(more)
    return True


def scratch_pages(pool: PagePool, tokens: int, limit: int) -> Optional[List[int]]:
    """Pages for a one-off pass; the caller frees them."""
    pages = pool.alloc_pages(pool.pages_for(tokens))  # leak: above the limit None is returned and the pages are gone
    if pages is None or len(pages) > limit:
        return None
    return pages


def settle(pool: PagePool, rooms: RoomTable, job: Job) -> None:
    pool.free_pages(job.pages)
    job.pages = []
    if job.room >= 0:
        rooms.check_out(job.room)
        job.room = -1
