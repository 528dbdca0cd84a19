"""Encoder output cache and admission budget for multimodal requests."""
from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, NamedTuple, Optional, Set

try:
    import torch
except ImportError:  # pragma: no cover
    torch = None


class ImageInput(NamedTuple):
    digest: str
    num_tokens: int


@dataclass
class MMRequest:
    request_id: str
    images: List[ImageInput]
    prompt_len: int
    reserved: int = 0
    embed_rows: List["EmbedRows"] = field(default_factory=list)
    owns_budget: bool = False


class EncoderBudget:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.in_use = 0

    def reserve(self, n: int) -> bool:
        if self.in_use + n > self.max_tokens:
            return False
        self.in_use += n
        return True

    def unreserve(self, n: int) -> None:
        self.in_use -= n


class EmbedRows:
    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self.count = count


class EmbedTable:
    """Rows of one big embedding buffer handed out first fit."""

    def __init__(self, rows: int) -> None:
        self._spans: List[List[int]] = [[0, rows]]

    def take_rows(self, n: int) -> Optional[EmbedRows]:
        for span in self._spans:
            if span[1] - span[0] >= n:
                rows = EmbedRows(span[0], n)
                span[0] += n
                return rows
        return None

    def return_rows(self, rows: EmbedRows) -> None:
        self._spans.append([rows.start, rows.start + rows.count])
        self._spans.sort()


class EncoderCache:
    def __init__(self, table: EmbedTable) -> None:
        self.table = table
        self.entries: "OrderedDict[str, EmbedRows]" = OrderedDict()
        self.thumbs: Dict[str, EmbedRows] = {}
        self.users: Dict[str, Set[str]] = {}

    def pin(self, digest: str, request_id: str) -> EmbedRows:
        self.users.setdefault(digest, set()).add(request_id)
        return self.entries[digest]

    def unpin(self, digest: str, request_id: str) -> None:
        self.users[digest].discard(request_id)

    def put_thumbnail(self, image: ImageInput) -> bool:
        rows = self.table.take_rows(image.num_tokens // 4)  # leak: a thumbnail of the same digest is overwritten and its rows are lost
        if rows is None:
            return False
        self.thumbs[image.digest] = rows
        return True

    def clear_thumbnails(self) -> None:
        while self.thumbs:
            self.table.return_rows(self.thumbs.popitem()[1])

    def ensure(self, image: ImageInput) -> Optional[EmbedRows]:
        if image.digest in self.entries:
            return self.entries[image.digest]
        rows = self.table.take_rows(image.num_tokens)  # clean: near miss, only for a digest that has no entry; shrink returns it
        if rows is not None:
            self.entries[image.digest] = rows
        return rows

    def shrink(self, keep: int) -> int:
        evicted = 0
        for digest in list(self.entries):
            if len(self.entries) <= keep:
                break
            if self.users.get(digest):
                continue
            self.table.return_rows(self.entries.pop(digest))
            evicted += 1
        return evicted


class EncoderScheduler:
    def __init__(self, budget: EncoderBudget, cache: EncoderCache) -> None:
        self.budget = budget
        self.cache = cache
        self.running: Dict[str, MMRequest] = {}

    def admit(self, waiting: Iterable[MMRequest], max_prompt: int) -> List[MMRequest]:
        admitted = []
        for req in waiting:
            need = sum(i.num_tokens for i in req.images)
            if not self.budget.reserve(need):  # leak: a prompt over the limit is skipped with its budget taken
                break
            if req.prompt_len + need > max_prompt:
                continue
            req.reserved = need
            self.running[req.request_id] = req
            admitted.append(req)
        return admitted

    def admit_one(self, req: MMRequest, max_prompt: int) -> bool:
        need = sum(i.num_tokens for i in req.images)
        if not self.budget.reserve(need):  # clean: given back when too long, else recorded on the request
            return False
        if req.prompt_len + need > max_prompt:
            self.budget.unreserve(need)
            return False
        req.reserved = need
        self.running[req.request_id] = req
        return True

    def finish(self, request_id: str) -> None:
        req = self.running.pop(request_id)
        self.budget.unreserve(req.reserved)
        req.reserved = 0
        for rows in req.embed_rows:
            self.cache.table.return_rows(rows)
        req.embed_rows.clear()

    def attach_scratch(self, req: MMRequest, n: int) -> bool:
        rows = self.cache.table.take_rows(n)  # clean: moved onto the request, finish returns it
        if rows is None:
            return False
        req.embed_rows.append(rows)
        return True

    def encode_once(self, req: MMRequest, exclusive: bool) -> int:
        """Run the tower for one request outside the batch."""
        total = sum(i.num_tokens for i in req.images)
        if exclusive:
            if not self.budget.reserve(total):  # clean: near miss, both branches test the same flag
                return 0
        encoded = 0
        for image in req.images:
            if self.cache.ensure(image) is not None:
                encoded += image.num_tokens
        if exclusive:
            self.budget.unreserve(total)
        return encoded

    def reencode(self, req: MMRequest, force: bool) -> int:
        total = sum(i.num_tokens for i in req.images)
        if force or total > 0:
            if not self.budget.reserve(total):  # leak: taken for unforced runs too, given back only when forced
                return 0
        done = sum(1 for i in req.images if i.digest in self.cache.entries)
        if force:
            self.budget.unreserve(total)
        return done

    def gather(self, req: MMRequest) -> List[int]:
        """Row offsets of all images; stops at the first one that is not resident."""
        offsets: List[int] = []
        for image in req.images:
            if image.digest not in self.cache.entries:
                break
            rows = self.cache.pin(image.digest, req.request_id)  # clean: near miss, all pins of this request fall in release_pins
            offsets.append(rows.start)
        self.release_pins(req)
        return offsets

    def release_pins(self, req: MMRequest) -> None:
        for image in req.images:
            if image.digest in self.cache.users:
                self.cache.unpin(image.digest, req.request_id)


def peek_row(cache: EncoderCache, digest: str, default: int = -1) -> int:
    rows = cache.pin(digest, "peek")  # leak: empty rows return before unpin
    if rows.count == 0:
        return default
    first = rows.start
    cache.unpin(digest, "peek")
    return first


def pack_two(table: EmbedTable, left: int, right: int) -> Optional[List[EmbedRows]]:
    a = table.take_rows(left)  # clean: returned to the table when the partner fails, else to the caller
    if a is None:
        return None
    b = table.take_rows(right)  # clean: None or to the caller
    if b is None:
        table.return_rows(a)
        return None
    return [a, b]


def measure_pair(table: EmbedTable, left: int, right: int) -> int:
    pair = pack_two(table, left, right)  # leak: only the first of the two rows goes back
    if pair is None:
        return -1
    gap = pair[1].start - pair[0].start
    table.return_rows(pair[0])
    return gap
