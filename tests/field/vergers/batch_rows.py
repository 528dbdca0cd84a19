"""Rows of the decode batch, the lowest first so that the batch stays dense."""
import heapq
from collections import deque


class OutOfRows(RuntimeError):
    pass


class RowAllocator:
    def __init__(self, rows):
        self._free = list(range(rows))
        self._used = set()

    def take(self, n):
        """The n lowest free rows, all or none."""
        if n > len(self._free):
            raise OutOfRows(n)
        rows = [heapq.heappop(self._free) for _ in range(n)]
        self._used.update(rows)
        return rows

    def put(self, row):
        if row not in self._used:
            return False
        self._used.discard(row)
        heapq.heappush(self._free, row)
        return True


def run_group(alloc, model, prompts):
    rows = alloc.take(len(prompts))  # leak: the list is shortened while it is walked, so every second row is passed over
    try:
        return model.run(prompts, list(rows))
    finally:
        for row in rows:
            rows.remove(row)
            alloc.put(row)


def run_waves(alloc, model, prompts):
    rows = alloc.take(len(prompts))  # clean: the finally walks a copy while it shortens the list
    try:
        for wave in model.waves(prompts, rows):
            if wave.failed:
                return None
        return model.collect(rows)
    finally:
        for row in list(rows):
            rows.remove(row)
            alloc.put(row)


def embed_group(alloc, model, texts):
    rows = alloc.take(len(texts))  # leak: the map is lazy and nobody iterates it
    try:
        return model.embed(texts, rows)
    finally:
        map(alloc.put, rows)


def classify_group(alloc, model, texts):
    rows = alloc.take(len(texts))  # clean: a deque without room runs the map to its end
    try:
        return model.classify(texts, rows)
    finally:
        deque(map(alloc.put, rows), maxlen=0)


class ParallelSampler:
    def __init__(self, alloc, log):
        self.alloc = alloc
        self.log = log
        self.groups = {}

    def begin(self, rid, n):
        if rid in self.groups:
            raise KeyError(rid)
        self.groups[rid] = self.alloc.take(n)  # leak: any() stops at the first put() that says True, the other rows of the popped group stay taken

    def end(self, rid):
        rows = self.groups.pop(rid)
        if not any(self.alloc.put(row) for row in rows):
            self.log.warning("request %s had no rows", rid)


def verify_drafts(alloc, model, drafts, mask):
    rows = (row for row in alloc.take(len(drafts)))  # leak: the generator is used up by the model call and the loop in the finally finds nothing
    try:
        return model.verify(drafts, mask, batch_indices=list(rows))
    finally:
        for row in rows:
            alloc.put(row)


def run_with_fallback(alloc, model, prompts, extra):
    rows = alloc.take(len(prompts))  # clean: all of these are in held, which the finally walks
    held = list(rows)
    try:
        result = model.run(prompts, rows)
        if result.needs_guidance:
            rows += alloc.take(extra)  # leak: held was copied before these rows came to the list
            result = model.run_guided(prompts, rows)
        return result
    finally:
        for row in held:
            alloc.put(row)


def run_bucketed(alloc, graphs, prompts):
    bucket = next(size for size in graphs if size >= len(prompts))
    rows = alloc.take(bucket)[:len(prompts)]  # leak: the rows that fill the bucket up are cut off by the slice in the same expression
    try:
        return graphs[bucket].replay(prompts, rows)
    finally:
        for row in rows:
            alloc.put(row)


class RowTable:
    def __init__(self, alloc):
        self.alloc = alloc
        self.rows = {}

    def row_of(self, rid):
        row = self.alloc.take(1)[0]  # leak: for an id that is known setdefault gives the older row and the new one is dropped
        return self.rows.setdefault(rid, row)

    def finish(self, rid):
        self.alloc.put(self.rows.pop(rid))


class SharedRowTable:
    def __init__(self, alloc):
        self.alloc = alloc
        self.rows = {}

    def row_of(self, rid):
        row = self.alloc.take(1)[0]  # clean: when setdefault keeps the older row, the new one is put back
        kept = self.rows.setdefault(rid, row)
        if kept != row:
            self.alloc.put(row)
        return kept

    def finish(self, rid):
        self.alloc.put(self.rows.pop(rid))


class MultiStepBatch:
    def __init__(self, alloc, config, width):
        self.alloc = alloc
        self.config = config
        self.rows = alloc.take(width)  # leak: the rows are taken in every configuration and put back only in that with static rows

    def step(self, model, tokens):
        if self.config.static_rows:
            return model.step_static(tokens, self.rows)
        return model.step(tokens, self.rows)

    def close(self):
        if self.config.static_rows:
            for row in self.rows:
                self.alloc.put(row)
        self.rows = []


def decode_one(alloc, model, prompt):
    row = alloc.take(1)[0]  # clean: each of the cases puts the row back, the one that raises as well
    outcome = model.decode(prompt, row)
    match outcome.reason:
        case "stop" | "length":
            alloc.put(row)
            return outcome.text
        case "abort":
            alloc.put(row)
            return None
        case other:
            alloc.put(row)
            raise RuntimeError(f"finish reason {other}")
