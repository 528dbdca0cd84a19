"""Grammar bitmasks for guided decoding; ExitStack keeps the compiled automata of a batch together."""
from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional

import torch

logger = logging.getLogger(__name__)


@dataclass
class Matcher:
    schema: str
    pos: int = 0

    def accept(self, token: int) -> bool:
        self.pos += 1
        return token >= 0

    def reset(self) -> None:
        self.pos = 0


class MatcherPool:
    """Compiled matchers per schema. Compiling is dear, so they are recycled."""

    def __init__(self, per_schema: int = 4) -> None:
        self.per_schema = per_schema
        self._spare: Dict[str, List[Matcher]] = {}

    def obtain_matcher(self, schema: str) -> Matcher:
        spare = self._spare.get(schema)
        if spare:
            return spare.pop()
        return Matcher(schema)

    def recycle_matcher(self, m: Matcher) -> None:
        m.reset()
        spare = self._spare.setdefault(m.schema, [])
        if len(spare) < self.per_schema:
            spare.append(m)

    @contextlib.contextmanager
    def matcher(self, schema: str) -> Iterator[Matcher]:
        m = self.obtain_matcher(schema)  # clean: recycled when the block ends
        try:
            yield m
        finally:
            self.recycle_matcher(m)


class BitmaskRows:
    def __init__(self, rows: int, vocab: int) -> None:
        self.mask = torch.full((rows, (vocab + 31) // 32), -1, dtype=torch.int32)
        self._open = set(range(rows))

    def reserve_row(self) -> Optional[int]:
        return self._open.pop() if self._open else None

    def unreserve_row(self, row: int) -> None:
        self.mask[row].fill_(-1)
        self._open.add(row)


class GuidedBackend:
    def __init__(self, matchers: MatcherPool, rows: BitmaskRows) -> None:
        self.matchers = matchers
        self.rows = rows
        self.by_request: Dict[str, tuple[Matcher, int]] = {}
        self.overrides: Dict[str, Matcher] = {}

    def attach(self, rid: str, schema: str) -> bool:
        if rid in self.by_request:
            return True
        m = self.matchers.obtain_matcher(schema)  # clean: recycled without a row, else kept until detach
        row = self.rows.reserve_row()  # clean: kept with the matcher until detach
        if row is None:
            self.matchers.recycle_matcher(m)
            return False
        self.by_request[rid] = (m, row)
        return True

    def attach_choice(self, rid: str, choices: List[str]) -> bool:
        row = self.rows.reserve_row()  # leak: an empty list of choices returns with the row reserved
        if row is None or rid in self.by_request:
            if row is not None:
                self.rows.unreserve_row(row)
            return False
        if not choices:
            logger.warning("request %s has no choices", rid)
            return False
        self.by_request[rid] = (self.matchers.obtain_matcher("|".join(choices)), row)  # clean: kept until detach
        return True

    def attach_file(self, rid: str, path: Path) -> bool:
        f = open(path, encoding="utf-8")  # leak: a schema without a title returns before the close
        schema = json.load(f)
        if "title" not in schema:
            return False
        f.close()
        return self.attach(rid, schema["title"])

    def detach(self, rid: str) -> None:
        entry = self.by_request.pop(rid, None)
        if entry is None:
            return
        m, row = entry
        over = self.overrides.pop(rid, None)
        if over is not None:
            self.matchers.recycle_matcher(over)
        self.matchers.recycle_matcher(m)
        self.rows.unreserve_row(row)

    def override_schema(self, rid: str, schema: str) -> None:
        if rid in self.by_request:
            self.overrides[rid] = self.matchers.obtain_matcher(schema)  # leak: a second override of the request loses the first matcher

    def validate(self, schema: str, tokens: List[int]) -> bool:
        with self.matchers.matcher(schema) as m:  # clean: with statement
            return all(m.accept(t) for t in tokens)

    def validate_batch(self, work: Mapping[str, List[int]]) -> List[bool]:
        with contextlib.ExitStack() as stack:
            ms = [stack.enter_context(self.matchers.matcher(s)) for s in work]  # clean: near miss, the stack leaves them all
            return [all(m.accept(t) for t in toks) for m, toks in zip(ms, work.values())]

    def validate_first(self, work: Mapping[str, List[int]]) -> Optional[str]:
        for schema, toks in work.items():
            m = self.matchers.obtain_matcher(schema)  # leak: the schema that fits is returned without a recycle
            if all(m.accept(t) for t in toks):
                return schema
            self.matchers.recycle_matcher(m)
        return None

    def fill_once(self, words: List[int]) -> Optional[torch.Tensor]:
        stack = contextlib.ExitStack()
        row = self.rows.reserve_row()  # clean: near miss, the callback on the stack runs on both exits
        if row is None:
            return None
        stack.callback(self.rows.unreserve_row, row)
        with stack:
            if len(words) > self.rows.mask.shape[1]:
                return None
            self.rows.mask[row, : len(words)] = torch.tensor(words, dtype=torch.int32)
            return self.rows.mask[row].clone()

    def fill_pop(self, words: List[int]) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            row = self.rows.reserve_row()  # leak: pop_all takes the callback off and nobody closes the new stack
            stack.callback(self.rows.unreserve_row, row)
            self.rows.mask[row, : len(words)] = torch.tensor(words, dtype=torch.int32)
            stack.pop_all()
            return self.rows.mask[row].clone()
