"""Grammar matchers and bitmask rows for structured output."""
from __future__ import annotations

import queue
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple


class Matcher:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.state = 0

    def reset(self) -> None:
        self.state = 0

    def accept(self, token: int) -> bool:
        if token >= self.vocab:
            return False
        self.state += 1
        return True


class MatcherPool:
    def __init__(self, size: int, vocab: int) -> None:
        self.size = size
        self._q: "queue.Queue[Matcher]" = queue.Queue()
        for _ in range(size):
            self._q.put(Matcher(vocab))

    def obtain(self) -> Matcher:
        m = self._q.get()
        m.reset()
        return m

    def obtain_nowait(self) -> Optional[Matcher]:
        try:
            m = self._q.get_nowait()
        except queue.Empty:
            return None
        m.reset()
        return m

    def hand_back(self, m: Matcher) -> None:
        self._q.put(m)

    @property
    def outside(self) -> int:
        return self.size - self._q.qsize()


class BitmaskRows:
    def __init__(self, rows: int) -> None:
        self._free = set(range(rows))
        self.rented = 0

    def rent(self) -> Optional[int]:
        if not self._free:
            return None
        self.rented += 1
        return self._free.pop()

    def unrent(self, row: int) -> None:
        self.rented -= 1
        self._free.add(row)


@dataclass
class GrammarState:
    matcher: Matcher
    row: Optional[int] = None


class StructuredOutput:
    def __init__(self, pool: MatcherPool, rows: BitmaskRows) -> None:
        self.pool = pool
        self.rows = rows
        self.states: Dict[str, GrammarState] = {}
        self.shared: Dict[str, Matcher] = {}
        self.exec = ThreadPoolExecutor(max_workers=1)

    def begin(self, rid: str) -> bool:
        if rid in self.states:
            return True
        m = self.pool.obtain_nowait()  # clean: moves into the state, handed back when there is no row
        if m is None:
            return False
        row = self.rows.rent()  # clean: near miss, moves into the state
        if row is None:
            self.pool.hand_back(m)
            return False
        self.states[rid] = GrammarState(m, row)
        return True

    def end(self, rid: str) -> None:
        state = self.states.pop(rid, None)
        if state is None:
            return
        self.pool.hand_back(state.matcher)
        if state.row is not None:
            self.rows.unrent(state.row)

    def matcher_for(self, schema: str) -> Matcher:
        return self.shared.setdefault(schema, self.pool.obtain())  # leak: for a known schema the fresh matcher is thrown away

    def matcher_for_lazy(self, schema: str) -> Matcher:
        m = self.shared.get(schema)
        if m is None:
            m = self.shared[schema] = self.pool.obtain()  # clean: near miss, only a missing schema takes one
        return m

    def close_shared(self) -> None:
        while self.shared:
            self.pool.hand_back(self.shared.popitem()[1])

    def validate(self, tokens: List[int]) -> bool:
        m = self.pool.obtain()  # leak: the first refused token returns without handing it back
        for token in tokens:
            if not m.accept(token):
                return False
        self.pool.hand_back(m)
        return True

    def validate_prefix(self, tokens: List[int]) -> int:
        m = self.pool.obtain()  # clean: near miss, break goes on to the hand-back
        n = 0
        for token in tokens:
            if not m.accept(token):
                break
            n += 1
        self.pool.hand_back(m)
        return n

    def validate_async(self, tokens: List[int]) -> "Future[bool]":
        m = self.pool.obtain()  # clean: the worker's finally hands it back

        def work(m: Matcher = m) -> bool:
            try:
                return all(m.accept(t) for t in tokens)
            finally:
                self.pool.hand_back(m)
        return self.exec.submit(work)

    def jump_forward(self, rid: str, tokens: List[int]) -> int:
        state = self.states.get(rid)
        row = self.rows.rent() if state is None else state.row  # leak: a row rented for an unknown request is never unrented
        if row is None:
            return 0
        accepted = 0
        for token in tokens:
            if state is not None and not state.matcher.accept(token):
                break
            accepted += 1
        return accepted

    def mask_batch(self, rids: List[str], mask: List[int]) -> int:
        temp: List[int] = []
        filled = 0
        for rid in rids:
            state = self.states.get(rid)
            if state is not None and state.row is not None:
                mask[state.row] = state.matcher.state
                filled += 1
                continue
            row = self.rows.rent()  # clean: near miss, the temporary rows are unrented below
            if row is None:
                break
            temp.append(row)
            mask[row] = -1
            filled += 1
        for row in temp:
            self.rows.unrent(row)
        return filled

    def pair(self) -> Optional[Tuple[Matcher, int]]:
        row = self.rows.rent()  # leak: no matcher left, the row is not unrented
        if row is None:
            return None
        m = self.pool.obtain_nowait()  # clean: returned to the caller
        return (m, row) if m is not None else None

    def trial(self, tokens: List[int]) -> bool:
        got = self.pair()  # clean: both go back below
        if got is None:
            return False
        m, row = got
        ok = all(m.accept(t) for t in tokens)
        self.rows.unrent(row)
        self.pool.hand_back(m)
        return ok


def main() -> None:
    so = StructuredOutput(MatcherPool(3, 10), BitmaskRows(4))
    assert so.begin("a")  # clean: ended below
    print(so.validate_prefix([1, 2, 30]), so.validate_async([1, 2]).result(), so.trial([3]))
    so.matcher_for_lazy("json")
    so.matcher_for_lazy("json")
    print(so.mask_batch(["a", "b"], [0] * 4))
    so.close_shared()
    so.end("a")
    so.exec.shutdown()
    print("matchers outside:", so.pool.outside, "rows:", so.rows.rented)


if __name__ == "__main__":
    main()
