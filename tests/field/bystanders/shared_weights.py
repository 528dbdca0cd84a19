"""Reference counted model weights shared by several pipelines in one process."""
from __future__ import annotations

import logging
import threading
from typing import Any, Callable, Dict, List, Optional

import torch

logger = logging.getLogger(__name__)

Loader = Callable[[str], Dict[str, torch.Tensor]]


class WeightHandle:
    def __init__(self, name: str, tensors: Dict[str, torch.Tensor]) -> None:
        self.name = name
        self.tensors = tensors
        self.pins = 0


class WeightRegistry:
    """pin() loads on first use; the last unpin() drops the tensors."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._lock = threading.RLock()
        self._handles: Dict[str, WeightHandle] = {}

    def pin(self, name: str) -> WeightHandle:
        with self._lock:
            h = self._handles.get(name)
            if h is None:
                h = self._handles[name] = WeightHandle(name, self.loader(name))
            h.pins += 1
            return h

    def unpin(self, handle: WeightHandle) -> None:
        with self._lock:
            handle.pins -= 1
            if handle.pins == 0:
                del self._handles[handle.name]


class Pipeline:
    def __init__(self, registry: WeightRegistry, name: str, tokenizer: Optional[Any] = None) -> None:
        self.registry = registry
        self.name = name
        self.tokenizer = tokenizer
        self.weights = registry.pin(name)  # clean: close unpins
        self.adapter: Optional[WeightHandle] = None
        self.aux: List[WeightHandle] = []

    def set_adapter(self, name: Optional[str]) -> None:
        if self.adapter is not None:
            self.registry.unpin(self.adapter)
            self.adapter = None
        if name is not None:
            self.adapter = self.registry.pin(name)  # clean: near miss, the former adapter is unpinned first, close takes the last

    def add_aux(self, name: str) -> None:
        self.aux.append(self.registry.pin(name))  # leak: close unpins only the first of the list

    def close(self) -> None:
        self.registry.unpin(self.weights)
        if self.adapter is not None:
            self.registry.unpin(self.adapter)
            self.adapter = None
        if self.aux:
            self.registry.unpin(self.aux[0])
            self.aux = []


def parameter_count(registry: WeightRegistry, name: str) -> int:
    h = registry.pin(name)  # clean: unpinned after counting
    n = sum(t.numel() for t in h.tensors.values())
    registry.unpin(h)
    return n


def has_bias(registry: WeightRegistry, name: str) -> bool:
    h = registry.pin(name)  # leak: the first bias found returns without unpin
    for key in h.tensors:
        if key.endswith(".bias"):
            return True
    registry.unpin(h)
    return False


def same_shapes(registry: WeightRegistry, a: str, b: str) -> bool:
    ha = registry.pin(a)  # clean: near miss, finally unpins both
    hb = registry.pin(b)  # clean: near miss, finally unpins both
    try:
        if ha.tensors.keys() != hb.tensors.keys():
            return False
        return all(ha.tensors[k].shape == hb.tensors[k].shape for k in ha.tensors)
    finally:
        registry.unpin(hb)
        registry.unpin(ha)


def interpolate(registry: WeightRegistry, a: str, b: str, t: float) -> Optional[Dict[str, torch.Tensor]]:
    ha = registry.pin(a)  # clean: unpinned on the mismatch and at the end
    hb = registry.pin(b)  # leak: on a mismatch only the first model is unpinned
    if ha.tensors.keys() != hb.tensors.keys():
        logger.error("%s and %s do not match", a, b)
        registry.unpin(ha)
        return None
    out = {k: torch.lerp(ha.tensors[k], hb.tensors[k], t) for k in ha.tensors}
    registry.unpin(hb)
    registry.unpin(ha)
    return out


def loadable(registry: WeightRegistry, names: List[str]) -> List[str]:
    loaded = []
    for n in names:
        try:
            h = registry.pin(n)  # leak: pinned to see whether it loads, rebound each turn and never unpinned
        except FileNotFoundError:
            continue
        loaded.append(h.name)
    return loaded


def with_weights(registry: WeightRegistry, name: str, fn: Callable[[Dict[str, torch.Tensor]], Any]) -> Any:
    h = registry.pin(name)  # clean: finally
    try:
        return fn(h.tensors)
    finally:
        registry.unpin(h)


def smoke_test(registry: WeightRegistry, name: str, text: str) -> bool:
    p = Pipeline(registry, name)  # leak: without a tokenizer it returns before close
    if p.tokenizer is None:
        return False
    ok = len(p.tokenizer.encode(text)) > 0
    p.close()
    return ok


def switch(registry: WeightRegistry, pipe: Pipeline, name: str) -> Pipeline:
    new = Pipeline(registry, name, pipe.tokenizer)  # clean: near miss, the new pipeline is returned, the former closed
    pipe.close()
    return new
