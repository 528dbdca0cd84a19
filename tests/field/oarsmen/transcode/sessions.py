"""Encoder sessions. The driver allows a few per card, so they are counted and closed with care."""
import asyncio
import logging
from typing import Any, List, Optional

log = logging.getLogger(__name__)


class NoSession(Exception):
    """No card has an encoder session left."""


class EncSession:
    def __init__(self, card: "Card", handle: int, codec: str) -> None:
        self.card = card
        self.handle = handle
        self.codec = codec
        self.frames = 0
        self.closed = False

    def encode(self, frame: Any, into: bytearray) -> int:
        self.frames += 1
        return self.card.driver.encode(self.handle, frame, into)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.card.release(self)


class Card:
    def __init__(self, index: int, driver: Any, limit: int) -> None:
        self.index = index
        self.driver = driver
        self.limit = limit
        self.busy = 0

    def open(self, codec: str) -> Optional[EncSession]:
        if self.busy >= self.limit:
            return None
        handle = self.driver.open_session(self.index, codec)  # clean: in the session that is returned, release() closes it
        self.busy += 1
        return EncSession(self, handle, codec)

    def release(self, session: EncSession) -> None:
        self.driver.close_session(session.handle)
        self.busy -= 1


class Farm:
    def __init__(self, cards: List[Card]) -> None:
        self.cards = cards
        self.freed = asyncio.Event()

    def open(self, codec: str) -> EncSession:
        for card in sorted(self.cards, key=lambda c: c.busy):
            session = card.open(codec)  # clean: None is the only thing the loop goes on with
            if session is not None:
                return session
        raise NoSession(codec)

    async def open_later(self, codec: str, timeout: float) -> Optional[EncSession]:
        """Wait until somebody closes a session."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            try:
                return self.open(codec)  # clean: returned
            except NoSession:
                left = end - loop.time()
                if left <= 0:
                    return None
            self.freed.clear()
            try:
                await asyncio.wait_for(self.freed.wait(), left)
            except asyncio.TimeoutError:
                log.debug("still no session for %s", codec)

    def close(self, session: EncSession) -> None:
        session.close()
        self.freed.set()
