"""Embedding service: pooled float rows between tokenizer, encoder and index."""
from __future__ import annotations

import math
from array import array
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Tuple


class Row:
    __slots__ = ("data", "home", "dim")

    def __init__(self, dim: int, home: "RowPool") -> None:
        self.data = array("f", [0.0] * dim)
        self.home = home
        self.dim = dim

    def fill(self, values: Iterable[float]) -> None:
        for i, v in zip(range(self.dim), values):
            self.data[i] = v

    def clone(self) -> List[float]:
        return list(self.data)


class RowPool:
    def __init__(self, dim: int, limit: int) -> None:
        self.dim = dim
        self.limit = limit
        self.made = 0
        self._idle: List[Row] = []

    def borrow(self) -> Row:
        if self._idle:
            return self._idle.pop()
        if self.made >= self.limit:
            raise MemoryError(f"all {self.limit} rows lent")
        self.made += 1
        return Row(self.dim, self)

    def give_back(self, row: Row) -> None:
        self._idle.append(row)

    def lent(self) -> int:
        return self.made - len(self._idle)


class Encoder:
    """Turns text into a row; the caller owns what encode returns."""

    def __init__(self, pool: RowPool) -> None:
        self.pool = pool

    def encode(self, text: str) -> Row:
        row = self.pool.borrow()  # clean: returned to the caller
        row.fill(float(ord(c) % 7) for c in text)
        return row

    def encode_unit(self, text: str) -> Optional[Row]:
        row = self.encode(text)  # leak: a zero norm returns None and the row is lost
        norm = math.sqrt(sum(v * v for v in row.data))
        if norm == 0.0:
            return None
        row.fill([v / norm for v in row.data])
        return row

    def encode_mean(self, texts: Sequence[str]) -> Row:
        total = self.pool.borrow()  # clean: returned to the caller
        total.fill([0.0] * total.dim)
        for text in texts:
            part = self.encode(text)  # clean: given back each round
            for i, v in enumerate(part.data):
                total.data[i] += v / len(texts)
            self.pool.give_back(part)
        return total


class EmbeddingService:
    def __init__(self, encoder: Encoder, pool: RowPool) -> None:
        self.encoder = encoder
        self.pool = pool
        self.cache: Dict[str, Row] = {}
        self.last_query: Optional[Row] = None

    def embed(self, text: str) -> List[float]:
        row = self.encoder.encode(text)  # clean: cloned, then given back
        out = row.clone()
        self.pool.give_back(row)
        return out

    def embed_many(self, texts: Sequence[str]) -> List[List[float]]:
        return [self.encoder.encode(t).clone() for t in texts]  # leak: the callee's row is copied and dropped

    def similarity(self, left: str, right: str) -> float:
        a = self.encoder.encode_unit(left)  # leak: right side is None, 0.0 returned with this row still lent
        if a is None:
            return 0.0
        b = self.encoder.encode_unit(right)  # clean: given back after the dot product
        if b is None:
            return 0.0
        score = sum(x * y for x, y in zip(a.data, b.data))
        self.pool.give_back(a)
        self.pool.give_back(b)
        return score

    def cached(self, text: str) -> Row:
        row = self.cache.get(text)
        if row is None:
            row = self.encoder.encode(text)  # clean: near miss, the cache owns it until evict or clear
            self.cache[text] = row
        return row

    def evict(self, text: str) -> None:
        row = self.cache.pop(text, None)
        if row is not None:
            self.pool.give_back(row)

    def clear(self) -> None:
        while self.cache:
            _, row = self.cache.popitem()
            self.pool.give_back(row)

    def remember_query(self, text: str) -> None:
        self.last_query = self.encoder.encode(text)  # leak: the next query overwrites the attribute

    def forget_query(self) -> None:
        if self.last_query is not None:
            self.pool.give_back(self.last_query)
            self.last_query = None

    def rerank(self, query: str, docs: Sequence[str]) -> List[Tuple[float, str]]:
        q = self.encoder.encode_mean([query])  # clean: given back in finally
        scored: List[Tuple[float, str]] = []
        try:
            for doc in docs:
                d = self.encoder.encode_unit(doc)  # clean: near miss, continue only when there is no row
                if d is None:
                    continue
                scored.append((sum(x * y for x, y in zip(q.data, d.data)), doc))
                self.pool.give_back(d)
        finally:
            self.pool.give_back(q)
        return sorted(scored, reverse=True)

    def centroid(self, texts: Sequence[str], weights: Optional[Sequence[float]] = None) -> List[float]:
        row = self.encoder.encode_mean(texts)  # leak: rebound to the weighted row before it is given back
        if weights is not None:
            row = self._weighted(texts, weights)  # clean: given back below
        out = row.clone()
        self.pool.give_back(row)
        return out

    def _weighted(self, texts: Sequence[str], weights: Sequence[float]) -> Row:
        acc = self.pool.borrow()  # clean: returned to the caller
        acc.fill([0.0] * acc.dim)
        for text, w in zip(texts, weights):
            part = self.encoder.encode(text)  # leak: weight zero goes on with continue before the give-back
            if w == 0.0:
                continue
            for i, v in enumerate(part.data):
                acc.data[i] += w * v
            self.pool.give_back(part)
        return acc

    def normalised(self, text: str, scale: float) -> List[float]:
        row = self.encoder.encode(text)  # clean: near miss, given back before row is rebound
        if scale != 1.0:
            values = [v * scale for v in row.data]
            self.pool.give_back(row)
            row = self.pool.borrow()  # clean: given back below
            row.fill(values)
        out = row.clone()
        self.pool.give_back(row)
        return out

    def rows(self, texts: Iterable[str]) -> Iterator[Row]:
        for text in texts:
            row = self.encoder.encode(text)  # leak: first_match breaks off and nothing after the yield runs
            yield row
            self.pool.give_back(row)

    def first_match(self, texts: Iterable[str], threshold: float) -> Optional[List[float]]:
        for row in self.rows(texts):
            if sum(row.data) > threshold:
                return row.clone()
        return None


def main() -> None:
    pool = RowPool(4, 64)
    svc = EmbeddingService(Encoder(pool), pool)
    print(svc.embed("abcd"), svc.similarity("abc", "abd"))
    svc.cached("abc")
    svc.evict("abc")
    print(svc.rerank("ab", ["abc", "bcd"]), svc.normalised("abc", 0.5), svc.centroid(["ab", "cd"]))
    print(pool.lent())


if __name__ == "__main__":
    main()
