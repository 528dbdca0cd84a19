"""Speculative decoding: a draft model proposes, the target model verifies.

Draft state lives in rows of a preallocated cache. Row 0 is reserved for padding.
"""
from __future__ import annotations

import collections
import itertools
from typing import Callable, Iterator, NamedTuple, Optional

import torch


class Row(NamedTuple):
    index: int
    gen: int


class DraftRows:
    def __init__(self, rows: int, heads: int, dim: int, max_len: int):
        self.k = torch.zeros(rows, heads, max_len, dim)
        self.v = torch.zeros_like(self.k)
        self.vacant = collections.deque(range(1, rows))
        self.gen = itertools.count()
        self.length = [0] * rows

    def seat(self) -> Optional[Row]:
        if not self.vacant:
            return None
        i = self.vacant.popleft()  # clean: wrapped in the row that is returned
        self.length[i] = 0
        return Row(i, next(self.gen))

    def unseat(self, row: Row) -> None:
        self.vacant.append(row.index)

    def seat_copy(self, src: Row) -> Optional[Row]:
        row = self.seat()  # clean: near miss, None or returned
        if row is not None:
            n = self.length[src.index]
            self.k[row.index, :, :n] = self.k[src.index, :, :n]
            self.v[row.index, :, :n] = self.v[src.index, :, :n]
            self.length[row.index] = n
        return row

    def seat_tree(self, src: Row, width: int) -> list[Row]:
        leaves: list[Row] = []
        for _ in range(width):
            leaf = self.seat_copy(src)  # clean: near miss, the leaves so far are unseated when one is missing
            if leaf is None:
                for held in leaves:
                    self.unseat(held)
                return []
            leaves.append(leaf)
        return leaves


class Stream:
    def __init__(self, prompt: list[int], eos: int):
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.eos = eos
        self.row: Optional[Row] = None

    @property
    def finished(self) -> bool:
        return len(self.tokens) > self.prompt_len and self.tokens[-1] == self.eos


Propose = Callable[[Row, list[int]], int]
Verify = Callable[[list[int], list[int]], int]


class Speculator:
    def __init__(self, rows: DraftRows, propose: Propose, verify: Verify, target_next, k: int = 4):
        self.rows = rows
        self.propose = propose
        self.verify = verify
        self.target_next = target_next
        self.k = k
        self.accepted = 0
        self.by_stream: dict[int, Row] = {}

    # whole sequences

    def decode(self, stream: Stream, max_new: int) -> list[int]:
        row = self.rows.seat()  # clean: unseated in finally
        if row is None:
            return self._plain(stream, max_new)
        try:
            while len(stream.tokens) - stream.prompt_len < max_new and not stream.finished:
                self._round(stream, row)
        finally:
            self.rows.unseat(row)
        return stream.tokens[stream.prompt_len :]

    def _plain(self, stream: Stream, max_new: int) -> list[int]:
        for _ in range(max_new):
            stream.tokens.append(self.target_next(stream.tokens))
            if stream.finished:
                break
        return stream.tokens[stream.prompt_len :]

    def _round(self, stream: Stream, row: Row) -> int:
        draft: list[int] = []
        for _ in range(self.k):
            draft.append(self.propose(row, stream.tokens + draft))
        n = self.verify(stream.tokens, draft)
        stream.tokens.extend(draft[:n])
        stream.tokens.append(self.target_next(stream.tokens))
        self.accepted += n
        return n

    # token streaming

    def iter_tokens(self, stream: Stream) -> Iterator[int]:
        row = self.rows.seat()  # leak: not unseated when the reader closes the generator between tokens
        if row is None:
            return
        seen = len(stream.tokens)
        while not stream.finished:
            self._round(stream, row)
            yield from stream.tokens[seen:]
            seen = len(stream.tokens)
        self.rows.unseat(row)

    def iter_rounds(self, stream: Stream) -> Iterator[int]:
        row = self.rows.seat()  # clean: near miss, closing the generator runs the finally
        if row is None:
            return
        try:
            while not stream.finished:
                yield self._round(stream, row)
        finally:
            self.rows.unseat(row)

    def until_stop(self, stream: Stream, stop: set[int]) -> list[int]:
        out: list[int] = []
        for tok in self.iter_tokens(stream):
            if tok in stop:
                break
            out.append(tok)
        return out

    # trees

    def tree_round(self, stream: Stream, root: Row, width: int) -> Row:
        """Try `width` continuations; the caller's root is replaced by the best leaf."""
        leaves = self.rows.seat_tree(root, width)  # clean: near miss, losers are unseated and the winner returned for the root
        if not leaves:
            return root
        best, best_n = leaves[0], -1
        for leaf in leaves:
            n = self.verify(stream.tokens, [self.propose(leaf, stream.tokens)])
            if n > best_n:
                best, best_n = leaf, n
        for leaf in leaves:
            if leaf is not best:
                self.rows.unseat(leaf)
        self.rows.unseat(root)
        return best

    def tree_decode(self, stream: Stream, width: int, rounds: int) -> None:
        root = self.rows.seat()  # clean: unseated at the end, tree_round trades it for a leaf
        if root is None:
            return
        for _ in range(rounds):
            root = self.tree_round(stream, root, width)  # clean: near miss, rebound, but tree_round has unseated the root it was given
        self.rows.unseat(root)

    def beam_probe(self, stream: Stream, root: Row, width: int) -> Optional[int]:
        leaves = self.rows.seat_tree(root, width)  # leak: the leaves behind the first full match are never unseated
        for leaf in leaves:
            tok = self.propose(leaf, stream.tokens)
            n = self.verify(stream.tokens, [tok])
            self.rows.unseat(leaf)
            if n == 1:
                return tok
        return None

    # rows kept between requests

    def attach(self, sid: int, stream: Stream) -> bool:
        row = self.rows.seat()  # leak: a second attach of a stream overwrites the row in by_stream
        if row is None:
            return False
        stream.row = row
        self.by_stream[sid] = row
        return True

    def detach(self, sid: int) -> None:
        row = self.by_stream.pop(sid, None)
        if row is not None:
            self.rows.unseat(row)

    def rebase(self, sid: int, stream: Stream) -> bool:
        """Move a stream to a clean row after too many rejections."""
        src = self.by_stream[sid]
        row = self.rows.seat_copy(src)  # leak: kept when the replayed draft is rejected
        if row is None:
            return False
        draft = [self.propose(row, stream.tokens) for _ in range(self.k)]
        if self.verify(stream.tokens, draft) == 0:
            return False
        self.by_stream[sid] = row
        self.rows.unseat(src)
        return True

    def calibrate(self, prompts: list[list[int]]) -> float:
        rates: list[float] = []
        for prompt in prompts:
            row = self.rows.seat()  # leak: prompts over the cache length continue past the unseat
            if row is None:
                break
            if len(prompt) + self.k > self.rows.k.shape[2]:
                continue
            rates.append(self._round(Stream(prompt, -1), row) / self.k)
            self.rows.unseat(row)
        return sum(rates) / max(len(rates), 1)
