"""Records the two shipped traces on this machine: `python -m benchmarks.traces.record`.

A dispatch mode sees every operation; a storage not seen before is an allocation, a storage whose weak
reference has expired after an operation is a free. Storages under 4 KB are left out: scalars and shapes,
which no pool serves.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.traces.format import HERE, Trace, save

LEAST_BYTES = 4096


class Recorder(TorchDispatchMode):
    """Collects events while active; `step` closes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = [[]]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {ref.cdata for ref in (self._ref(t) for t in tree_leaves((args, kwargs))) if ref is not None}
        result = func(*args, **(kwargs or {}))
        self.expire()
        for leaf in tree_leaves(result):
            ref = self._ref(leaf)
            if ref is not None and ref.cdata not in known and ref.cdata not in self._alive:
                self.steps[-1].append(leaf.untyped_storage().nbytes())
                self._alive[ref.cdata] = ref, self._made
                self._made += 1
        return result

    def expire(self) -> None:
        """Free what has died."""
        for key in [key for key, (ref, _) in self._alive.items() if ref.expired()]:
            self._free(key)

    def step(self) -> None:
        """The next events belong to another step."""
        self.expire()
        self.steps.append([])

    def finish(self) -> list[list[int]]:
        """Everything still alive is freed; the trace."""
        for key in list(self._alive):
            self._free(key)
        return [step for step in self.steps if step]

    def _free(self, key: int) -> None:
        _, number = self._alive.pop(key)
        self.steps[-1].append(number - self._made)

    def _ref(self, leaf: object) -> StorageWeakRef | None:
        if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().nbytes() < LEAST_BYTES:
            return None
        return StorageWeakRef(leaf.untyped_storage())


class Decoder(nn.Module):
    """A small causal transformer in plain torch."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            b, n, c = x.shape
            qkv = layer["qkv"](layer["norm1"](x)).view(b, n, 3, self.heads, c // self.heads)
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](mixed.transpose(1, 2).reshape(b, n, c))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return self.head(x)


def training() -> Trace:
    """Steps of AdamW on equal batches, gradients set to None: the same sizes for ever."""
    torch.manual_seed(0)
    model = Decoder(vocabulary=4096, width=256, heads=4, depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    recorder = Recorder()

    def step() -> None:
        tokens = torch.randint(4096, (8, 257))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's state is made once
    with recorder:
        for _ in range(4):
            step()
            recorder.step()
    source = (
        "4 steps of AdamW, decoder 4 layers x 256, 8 sequences of 256 tokens, vocabulary 4096, float32, CPU"
    )
    return Trace("training", source, recorder.finish())


def serving() -> Trace:
    """Prompts of log-normal length prefilled alone, key-value buffers that live until their request ends."""
    torch.manual_seed(0)
    dice = random.Random(0)
    model = Decoder(vocabulary=2048, width=192, heads=4, depth=3).eval()
    recorder = Recorder()
    running: list[tuple[int, torch.Tensor]] = []
    with torch.no_grad(), recorder:
        for now in range(400):
            running = [(end, cache) for end, cache in running if end > now]
            recorder.expire()
            if len(running) < 12 and dice.random() < 0.6:
                prompt = min(1024, max(8, int(dice.lognormvariate(5.2, 0.8))))
                new = dice.randint(8, 60)
                cache = torch.empty(3, 2, 4, prompt + new, 48)
                model(torch.randint(2048, (1, prompt)))
                running.append((now + new, cache))
            recorder.step()
        running.clear()
    source = (
        "400 ticks of serving, decoder 3 layers x 192, prompts log-normal around 180 tokens (8 to 1024), "
        "up to 12 requests at once with key-value buffers for 8 to 60 more tokens, float32, CPU"
    )
    return Trace("serving", source, recorder.finish())


def main() -> None:
    """Record both and say what came out."""
    for trace in (training(), serving()):
        path = HERE / f"{trace.name}.json.gz"
        save(trace, path)
        events = sum(map(len, trace.steps))
        print(
            f"{path.name}: {len(trace.steps)} steps, {events} events, peak {trace.peak()} bytes, file "
            f"{path.stat().st_size}"
        )


if __name__ == "__main__":
    main()
