"""Saved-tensor hooks that move large activations to the host during the forward."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Union

import torch

from .slabs import PageRun, SlabSet


@dataclass
class Offloaded:
    run: PageRun
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    sample: Optional[PageRun] = None


Packed = Union[torch.Tensor, Offloaded]


class OffloadHooks(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, slabs: SlabSet, threshold: int = 1 << 20, check: bool = False):
        super().__init__(self.pack, self.unpack)
        self.slabs = slabs
        self.threshold = threshold
        self.check = check
        self.offloaded_bytes = 0
        self.mismatches = 0
        self._live: Dict[int, Offloaded] = {}

    def pack(self, tensor: torch.Tensor) -> Packed:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self.threshold or isinstance(tensor, torch.nn.Parameter):
            return tensor
        run = self.slabs.draw(nbytes)  # clean: near miss, in Offloaded, unpack or end_step closes it
        if run is None:
            return tensor
        raw = tensor.contiguous().view(torch.uint8).flatten()
        run.write(raw)
        packed = Offloaded(run, tensor.shape, tensor.dtype, tensor.device)
        if self.check:
            packed.sample = self.slabs.draw(4096)  # leak: unpack compares the sample and drops it
            if packed.sample is not None:
                packed.sample.write(raw[:4096])
        self.offloaded_bytes += nbytes
        self._live[id(packed)] = packed
        return packed

    def unpack(self, packed: Packed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        raw = packed.run.read()
        self._live.pop(id(packed), None)
        packed.run.close()
        if packed.sample is not None:
            head = packed.sample.read()
            if not torch.equal(head[: raw.numel()], raw[: head.numel()]):
                self.mismatches += 1
        return raw.to(packed.device).view(packed.dtype).view(packed.shape)

    def end_step(self) -> int:
        """Gives up what no backward has asked for."""
        unused = len(self._live)
        for packed in self._live.values():
            packed.run.close()
        self._live.clear()
        return unused


class LayerCache:
    """Explicit variant: activations by layer and name, fetched in the backward."""

    def __init__(self, slabs: SlabSet):
        self.slabs = slabs
        self._runs: Dict[int, Dict[str, Offloaded]] = {}
        self._mirrors: Dict[int, List[PageRun]] = {}

    def put(self, layer: int, name: str, tensor: torch.Tensor) -> bool:
        run = self.slabs.draw(tensor.nbytes)  # clean: near miss, see get
        if run is None:
            return False
        run.write(tensor.contiguous().view(torch.uint8).flatten())
        entry = Offloaded(run, tensor.shape, tensor.dtype, tensor.device)
        before = self._runs.setdefault(layer, {}).pop(name, None)
        if before is not None:
            before.run.close()
        self._runs[layer][name] = entry
        return True

    def get(self, layer: int, name: str) -> torch.Tensor:
        entry = self._runs[layer].pop(name)
        raw = entry.run.read()
        entry.run.close()
        return raw.to(entry.device).view(entry.dtype).view(entry.shape)

    def drop_layer(self, layer: int) -> int:
        entries = self._runs.pop(layer, {})
        for entry in entries.values():
            entry.run.close()
        for run in self._mirrors.pop(layer, []):
            run.close()
        return len(entries)

    def mirror(self, layer: int, tensor: torch.Tensor) -> bool:
        if layer in self._mirrors:
            return False
        runs = self.slabs.draw_mirrored(tensor.nbytes)  # clean: see drop_layer
        if runs is None:
            return False
        for run in runs:
            run.write(tensor.contiguous().view(torch.uint8).flatten())
        self._mirrors[layer] = runs
        return True
