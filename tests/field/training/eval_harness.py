"""Small evaluation harness: tasks share generation slots and a cache of loaded models."""
from __future__ import annotations

import contextlib
import json
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

log = logging.getLogger("evalkit")


@dataclass
class ModelHandle:
    name: str
    module: torch.nn.Module
    refs: int = 0


class ModelCache:
    def __init__(self, loader: Callable[[str], torch.nn.Module]) -> None:
        self._loader = loader
        self._handles: Dict[str, ModelHandle] = {}
        self._lock = threading.Lock()

    def inc_ref(self, name: str) -> ModelHandle:
        with self._lock:
            h = self._handles.get(name)
            if h is None:
                h = self._handles[name] = ModelHandle(name, self._loader(name))
            h.refs += 1
            return h

    def dec_ref(self, handle: ModelHandle) -> None:
        with self._lock:
            handle.refs -= 1
            if handle.refs == 0:
                self._handles.pop(handle.name, None)


class GenSlots:
    def __init__(self, n: int) -> None:
        self._ids = list(range(n))

    def allocate_slot(self) -> Optional[int]:
        return self._ids.pop() if self._ids else None

    def free_slot(self, slot: int) -> None:
        self._ids.append(slot)


@dataclass
class Task:
    name: str
    prompts: List[str]
    metric: Callable[[str], float]
    scores: List[float] = field(default_factory=list)


class Harness:
    def __init__(self, cache: ModelCache, slots: GenSlots, outdir: Path) -> None:
        self.cache = cache
        self.slots = slots
        self.outdir = outdir

    def generate(self, handle: ModelHandle, prompt: str, slot: int) -> str:
        return prompt[::-1] + str(slot)

    def run_task(self, model: str, task: Task) -> float:
        handle = self.cache.inc_ref(model)  # leak: a task without prompts returns before dec_ref
        if not task.prompts:
            return 0.0
        for prompt in task.prompts:
            slot = self.slots.allocate_slot()  # clean: freed at the end of the round
            if slot is None:
                log.warning("no slot for %s", task.name)
                continue
            task.scores.append(task.metric(self.generate(handle, prompt, slot)))
            self.slots.free_slot(slot)
        self.cache.dec_ref(handle)
        return sum(task.scores) / len(task.prompts)

    def run_best_of(self, model: str, prompt: str, metric: Callable[[str], float], n: int) -> Optional[str]:
        handle = self.cache.inc_ref(model)  # clean: near miss, released in the finally on both returns
        try:
            best, best_score = None, float("-inf")
            for _ in range(n):
                slot = self.slots.allocate_slot()  # leak: a perfect score returns with the slot still allocated
                if slot is None:
                    break
                text = self.generate(handle, prompt, slot)
                score = metric(text)
                if score >= 1.0:
                    return text
                if score > best_score:
                    best, best_score = text, score
                self.slots.free_slot(slot)
            return best
        finally:
            self.cache.dec_ref(handle)

    def compare(self, left: str, right: str, prompts: List[str]) -> Dict[str, int]:
        a = self.cache.inc_ref(left)  # clean: released at the end
        b = self.cache.inc_ref(right)  # leak: the second dec_ref names the first handle again
        wins = {left: 0, right: 0}
        for p in prompts:
            winner = a if len(self.generate(a, p, 0)) >= len(self.generate(b, p, 0)) else b
            wins[winner.name] += 1
        self.cache.dec_ref(a)
        self.cache.dec_ref(a)
        return wins

    def compare_stack(self, names: List[str], prompt: str) -> List[str]:
        with contextlib.ExitStack() as stack:
            handles = []
            for name in names:
                h = self.cache.inc_ref(name)  # clean: near miss, the exit stack holds the dec_ref
                stack.callback(self.cache.dec_ref, h)
                handles.append(h)
            return [self.generate(h, prompt, 0) for h in handles]

    def write_results(self, tasks: List[Task]) -> int:
        out = open(self.outdir / "results.jsonl", "w")  # leak: the raise on a missing score skips the close
        for t in tasks:
            if not t.scores:
                raise ValueError(f"{t.name} has no scores")
            out.write(json.dumps({"task": t.name, "scores": t.scores}) + "\n")
        out.close()
        return len(tasks)

    def write_summary(self, rows: Dict[str, Any]) -> None:
        with contextlib.ExitStack() as stack:
            fh = stack.enter_context(open(self.outdir / "summary.json", "w"))  # clean: the exit stack closes it
            if not rows:
                return
            json.dump(rows, fh)

    def smoke(self, model: str) -> bool:
        try:
            handle = self.cache.inc_ref(model)  # leak: the handler returns False and forgets the reference
            ok = bool(self.generate(handle, "ping", 0))
            if not ok:
                raise RuntimeError("empty generation")
            self.cache.dec_ref(handle)
            return True
        except RuntimeError as exc:
            log.error("smoke test failed: %s", exc)
            return False


class PinnedModels:
    def __init__(self, cache: ModelCache) -> None:
        self.cache = cache
        self.handles: Dict[str, ModelHandle] = {}

    def pin(self, name: str) -> None:
        if name in self.handles:
            return
        self.handles[name] = self.cache.inc_ref(name)  # clean: near miss, a second pin returns first; unpin and unpin_all release

    def unpin(self, name: str) -> None:
        h = self.handles.pop(name, None)
        if h is not None:
            self.cache.dec_ref(h)

    def unpin_all(self) -> None:
        for name in tuple(self.handles):
            self.unpin(name)
