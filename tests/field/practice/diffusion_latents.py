"""Latent workspaces for a diffusion server.

`LatentPool.latent(...)` tensors belong to the pool; callers must call `done`.
"""
import logging
from functools import lru_cache
from typing import Any, Callable, Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int, int]


class LatentPool:
    def __init__(self, capacity: int = 16) -> None:
        self.capacity = capacity
        self.count = 0
        self.shelf: dict[Shape, list[torch.Tensor]] = {}

    def latent(self, shape: Shape) -> torch.Tensor:
        shelf = self.shelf.setdefault(tuple(shape), [])
        if shelf:
            return shelf.pop()
        if self.count >= self.capacity:
            raise RuntimeError("latent pool is empty")
        self.count += 1
        return torch.empty(shape)

    def done(self, t: torch.Tensor) -> None:
        self.shelf[tuple(t.shape)].append(t)


class Scheduler:
    def __init__(self, steps: int) -> None:
        self.alphas = torch.linspace(0.99, 0.01, steps)

    def add_noise(self, x: torch.Tensor, noise: torch.Tensor, t: int) -> torch.Tensor:
        a = self.alphas[t]
        return a.sqrt() * x + (1 - a).sqrt() * noise


class Pipeline:
    def __init__(self, unet: nn.Module, vae: nn.Module, pool: LatentPool, steps: int = 30) -> None:
        self.unet, self.vae, self.pool = unet, vae, pool
        self.sched = Scheduler(steps)
        self.steps = steps
        self.preview: Optional[torch.Tensor] = None
        self.control: dict[str, torch.Tensor] = {}

    def _noise(self, shape: Shape, seed: int) -> torch.Tensor:
        z = self.pool.latent(shape)  # clean: handed to the caller
        z.normal_(generator=torch.Generator().manual_seed(seed))
        return z

    def txt2img(self, cond: torch.Tensor, shape: Shape, seed: int) -> torch.Tensor:
        z = self._noise(shape, seed)  # clean: near miss, every update is in place and z goes back
        for t in range(self.steps):
            eps = self.unet(z, t, cond)
            z.sub_(eps, alpha=float(1 - self.sched.alphas[t]))
            z.mul_(1.001)
        img = self.vae.decode(z)
        self.pool.done(z)
        return img

    def txt2img_cfg(self, cond: torch.Tensor, shape: Shape, seed: int, scale: float) -> torch.Tensor:
        z = self._noise(shape, seed)  # leak: the first step rebinds z to a fresh tensor
        for t in range(self.steps):
            e0, e1 = self.unet(z, t, None), self.unet(z, t, cond)
            z = z - (e0 + scale * (e1 - e0)) * (1 - self.sched.alphas[t])
        return self.vae.decode(z)

    def img2img(self, img: torch.Tensor, cond: torch.Tensor, strength: float, seed: int) -> torch.Tensor:
        x = self.vae.encode(img)
        start = int(self.steps * (1 - strength))
        noise = self._noise(tuple(x.shape), seed)  # leak: nothing to denoise returns the input image
        if start >= self.steps:
            return img
        x = self.sched.add_noise(x, noise, start)
        self.pool.done(noise)
        for t in range(start, self.steps):
            x = x - self.unet(x, t, cond)
        return self.vae.decode(x)

    def inpaint(self, img: torch.Tensor, mask: torch.Tensor, cond: Any, seed: int) -> torch.Tensor:
        x = self.vae.encode(img)
        noise = self._noise(tuple(x.shape), seed)  # clean: near miss, `keep` is computed from it, the noise itself goes back
        keep = self.sched.add_noise(x, noise, 0)
        m = F.interpolate(mask, x.shape[-2:])
        if m.sum() == 0:
            self.pool.done(noise)
            return img
        out = torch.where(m > 0.5, self.unet(noise, 0, cond), keep)
        self.pool.done(noise)
        return self.vae.decode(out)

    def set_preview(self, shape: Shape) -> None:
        if self.preview is not None and self.preview.shape == torch.Size(shape):
            return
        self.preview = self.pool.latent(shape)  # leak: another shape replaces the preview without done

    def drop_preview(self) -> None:
        if self.preview is not None:
            self.pool.done(self.preview)
        self.preview = None

    def set_control(self, name: str, hint: torch.Tensor) -> None:
        self.clear_control(name)
        buf = self.pool.latent(tuple(hint.shape))  # clean: near miss, the old hint of this name went back before
        self.control[name] = buf.copy_(hint)

    def clear_control(self, name: Optional[str] = None) -> None:
        names = list(self.control) if name is None else [name]
        for n in names:
            if n in self.control:
                self.pool.done(self.control.pop(n))

    def interpolate(self, shape: Shape, s0: int, s1: int, n: int, cb: Callable[[torch.Tensor], bool]) -> int:
        a = self._noise(shape, s0)  # clean: done after the loop, which may break
        b = self._noise(shape, s1)  # leak: done only when the callback never stopped the loop
        for i in range(n):
            if not cb(self.vae.decode(torch.lerp(a, b, i / max(n - 1, 1)))):
                break
        else:
            self.pool.done(b)
        self.pool.done(a)
        return i

    def tiled(self, big: torch.Tensor, tile: int, cond: Any) -> torch.Tensor:
        out = torch.empty_like(big)
        for y in range(0, big.shape[2], tile):
            part = big[:, :, y: y + tile]
            z = self.pool.latent(tuple(part.shape))  # clean: near miss, flip makes a copy but z keeps its name
            z.copy_(part)
            flipped = z.flip(-1)
            out[:, :, y: y + tile] = self.unet(flipped, 0, cond).flip(-1)
            self.pool.done(z)
        return out

    def tiled_skip(self, big: torch.Tensor, tile: int, cond: Any) -> torch.Tensor:
        out = big.clone()
        for y in range(0, big.shape[2], tile):
            part = big[:, :, y: y + tile]
            z = self.pool.latent(tuple(part.shape)).copy_(part)  # leak: flat tiles are skipped after the copy
            if float(z.std()) < 1e-4:
                continue
            out[:, :, y: y + tile] = self.unet(z, 0, cond)
            self.pool.done(z)
        return out


@lru_cache(maxsize=4)
def default_pool(capacity: int) -> LatentPool:
    return LatentPool(capacity)


def noise_std(shape: Union[Shape, int], seed: int) -> float:
    if isinstance(shape, int):
        shape = (1, 4, shape, shape)
    z = default_pool(8).latent(shape)  # leak: std() alone survives
    return float(z.normal_(generator=torch.Generator().manual_seed(seed)).std())


def noise_mean(shape: Shape, seed: int) -> float:
    pool = default_pool(8)
    z = pool.latent(shape)  # clean: done before the return
    m = float(z.normal_(generator=torch.Generator().manual_seed(seed)).mean())
    pool.done(z)
    return m
