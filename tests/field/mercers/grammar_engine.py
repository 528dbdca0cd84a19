"""Structured output: compiled grammars, matcher rows in the token bitmask."""
from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Set, Tuple


class Compiled:
    def __init__(self, digest: str, schema: str) -> None:
        self.digest = digest
        self.schema = schema
        self.count = 0

    def allowed(self, state: int) -> Set[int]:
        return {(state + ord(c)) % 128 for c in self.schema[:8]}

    @property
    def valid(self) -> bool:
        return self.schema.startswith("{")


class GrammarRegistry:
    """Compiled grammars are shared; the last user frees the automaton."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._by_digest: Dict[str, Compiled] = {}

    def obtain(self, schema: str) -> Compiled:
        digest = hashlib.sha1(schema.encode()).hexdigest()
        with self._mu:
            g = self._by_digest.get(digest)
            if g is None:
                g = self._by_digest[digest] = Compiled(digest, schema)
            g.count += 1
            return g

    def forget(self, g: Compiled) -> None:
        with self._mu:
            g.count -= 1
            if g.count == 0:
                del self._by_digest[g.digest]


class BitmaskRows:
    def __init__(self, rows: int, vocab: int) -> None:
        self.vocab = vocab
        self._vacant = set(range(rows))
        self.bits: List[Set[int]] = [set() for _ in range(rows)]

    def take_row(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def give_row(self, row: int) -> None:
        self.bits[row].clear()
        self._vacant.add(row)


@dataclass
class Constrained:
    rid: str
    grammar: Optional[Compiled] = None
    row: Optional[int] = None
    state: int = 0
    tool: Optional[Compiled] = None


class GrammarEngine:
    def __init__(self, registry: GrammarRegistry, rows: BitmaskRows) -> None:
        self.registry = registry
        self.rows = rows
        self.live: Dict[str, Constrained] = {}

    # ---- life of a request ---------------------------------------------------

    def attach(self, rid: str, schema: str) -> bool:
        if rid in self.live:
            return False
        g = self.registry.obtain(schema)  # clean: forgotten without a row, else in live and by detach
        row = self.rows.take_row()  # clean: None on the early return, else given back by detach
        if row is None:
            self.registry.forget(g)
            return False
        self.live[rid] = Constrained(rid, g, row)
        return True

    def detach(self, rid: str) -> None:
        c = self.live.pop(rid, None)
        if c is None:
            return
        if c.row is not None:
            self.rows.give_row(c.row)
        if c.grammar is not None:
            self.registry.forget(c.grammar)

    def attach_pair(self, left: str, right: str, schema: str) -> bool:
        """Two requests with one schema, as for guided comparison."""
        if left in self.live or right in self.live:
            return False
        a = self.rows.take_row()  # leak: only b is looked after when the grammar is invalid
        b = self.rows.take_row()  # clean: given back on an invalid grammar, else in live
        g = self.registry.obtain(schema)  # clean: forgotten on invalid, else the reference of left
        if not g.valid:
            if b is not None:
                self.rows.give_row(b)
            self.registry.forget(g)
            return False
        self.live[left] = Constrained(left, g, a)
        self.live[right] = Constrained(right, self.registry.obtain(schema), b)  # clean: in live, by detach
        return True

    def replace_schema(self, rid: str, schema: str) -> None:
        c = self.live[rid]
        old = c.grammar
        c.grammar = self.registry.obtain(schema)  # clean: near miss, old is forgotten, new one by detach
        c.state = 0
        if old is not None:
            self.registry.forget(old)

    def enter_tool(self, rid: str, schema: str) -> None:
        """The model opened a tool call; its arguments follow another grammar."""
        c = self.live[rid]
        if c.tool is None:
            c.tool = self.registry.obtain(schema)  # leak: detach amid a tool call pops c and leaves c.tool

    def leave_tool(self, rid: str) -> None:
        c = self.live[rid]
        if c.tool is not None:
            self.registry.forget(c.tool)
            c.tool = None

    # ---- one step ------------------------------------------------------------

    def fill(self, rid: str) -> Optional[Set[int]]:
        c = self.live.get(rid)
        if c is None or c.grammar is None or c.row is None:
            return None
        self.rows.bits[c.row] |= c.grammar.allowed(c.state)
        return self.rows.bits[c.row]

    def jump_forward(self, rid: str, limit: int = 16) -> List[int]:
        """Tokens the grammar leaves no choice about."""
        c = self.live[rid]
        forced: List[int] = []
        row = self.rows.take_row()  # leak: a free choice returns without give_row
        if row is None or c.grammar is None:
            return forced
        state = c.state
        while len(forced) < limit:
            self.rows.bits[row] = c.grammar.allowed(state)
            if len(self.rows.bits[row]) != 1:
                return forced
            (tok,) = self.rows.bits[row]
            forced.append(tok)
            state += tok
        self.rows.give_row(row)
        return forced

    def validate(self, schema: str) -> bool:
        g = self.registry.obtain(schema)  # leak: the answer is returned and the reference kept
        return g.valid

    def explain(self, schema: str) -> str:
        g = self.registry.obtain(schema)  # clean: forgotten before both returns
        ok, digest = g.valid, g.digest[:8]
        self.registry.forget(g)
        if not ok:
            return f"{digest}: not an object schema"
        return f"{digest}: fine"

    def _prepare(self, schema: str) -> Optional[Tuple[Compiled, int]]:
        row = self.rows.take_row()  # clean: handed to the caller in the pair
        if row is None:
            return None
        g = self.registry.obtain(schema)  # clean: handed to the caller in the pair
        return g, row

    def first_width(self, schema: str) -> int:
        pair = self._prepare(schema)  # leak: the row of the pair is thrown away
        if pair is None:
            return 0
        g, _ = pair
        n = len(g.allowed(0))
        self.registry.forget(g)
        return n
