import asyncio
import itertools
from dataclasses import dataclass, field

_ids = itertools.count(1)


@dataclass
class Request:
    prompt: list
    max_new: int
    on_token: object
    id: int = field(default_factory=lambda: next(_ids))
    output: list = field(default_factory=list)
    pages: list = field(default_factory=list)         # of the target model
    draft_pages: list = field(default_factory=list)   # of the draft model
    slot: int = -1
    cancelled: bool = False

    @property
    def length(self):
        return len(self.prompt) + len(self.output)

    @property
    def finished(self):
        return self.cancelled or len(self.output) >= self.max_new

    def emit(self, tokens):
        self.output.extend(tokens)
        for token in tokens:
            self.on_token(self.id, token)


class Stopped(Exception):
    """The queue was closed while somebody waited for a request."""


class RequestQueue:
    def __init__(self):
        self._items = asyncio.Queue()
        self.closed = False

    def put(self, req):
        if self.closed:
            raise Stopped()
        self._items.put_nowait(req)

    async def get(self):
        req = await self._items.get()
        if req is None:
            raise Stopped()
        return req

    def close(self):
        self.closed = True
        self._items.put_nowait(None)
