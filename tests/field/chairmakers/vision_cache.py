"""Encoder side of a multi-modal server.

Images are run through the vision tower once, and the embeddings are kept on the
device until the language model has consumed them. Device memory for embeddings
is a budget in tokens; the tower itself has a handful of execution lanes.
"""
import asyncio
import logging
import time
from collections import deque

import torch

logger = logging.getLogger("mm.encoder")


class BudgetClosed(Exception):
    pass


class TowerError(Exception):
    pass


class Reservation:
    """Part of the token budget. Call release() once."""

    def __init__(self, budget, tokens):
        self._budget = budget
        self.tokens = tokens
        self.born = time.monotonic()

    def release(self):
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._put(self.tokens)


class TokenBudget:
    def __init__(self, total):
        self.total = total
        self.left = total
        self._waiters = deque()
        self._closed = False

    def try_reserve(self, tokens):
        if self._closed or tokens > self.left:
            return None
        self.left -= tokens
        return Reservation(self, tokens)  # clean: the caller releases it

    async def reserve(self, tokens):
        if tokens > self.total:
            raise ValueError(f"{tokens} tokens will never fit into {self.total}")
        while True:
            if self._closed:
                raise BudgetClosed()
            got = self.try_reserve(tokens)  # clean: returned when there is one
            if got is not None:
                return got
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append(fut)
            await fut

    def _put(self, tokens):
        self.left += tokens
        while self._waiters:
            fut = self._waiters.popleft()
            if not fut.done():
                fut.set_result(None)

    def close(self):
        self._closed = True
        self._put(0)


class Lanes:
    """Execution lanes of the tower: a CUDA stream and an input buffer each."""

    def __init__(self, count, max_patches, dim, device="cuda"):
        self._idle = asyncio.Queue()
        for _ in range(count):
            buf = torch.empty(max_patches, dim, dtype=torch.bfloat16, device=device)
            self._idle.put_nowait((torch.cuda.Stream(device), buf))
        self.max_patches = max_patches

    async def checkout(self):
        return await self._idle.get()  # clean: handed to the caller

    def rows_of(self, pixels):
        n = pixels.shape[0]
        if n > self.max_patches:
            raise TowerError(f"{n} patches")
        return n

    def checkin(self, lane):
        self._idle.put_nowait(lane)


class Entry:
    def __init__(self, digest, reservation, embeds):
        self.digest = digest
        self.reservation = reservation
        self.embeds = embeds
        self.users = 0

    def discard(self):
        self.embeds = None
        self.reservation.release()


class EmbedCache:
    def __init__(self):
        self._entries = {}
        self.hits = 0

    def acquire(self, digest):
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self.hits += 1
        entry.users += 1
        return entry

    def insert(self, entry):
        """The inserted entry, or the one somebody else inserted meanwhile. Counts one use."""
        other = self._entries.get(entry.digest)
        if other is not None:
            entry.discard()
            other.users += 1
            return other
        entry.users = 1
        self._entries[entry.digest] = entry
        return entry

    def done(self, entry):
        entry.users -= 1
        if entry.users == 0:
            self._entries.pop(entry.digest, None)
            entry.discard()


class EncoderService:
    def __init__(self, tower, budget, lanes, cache):
        self.tower = tower
        self.budget = budget
        self.lanes = lanes
        self.cache = cache
        self.failed = 0
        self._prefetched = {}

    async def _run_tower(self, pixels):
        lane = await self.lanes.checkout()  # leak: rows_of() raises for images with too many patches before the try is entered
        stream, buf = lane
        n = self.lanes.rows_of(pixels)
        try:
            with torch.cuda.stream(stream):
                buf[:n].copy_(pixels, non_blocking=True)
                out = self.tower(buf[:n])
            await asyncio.to_thread(stream.synchronize)
            return out
        finally:
            self.lanes.checkin(lane)

    async def encode(self, image):
        """Entry with the embeddings of the image; the caller calls cache.done() on it."""
        entry = self.cache.acquire(image.digest)  # clean: returned to the caller at once
        if entry is not None:
            return entry
        res = await self.budget.reserve(image.num_tokens)  # clean: near miss, released on a tower error, otherwise owned by the entry
        try:
            embeds = await self._run_tower(image.pixels)
        except BaseException:
            res.release()
            raise
        fresh = Entry(image.digest, res, embeds)
        return self.cache.insert(fresh)  # clean: the caller has the use that insert() counted

    async def encode_all(self, images):
        """Entries of all images of a prompt, or None when one of them is broken."""
        entries = []
        for image in images:
            try:
                entries.append(await self.encode(image))  # leak: a TowerError of a later image returns None and forgets the entries before it
            except TowerError as exc:
                self.failed += 1
                logger.warning("image %s: %s", image.digest[:8], exc)
                return None
        return entries

    async def encode_within(self, image, seconds):
        """Used for thumbnails, where no embedding is better than a late one."""
        res = self.budget.try_reserve(image.num_tokens)  # leak: neither the timeout nor the tower error releases it
        if res is None:
            return None
        try:
            embeds = await asyncio.wait_for(self._run_tower(image.pixels), seconds)
        except (asyncio.TimeoutError, TowerError):
            self.failed += 1
            return None
        return self.cache.insert(Entry(image.digest, res, embeds))  # clean: the use is the caller's

    async def prefetch(self, request_id, image):
        entry = await self.encode(image)  # leak: a second prefetch for a request replaces its entry in the table
        self._prefetched[request_id] = entry

    def take_prefetched(self, request_id):
        return self._prefetched.pop(request_id, None)

    def forget(self, request_id):
        entry = self._prefetched.pop(request_id, None)
        if entry is not None:
            self.cache.done(entry)


class PromptBuilder:
    """Splices image embeddings into the token embeddings of a prompt."""

    def __init__(self, service, embed_tokens, placeholder_id):
        self.service = service
        self.embed_tokens = embed_tokens
        self.placeholder_id = placeholder_id

    async def build(self, request):
        entries = await self.service.encode_all(request.images)  # clean: near miss, None when nothing was kept, and the finally returns the rest
        if entries is None:
            return None
        try:
            hidden = self.embed_tokens(request.token_ids)
            mask = request.token_ids == self.placeholder_id
            if int(mask.sum()) != sum(e.embeds.shape[0] for e in entries):
                raise ValueError("placeholders do not match the images")
            hidden[mask] = torch.cat([e.embeds for e in entries])
            return hidden
        finally:
            for entry in entries:
                self.service.cache.done(entry)

    async def build_with_thumbnail(self, request):
        hidden = await self.build(request)
        if hidden is None or request.thumbnail is None:
            return hidden
        entry = await self.service.encode_within(request.thumbnail, 0.05)  # leak: a thumbnail of the wrong width is ignored together with its use
        if entry is None:
            return hidden
        if entry.embeds.shape[1] != hidden.shape[1]:
            return hidden
        hidden = torch.cat([entry.embeds, hidden])
        self.service.cache.done(entry)
        return hidden
