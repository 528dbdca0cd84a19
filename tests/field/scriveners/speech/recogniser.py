"""The recogniser turns chunks of calls into words."""
from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Optional

from .decoders import Audited, DecoderContext, Hired, Stable, Tandem

log = logging.getLogger("speech.recogniser")


@dataclass
class Call:
    cid: str
    language: str
    context: Optional[DecoderContext] = None
    words: list[str] = field(default_factory=list)


class Recogniser:
    def __init__(self, stable: Stable, fallbacks: list[str]) -> None:
        self.stable = stable
        self.fallbacks = fallbacks
        self.calls: dict[str, Call] = {}
        self.queue: list[tuple[str, DecoderContext]] = []
        self.audit: list[str] = []

    def begin(self, cid: str, language: str) -> bool:
        if cid in self.calls:
            return False
        context = self.stable.hire(language)  # clean: near miss, end() or transfer() dismisses it
        if context is None:
            context = self.stable.hire_first(self.fallbacks)  # clean: near miss, end() or transfer() dismisses it
        if context is None:
            return False
        self.calls[cid] = Call(cid, language, context)
        return True

    def end(self, cid: str) -> list[str]:
        call = self.calls.pop(cid)
        if call.context is not None:
            self.stable.dismiss(call.context)
        return call.words

    def transfer(self, cid: str, language: str) -> bool:
        """Goes on in another language."""
        call = self.calls[cid]
        fresh = self.stable.hire(language)  # clean: near miss, the old context is dismissed
        if fresh is None:
            return False
        if call.context is not None:
            self.stable.dismiss(call.context)
        call.context = fresh
        call.language = language
        return True

    def resume(self, cid: str, history: list[str]) -> bool:
        """Replaces the context of a call by one with another history."""
        call = self.calls[cid]
        if call.context is not None:
            self.stable.dismiss(call.context)
        call.context = self.stable.hire(call.language)  # clean: near miss, the old one was dismissed, end() the new
        if call.context is None:
            return False
        call.context.history = list(history)
        return True

    def quick(self, language: str, audio: bytes) -> str:
        with Hired(self.stable, language) as context:  # clean: near miss, return leaves the block
            if context is None:
                return ""
            return context.feed(audio)

    def audited(self, language: str, chunks: Iterable[bytes]) -> int:
        scope = Audited(self.stable, language, self.audit)
        with scope as context:
            if context is None:
                return 0
            return sum(1 for chunk in chunks if chunk and context.feed(chunk))

    def detect(self, audio: bytes) -> Optional[str]:
        for language in self.fallbacks:
            context = self.stable.hire(language)  # leak: the return on a hit keeps the context
            if context is None:
                continue
            if context.feed(audio).endswith("0"):
                return language
            self.stable.dismiss(context)
        return None

    def both_channels(self, language: str, left: bytes, right: bytes) -> Optional[tuple[str, str]]:
        tandem = Tandem(self.stable)
        if not tandem.open(language):  # clean: closed after the words were read
            return None
        words = (tandem.left.feed(left), tandem.right.feed(right))
        tandem.close()
        return words

    def channel_gap(self, language: str, left: bytes, right: bytes) -> int:
        tandem = Tandem(self.stable)
        if not tandem.open(language):  # leak: equal words return before close()
            return -1
        a, b = tandem.left.feed(left), tandem.right.feed(right)
        if a == b:
            return 0
        tandem.close()
        return abs(len(a) - len(b))

    def stream(self, language: str, chunks: Iterable[bytes]) -> Iterator[str]:
        context = self.stable.hire(language)  # clean: near miss, dismissed in the finally of the generator
        if context is None:
            return
        try:
            for chunk in chunks:
                if not chunk:
                    break
                yield context.feed(chunk)
        finally:
            self.stable.dismiss(context)

    def enqueue(self, cid: str, language: str) -> bool:
        context = self.stable.hire(language)  # leak: drain() drops the contexts of calls that are over
        if context is None:
            return False
        self.queue.append((cid, context))
        return True

    def drain(self, audio: dict[str, bytes]) -> int:
        handled = 0
        while self.queue:
            cid, context = self.queue.pop(0)
            call = self.calls.get(cid)
            if call is None:
                log.info("call %s is over", cid)
                continue
            call.words.append(context.feed(audio.get(cid, b"")))
            self.stable.dismiss(context)
            handled += 1
        return handled
