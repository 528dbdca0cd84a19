"""Seeded torch.Generator objects are expensive on device; keep a pool per device."""
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import DefaultDict, Dict, List, Optional, Tuple

import torch


class GeneratorPool:
    def __init__(self) -> None:
        self._idle: DefaultDict[str, List[torch.Generator]] = defaultdict(list)
        self.made = 0

    def acquire_gen(self, device: str, seed: int) -> torch.Generator:
        idle = self._idle[device]
        if idle:
            g = idle.pop()
        else:
            self.made += 1
            g = torch.Generator(device=device)
        g.manual_seed(seed)
        return g

    def release_gen(self, g: torch.Generator) -> None:
        self._idle[str(g.device)].append(g)


class SeededGen(AbstractContextManager):
    def __init__(self, pool: GeneratorPool, device: str, seed: int) -> None:
        self.pool = pool
        self.args = (device, seed)
        self.gen: Optional[torch.Generator] = None

    def __enter__(self) -> torch.Generator:
        self.gen = self.pool.acquire_gen(*self.args)  # clean: __exit__ releases
        return self.gen

    def __exit__(self, et, ev, tb) -> None:
        g, self.gen = self.gen, None
        if g is not None:
            self.pool.release_gen(g)


class SuppressingGen(SeededGen):
    def __enter__(self) -> torch.Generator:
        self.gen = self.pool.acquire_gen(*self.args)  # leak: __exit__ returns True on a ValueError before the release
        return self.gen

    def __exit__(self, et, ev, tb) -> bool:
        if et is ValueError:
            return True
        self.pool.release_gen(self.gen)
        return False


class DropoutMasks:
    def __init__(self, pool: GeneratorPool, device: str = "cpu", base_seed: int = 0) -> None:
        self.pool = pool
        self.device = device
        self.base = base_seed
        self._layer_gens: Dict[int, torch.Generator] = {}

    def for_layer(self, layer: int) -> torch.Generator:
        if layer not in self._layer_gens:
            self._layer_gens[layer] = self.pool.acquire_gen(self.device, self.base + layer)  # leak: reseed() replaces the mapping without releasing these
        return self._layer_gens[layer]

    def reset(self) -> None:
        for g in self._layer_gens.values():
            self.pool.release_gen(g)
        self._layer_gens.clear()

    def reseed(self, seed: int) -> None:
        self.base = seed
        self._layer_gens = {k: self.pool.acquire_gen(self.device, seed + k) for k in self._layer_gens}  # leak: the next reseed drops this mapping in turn

    def mask(self, shape: Tuple[int, ...], p: float, seed: int) -> torch.Tensor:
        with SeededGen(self.pool, self.device, seed) as g:  # clean: context manager
            return torch.rand(shape, generator=g) > p

    def mask_or_ones(self, shape: Tuple[int, ...], p: float, seed: int) -> torch.Tensor:
        g = self.pool.acquire_gen(self.device, seed)  # leak: p == 0 returns ones before the release
        if p == 0.0:
            return torch.ones(shape, dtype=torch.bool)
        m = torch.rand(shape, generator=g) > p
        self.pool.release_gen(g)
        return m

    def mask_or_ones_lazy(self, shape: Tuple[int, ...], p: float, seed: int) -> torch.Tensor:
        g = self.pool.acquire_gen(self.device, seed) if p > 0.0 else None  # clean: near miss, None exactly when p is zero
        if g is None:
            return torch.ones(shape, dtype=torch.bool)
        m = torch.rand(shape, generator=g) > p
        self.pool.release_gen(g)
        return m

    def permutations(self, n: int, seeds: List[int]) -> List[torch.Tensor]:
        gens = [self.pool.acquire_gen(self.device, s) for s in seeds]  # clean: near miss, popped from the end until the list is empty
        out: List[torch.Tensor] = []
        while gens:
            g = gens.pop()
            out.append(torch.randperm(n, generator=g))
            self.pool.release_gen(g)
        return out[::-1]

    def permutations_unique(self, n: int, seeds: List[int]) -> List[torch.Tensor]:
        gens = {s % n: self.pool.acquire_gen(self.device, s) for s in seeds}  # leak: colliding keys overwrite a generator in the mapping
        out = []
        for g in gens.values():
            out.append(torch.randperm(n, generator=g))
            self.pool.release_gen(g)
        return out


def jitter(pool: GeneratorPool, x: torch.Tensor, seed: int, rounds: int) -> torch.Tensor:
    g = pool.acquire_gen("cpu", seed)  # leak: replaced in the first round
    for r in range(rounds):
        x = x + torch.randn(x.shape, generator=g) * 0.01
        g = pool.acquire_gen("cpu", seed + r + 1)  # leak: every round but the last one loses it
    pool.release_gen(g)
    return x


def jitter_reseeded(pool: GeneratorPool, x: torch.Tensor, seed: int, rounds: int) -> torch.Tensor:
    g = pool.acquire_gen("cpu", seed)  # clean: near miss, reseeded in place in each round
    for r in range(rounds):
        x = x + torch.randn(x.shape, generator=g) * 0.01
        g = g.manual_seed(seed + r + 1)
    pool.release_gen(g)
    return x
