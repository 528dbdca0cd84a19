"""Tokenizer workers and incremental detokenizers of the frontend."""
from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False)
class Encoder:
    """A tokenizer instance; not safe to share between threads."""

    vocab: dict[str, int]
    cache: dict[str, list[int]] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        ids = self.cache.get(text)
        if ids is None:
            ids = self.cache[text] = [self.vocab.get(w, 0) for w in text.split()]
        return ids


@dataclass(eq=False)
class DetokState:
    offset: int = 0
    ids: list[int] = field(default_factory=list)


class EncoderPool:
    """Encoders in a LIFO queue, so that the warm one is used first."""

    def __init__(self, vocab: dict[str, int], size: int) -> None:
        self._queue: queue.LifoQueue[Encoder] = queue.LifoQueue()
        for _ in range(size):
            self._queue.put(Encoder(vocab))

    def lease(self, timeout: float | None = None) -> Encoder | None:
        try:
            return self._queue.get(timeout=timeout)  # clean: to the caller
        except queue.Empty:
            return None

    def restore(self, encoder: Encoder) -> None:
        self._queue.put(encoder)


class StatePool:
    """Detokenizer states, reused between requests."""

    def __init__(self) -> None:
        self._unused: set[DetokState] = set()

    def obtain(self) -> DetokState:
        if not self._unused:
            return DetokState()
        state = self._unused.pop()  # clean: reset and returned
        state.offset = 0
        state.ids.clear()
        return state

    def recycle(self, state: DetokState) -> None:
        self._unused.add(state)


class EncoderLease:
    """Context manager around one encoder."""

    def __init__(self, pool: EncoderPool, max_cache: int = 100_000) -> None:
        self.pool = pool
        self.max_cache = max_cache
        self.encoder: Encoder | None = None

    def __enter__(self) -> Encoder | None:
        self.encoder = self.pool.lease(timeout=1.0)  # leak: __exit__ returns early when it has cleared a large cache
        return self.encoder

    def __exit__(self, exc_type, exc, tb) -> bool:
        encoder, self.encoder = self.encoder, None
        if encoder is None:
            return False
        if len(encoder.cache) > self.max_cache:
            encoder.cache.clear()
            return False
        self.pool.restore(encoder)
        return False


class Frontend:
    """Encodes prompts and streams text back."""

    def __init__(self, encoders: EncoderPool, states: StatePool, id_to_piece: list[str]) -> None:
        self.encoders = encoders
        self.states = states
        self.id_to_piece = id_to_piece
        self.streams: dict[str, DetokState] = {}
        self._lock = threading.Lock()

    def encode(self, text: str, max_len: int) -> list[int] | None:
        """Token ids of a prompt, None when it is too long or nobody is idle."""
        encoder = self.encoders.lease(timeout=0.5)  # clean: near miss, restored before the length check
        if encoder is None:
            return None
        ids = encoder.encode(text)
        self.encoders.restore(encoder)
        if len(ids) > max_len:
            return None
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode many prompts with one encoder."""
        encoder = self.encoders.lease()  # leak: the error for an empty prompt keeps the encoder
        out: list[list[int]] = []
        for text in texts:
            if not text.strip():
                raise ValueError("empty prompt in batch")
            out.append(encoder.encode(text))
        self.encoders.restore(encoder)
        return out

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template and encode."""
        ids: list[int] = []
        encoder = self.encoders.lease()  # clean: near miss, a continue inside the try still gets to the finally
        try:
            for message in messages:
                if message["role"] == "tool" and not message["content"]:
                    continue
                ids += encoder.encode(f"<|{message['role']}|> {message['content']}")
        finally:
            self.encoders.restore(encoder)
        return ids

    def open_stream(self, rid: str) -> None:
        with self._lock:  # clean: scoped
            if rid in self.streams:
                return
            self.streams[rid] = self.states.obtain()  # clean: near miss, the table held nothing for the id, close_stream() recycles it

    def push(self, rid: str, token: int) -> str:
        """Append one token; returns the newly completed text."""
        state = self.streams[rid]
        state.ids.append(token)
        text = "".join(self.id_to_piece[i] for i in state.ids[state.offset:])
        if text.endswith("\ufffd"):
            return ""
        state.offset = len(state.ids)
        return text

    def close_stream(self, rid: str) -> None:
        with self._lock:  # clean: scoped
            state = self.streams.pop(rid, None)
        if state is not None:
            self.states.recycle(state)

    def decode_all(self, ids: list[int], stop: set[int]) -> str:
        """Decode a finished sequence up to a stop token."""
        state = self.states.obtain()  # leak: a stop token returns without recycling the state
        for i in ids:
            if i in stop:
                return "".join(self.id_to_piece[t] for t in state.ids)
            state.ids.append(i)
        text = "".join(self.id_to_piece[t] for t in state.ids)
        self.states.recycle(state)
        return text

    def iter_text(self, tokens: Iterator[int]) -> Iterator[str]:
        """Stream text without a request id, for the offline engine."""
        state = self.states.obtain()  # clean: recycled in the generator's finally
        try:
            for token in tokens:
                state.ids.append(token)
                yield self.id_to_piece[token]
        finally:
            self.states.recycle(state)


def load_vocab(path: Path) -> dict[str, int] | None:
    """Read vocab.json; None for the sharded format."""
    f = path.open(encoding="utf-8")  # leak: the sharded format returns with the file open
    vocab = json.load(f)
    if "shards" in vocab:
        return None
    f.close()
    return vocab
