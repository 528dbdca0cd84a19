"""Detokenizer service: one state per stream, stop strings, n-best output."""
from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Optional

from .states import Channel, StatePool, StreamState

log = logging.getLogger("detok")


@dataclass
class Stream:
    sid: str
    state: StreamState
    channel: Optional[Channel] = None
    finished: bool = False


class DetokService:
    def __init__(self, pool: StatePool, max_prompt: int) -> None:
        self.pool = pool
        self.max_prompt = max_prompt
        self.streams: dict[str, Stream] = {}
        self.groups: dict[str, list[StreamState]] = {}
        self.on_close: list[Callable[[], None]] = []

    def open_stream(self, sid: str, channel: Channel) -> bool:
        if sid in self.streams:
            return False
        state = self.pool.obtain()  # clean: kept in the stream, close_stream disposes of it
        if state is None:
            return False
        self.streams[sid] = Stream(sid, state, channel)
        return True

    def close_stream(self, sid: str) -> None:
        stream = self.streams.pop(sid, None)
        if stream is None:
            return
        if stream.channel is not None:
            stream.channel.close()
        stream.state.dispose()

    def on_tokens(self, sid: str, tokens: Iterable[int], stop: str) -> bool:
        stream = self.streams[sid]
        for token in tokens:
            piece = stream.state.feed(token)
            if stop and stop in stream.state.text:
                stream.finished = True
                break
            if stream.channel is not None and not stream.channel.emit(piece):
                log.debug("%s is slow", sid)
        return stream.finished

    def reap(self) -> int:
        done = [sid for sid, s in self.streams.items() if s.finished]
        for sid in done:
            self.close_stream(sid)
        return len(done)

    def decode(self, tokens: list[int]) -> Optional[str]:
        state = self.pool.obtain()  # clean: disposed of in finally
        if state is None:
            return None
        try:
            for token in tokens:
                if token < 0:
                    break
                state.feed(token)
            return state.text
        finally:
            state.dispose()

    def decode_until(self, tokens: list[int], stop: str) -> Optional[str]:
        state = self.pool.obtain_primed([], self.max_prompt)  # leak: returns inside the loop when the stop string comes
        if state is None:
            return None
        for token in tokens:
            state.feed(token)
            if stop in state.text:
                return state.text.split(stop)[0]
        text = state.text
        state.dispose()
        return text

    def continue_prompt(self, prompt: list[int], tokens: list[int]) -> str:
        state = self.pool.obtain_primed(prompt, self.max_prompt)  # clean: disposed of at the end, nothing between returns
        if state is None:
            return ""
        for token in tokens:
            state.feed(token)
        text = state.text[state.offset:]
        state.dispose()
        return text

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        state = self.pool.obtain()  # clean: near miss, finally also serves an abandoned generator
        if state is None:
            return
        try:
            for token in tokens:
                yield state.feed(token)
        finally:
            state.dispose()

    def open_group(self, gid: str, n: int) -> bool:
        """n-best: a state for each candidate."""
        if gid in self.groups:
            return False
        states: list[StreamState] = []
        for _ in range(n):
            state = self.pool.obtain()  # leak: keep_best drops the losers of the group
            if state is None:
                for s in states:
                    s.dispose()
                return False
            states.append(state)
        self.groups[gid] = states
        return True

    def keep_best(self, gid: str, scores: list[float]) -> Optional[str]:
        states = self.groups.pop(gid, None)
        if not states:
            return None
        best = max(range(len(states)), key=lambda i: scores[i])
        text = states[best].text
        states[best].dispose()
        return text

    def watch(self, tokens: list[int]) -> Optional[StreamState]:
        """A state that lives until the service closes."""
        state = self.pool.obtain()  # clean: near miss, the callback of close disposes of it
        if state is None:
            return None
        self.on_close.append(state.dispose)
        for token in tokens:
            state.feed(token)
        return state

    def watch_length(self, tokens: list[int]) -> int:
        state = self.watch(tokens)  # clean: near miss, the callback of close disposes of it
        return len(state.text) if state is not None else 0

    def close(self) -> None:
        for sid in list(self.streams):
            self.close_stream(sid)
        while self.on_close:
            self.on_close.pop()()
