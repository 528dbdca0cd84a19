"""Replica-side multiplexing: tokenizer processes, model residency and engine handles."""
from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable


class TokenizerProc:
    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab
        self.broken = False

    def encode(self, text: str) -> list[int]:
        return [self.vocab.get(w, 0) for w in text.split()]


class TokenizerPool:
    def __init__(self, vocab: dict[str, int], size: int) -> None:
        self.vocab = vocab
        self.size = size
        self._idle = [TokenizerProc(vocab) for _ in range(size)]
        self._sem = threading.Semaphore(size)

    def acquire(self, timeout: float = 5.0) -> TokenizerProc | None:
        if not self._sem.acquire(timeout=timeout):
            return None
        return self._idle.pop()

    def release(self, proc: TokenizerProc) -> None:
        self._idle.append(TokenizerProc(self.vocab) if proc.broken else proc)
        self._sem.release()

    def run(self, text: str) -> list[int] | None:
        proc = self.acquire()  # clean: released in the finally
        if proc is None:
            return None
        try:
            return proc.encode(text)
        finally:
            self.release(proc)


@dataclass
class ModelHandle:
    model_id: str
    weights: Any
    refs: int = 0
    tags: set[str] = field(default_factory=set)


class ModelRegistry:
    def __init__(self, loader: Callable[[str], Any], max_models: int) -> None:
        self.loader = loader
        self.max_models = max_models
        self._models: OrderedDict[str, ModelHandle] = OrderedDict()

    def incref(self, model_id: str) -> ModelHandle | None:
        handle = self._models.get(model_id)
        if handle is None:
            if len(self._models) >= self.max_models and not self._evict_one():
                return None
            handle = self._models[model_id] = ModelHandle(model_id, self.loader(model_id))
        handle.refs += 1
        self._models.move_to_end(model_id)
        return handle

    def decref(self, handle: ModelHandle) -> None:
        handle.refs -= 1

    def _evict_one(self) -> bool:
        for model_id, handle in self._models.items():
            if handle.refs == 0:
                del self._models[model_id]
                return True
        return False


class ModelScope:
    def __init__(self, registry: ModelRegistry, model_id: str) -> None:
        self.registry = registry
        self.model_id = model_id
        self.handle: ModelHandle | None = None

    def __enter__(self) -> ModelHandle | None:
        self.handle = self.registry.incref(self.model_id)  # clean: near miss, __exit__ skips the decref only when there is no handle
        return self.handle

    def __exit__(self, *exc: Any) -> None:
        if self.handle is None:
            return
        self.registry.decref(self.handle)
        self.handle = None


class Replica:
    def __init__(self, registry: ModelRegistry, tokenizers: TokenizerPool) -> None:
        self.registry = registry
        self.tokenizers = tokenizers
        self.default: ModelHandle | None = None
        self.session_models: dict[str, ModelHandle] = {}

    def set_default(self, model_id: str) -> bool:
        handle = self.registry.incref(model_id)  # clean: near miss, swapped with the former default, which is dropped
        if handle is None:
            return False
        handle, self.default = self.default, handle
        if handle is not None:
            self.registry.decref(handle)
        return True

    def generate(self, model_id: str, prompt: str) -> list[int] | None:
        handle = self.registry.incref(model_id)  # leak: the return for an empty encoding comes without a decref
        if handle is None:
            return None
        ids = self.tokenizers.run(prompt)
        if not ids:
            return None
        out = handle.weights(ids)
        self.registry.decref(handle)
        return out

    def score(self, model_id: str, prompt: str) -> float | None:
        with ModelScope(self.registry, model_id) as handle:
            if handle is None:
                return None
            proc = self.tokenizers.acquire()  # leak: a prompt without tokens returns 0.0 with the process still out
            if proc is None:
                return None
            ids = proc.encode(prompt)
            if len(ids) == 0:
                return 0.0
            self.tokenizers.release(proc)
            return float(sum(handle.weights(ids))) / len(ids)

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        proc = self.tokenizers.acquire()  # clean: near miss, a broken one is released and another bound in its place
        out: list[list[int]] = []
        for text in texts:
            if proc is None:
                break
            try:
                out.append(proc.encode(text))
            except ValueError:
                proc.broken = True
                self.tokenizers.release(proc)
                proc = self.tokenizers.acquire()  # clean: released after the loop like the first
        if proc is not None:
            self.tokenizers.release(proc)
        return out

    def encode_retry(self, text: str, attempts: int = 3) -> list[int] | None:
        for _ in range(attempts):
            proc = self.tokenizers.acquire()  # leak: a ValueError marks the process broken and tries again without releasing it
            if proc is None:
                return None
            try:
                ids = proc.encode(text)
            except ValueError:
                proc.broken = True
                continue
            self.tokenizers.release(proc)
            return ids
        return None

    def bind_session(self, session: str, model_id: str) -> bool:
        current = self.session_models.get(session)
        if current is not None and current.model_id == model_id:
            return True
        handle = self.registry.incref(model_id)  # leak: a session that changes its model loses the former handle
        if handle is None:
            return False
        self.session_models[session] = handle
        return True

    def end_session(self, session: str) -> None:
        handle = self.session_models.pop(session, None)
        if handle is not None:
            self.registry.decref(handle)

    def preload(self, model_ids: list[str]) -> list[str]:
        loaded = []
        for model_id in model_ids:
            handle = self.registry.incref(model_id)  # clean: near miss, made resident only, and dropped at once
            if handle is None:
                break
            self.registry.decref(handle)
            loaded.append(model_id)
        return loaded

    def tag_all(self, model_ids: list[str], tag: str) -> int:
        seen: dict[str, ModelHandle] = {}
        for model_id in model_ids:
            handle = self.registry.incref(model_id)  # leak: an id that comes twice is counted twice and dropped once
            if handle is not None:
                handle.tags.add(tag)
                seen[model_id] = handle
        for handle in seen.values():
            self.registry.decref(handle)
        return len(seen)

    def shutdown(self) -> None:
        for session in list(self.session_models):
            self.end_session(session)
        if self.default is not None:
            self.registry.decref(self.default)
            self.default = None
