"""Grammar matchers for structured output. Handles come from a C-like table and are freed by hand."""
import itertools as it
import json
import re
from contextlib import closing
from typing import Any, Callable

import numpy as np


class GrammarError(ValueError): ...


class Unsupported(GrammarError): ...


class Handles:
    def __init__(self):
        self._ids, self._spare, self._objs = it.count(1), [], {}

    def new(self, obj: Any) -> int:
        h = self._spare.pop() if self._spare else next(self._ids)  # clean: returned to the caller
        self._objs[h] = obj
        return h

    def free(self, h: int) -> None:
        del self._objs[h]
        self._spare.append(h)

    def __getitem__(self, h: int) -> Any:
        return self._objs[h]


H = Handles()


class Masks:
    """Rows of the token bitmask, given out by index."""

    def __init__(self, rows: int, vocab: int):
        self.bits = np.full((rows, (vocab + 31) // 32), -1, dtype=np.int32)
        self._free = list(range(rows))

    def lease(self) -> int:
        if not self._free:
            raise IndexError("no mask row")
        return self._free.pop()  # clean: returned to the caller

    def give(self, row: int) -> None:
        self.bits[row] = -1
        self._free.append(row)


def to_regex(schema: dict) -> str:
    match schema:
        case {"type": "string", **rest}:
            return rest.get("pattern", r'"[^"]*"')
        case {"type": "integer"}:
            return r"-?\d+"
        case {"enum": values}:
            return "|".join(re.escape(json.dumps(v)) for v in values)
        case {"type": "array", "items": item}:
            return rf"\[({to_regex(item)})*\]"
        case _:
            raise Unsupported(f"cannot compile {schema}")


class Entry:
    __slots__ = ("key", "h", "refs", "size")

    def __init__(self, key: str, h: int, size: int):
        self.key, self.h, self.size, self.refs = key, h, size, 0


class Cache:
    """Compiled grammars; get() takes a reference and put() drops it."""

    def __init__(self, keep: int = 64):
        self.keep, self._d = keep, {}

    def get(self, schema: dict) -> Entry:
        key = json.dumps(schema, sort_keys=True)
        if (e := self._d.get(key)) is None:
            rx = to_regex(schema)
            e = self._d[key] = Entry(key, H.new(re.compile(rx)), len(rx))  # clean: near miss, the handle lives in the entry and trim() or clear() frees it
        e.refs += 1
        return e

    def put(self, e: Entry) -> None:
        e.refs -= 1
        if not e.refs and len(self._d) > self.keep:
            self.trim()

    def trim(self) -> None:
        for key in [k for k, e in self._d.items() if not e.refs]:
            H.free(self._d.pop(key).h)

    def clear(self) -> None:
        for e in self._d.values():
            H.free(e.h)
        self._d.clear()


CACHE = Cache()


def check(e: Entry, limit: int) -> None:
    if e.size > limit:
        raise Unsupported(f"grammar of {e.size} states")


class Matcher:
    def __init__(self, entry: Entry, h: int, schema: dict):
        self.entry, self.h, self.schema, self.text, self.done = entry, h, schema, "", False

    @classmethod
    def open(cls, schema: dict, limit: int = 4096) -> "Matcher":
        e = CACHE.get(schema)  # leak: a grammar above the limit raises with the reference taken
        check(e, limit)
        return cls(e, H.new({"state": 0}), schema)  # clean: the matcher owns the handle and close() frees it

    def fork(self) -> "Matcher":
        e = CACHE.get(self.schema)  # clean: the new matcher owns the reference and its close() puts it
        m = Matcher(e, H.new(dict(H[self.h])), self.schema)  # clean: the new matcher is returned to the caller
        m.text, m.done = self.text, self.done
        return m

    def accept(self, piece: str) -> bool:
        self.text += piece
        H[self.h]["state"] += len(piece)
        self.done = H[self.entry.h].fullmatch(self.text) is not None
        return self.done

    def close(self) -> None:
        if self.h:
            H.free(self.h)
            CACHE.put(self.entry)
            self.h = 0


def jump_forward(m: Matcher, pieces: list[str]) -> str:
    """The longest forced continuation."""
    probe = m.fork()  # leak: a matcher that is done already returns before the close
    if probe.done:
        return ""
    forced = list(it.takewhile(lambda p: not probe.accept(p), pieces))
    probe.close()
    return "".join(forced)


def validate(schema: dict, text: str) -> bool:
    with closing(Matcher.open(schema)) as m:  # clean: closing() closes it
        return m.accept(text)


def first_match(schemas: list[dict], text: str) -> Matcher | None:
    for s in schemas:
        try:
            m = Matcher.open(s)  # clean: near miss, returned when it matches and closed otherwise
        except Unsupported:
            continue
        if m.accept(text):
            return m
        m.close()
    return None


class Request:
    def __init__(self, rid: str, schema: dict | None):
        self.rid, self.schema, self.matcher = rid, schema, None
        self._hooks: list[Callable[[], None]] = []

    def on_finish(self, fn: Callable[[], None]) -> None:
        self._hooks.append(fn)

    def finish(self) -> None:
        for fn in self._hooks:
            fn()
        self._hooks.clear()

    def abort(self, why: str) -> None:
        self._hooks.clear()
        print(f"{self.rid} aborted: {why}")


def attach(req: Request) -> None:
    if req.schema is None:
        return
    req.matcher = Matcher.open(req.schema)  # leak: abort() throws the hooks away without calling them
    req.on_finish(req.matcher.close)


def fill(reqs: list[Request], masks: Masks) -> dict[str, np.ndarray]:
    out = {}
    for r in reqs:
        row = masks.lease()  # leak: a request without a matcher is skipped with the row leased
        if r.matcher is None or r.matcher.done:
            continue
        masks.bits[row, 0] = len(r.matcher.text)
        out[r.rid] = masks.bits[row].copy()
        masks.give(row)
    return out


def fill_shared(reqs: list[Request], masks: Masks, run: Callable[[np.ndarray], None]) -> None:
    rows: dict[str, int] = {}
    try:
        for r in reqs:
            if r.schema is not None and r.rid not in rows:
                rows[r.rid] = masks.lease()  # clean: near miss, the key is new and the finally gives all rows
        run(masks.bits[list(rows.values())])
    finally:
        for row in rows.values():
            masks.give(row)


class ToolDialog:
    """Switches between free text and the schema of the tool that is called."""

    def __init__(self, tools: dict[str, dict]):
        self.tools, self.m = tools, None

    def enter(self, tool: str) -> bool:
        if tool not in self.tools:
            return False
        self.m = Matcher.open(self.tools[tool])  # leak: a call inside a call overwrites the matcher that is open
        return True

    def leave(self) -> str:
        if self.m is None:
            return ""
        text, m = self.m.text, self.m
        self.m = None
        m.close()
        return text
