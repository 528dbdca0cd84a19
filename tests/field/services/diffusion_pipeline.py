"""Text-to-image pipeline. Latents and noise live in a small pool keyed by shape."""
from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from typing import Callable, Iterator, Optional

import torch

log = logging.getLogger("diffusion")

Shape = tuple[int, ...]


@dataclasses.dataclass
class SamplerConfig:
    steps: int = 20
    guidance: float = 7.5
    latent: Shape = (1, 4, 64, 64)
    reuse: bool = True


class LatentPool:
    def __init__(self, per_shape: int = 4) -> None:
        self.per_shape = per_shape
        self._idle: dict[Shape, list[torch.Tensor]] = defaultdict(list)
        self._live: dict[Shape, int] = defaultdict(int)

    def checkout_latent(self, shape: Shape) -> Optional[torch.Tensor]:
        idle = self._idle[shape]
        if idle:
            self._live[shape] += 1
            return idle.pop()  # clean: handed out
        if self._live[shape] >= self.per_shape:
            return None
        self._live[shape] += 1
        return torch.empty(shape)

    def checkin_latent(self, t: torch.Tensor) -> None:
        shape = tuple(t.shape)
        self._live[shape] -= 1
        self._idle[shape].append(t)


class Sampler:
    def __init__(self, unet: torch.nn.Module, pool: LatentPool, cfg: SamplerConfig) -> None:
        self.unet, self.pool, self.cfg = unet, pool, cfg
        self._noise: torch.Tensor | None = None

    def _latent(self) -> torch.Tensor:
        x = self.pool.checkout_latent(self.cfg.latent)  # clean: handed to the caller
        if x is None:
            raise RuntimeError("no latent left")
        return x.normal_()

    def sample(self) -> torch.Tensor:
        x = self._latent()  # clean: near miss, the steps are in place; checked in after the copy
        for i in range(self.cfg.steps):
            x -= self.unet(x) / self.cfg.steps
        out = x.clone()
        self.pool.checkin_latent(x)
        return out

    def sample_euler(self) -> torch.Tensor:
        x = self._latent()  # leak: the first step replaces x by a new tensor
        for i in range(self.cfg.steps):
            x = x - self.unet(x) / self.cfg.steps
        return x

    def sample_guided(self) -> torch.Tensor:
        cond = self._latent()  # clean: finally
        try:
            uncond = self._latent()  # clean: inner finally
            try:
                for _ in range(self.cfg.steps):
                    eps = self.unet(cond)
                    base = self.unet(uncond)
                    cond.sub_(base + self.cfg.guidance * (eps - base))
                    uncond.copy_(cond)
                return cond.clone()
            finally:
                self.pool.checkin_latent(uncond)
        finally:
            self.pool.checkin_latent(cond)

    def preview(self, every: int) -> Iterator[torch.Tensor]:
        x = self._latent()  # leak: divergence ends the generator before the check-in
        for i in range(self.cfg.steps):
            x.sub_(self.unet(x))
            if not torch.isfinite(x).all():
                log.error("diverged at %d", i)
                return
            if i % every == 0:
                yield x.clone()
        self.pool.checkin_latent(x)

    def set_noise(self) -> None:
        if self._noise is None:
            self._noise = self._latent()  # clean: near miss, only into the empty field, cleared by drop_noise()

    def drop_noise(self) -> None:
        if self._noise is not None:
            self.pool.checkin_latent(self._noise)
        self._noise = None

    def renoise(self) -> None:
        self.drop_noise()
        self._noise = self._latent()  # clean: field emptied first

    def reseed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._noise = self._latent()  # leak: a noise set before is overwritten

    def inpaint(self, mask: torch.Tensor, image: torch.Tensor) -> Optional[torch.Tensor]:
        x = self.pool.checkout_latent(self.cfg.latent)  # leak: kept when no second latent can be had
        keep = self.pool.checkout_latent(self.cfg.latent)  # clean: None, or checked in at the end
        if x is None or keep is None:
            if keep is not None:
                self.pool.checkin_latent(keep)
            return None
        keep.copy_(image)
        x.copy_(image).mul_(mask)
        out = x + keep * (1 - mask)
        self.pool.checkin_latent(x)
        self.pool.checkin_latent(keep)
        return out

    def img2img(self, image: torch.Tensor, strength: float) -> torch.Tensor:
        own = self.cfg.reuse and tuple(image.shape) == self.cfg.latent
        x = image if own else self._latent()  # clean: near miss, the flag that skips the check-in is the one that skipped the checkout
        if not own:
            x.copy_(image)
        for _ in range(int(self.cfg.steps * strength)):
            x.sub_(self.unet(x))
        out = x.clone()
        if not own:
            self.pool.checkin_latent(x)
        return out

    def interpolate(self, a: torch.Tensor, b: torch.Tensor, n: int) -> list[torch.Tensor]:
        frames = []
        for i in range(n):
            x = self._latent()  # leak: the first frame continues without the check-in
            torch.lerp(a, b, i / max(n - 1, 1), out=x)
            if i == 0:
                frames.append(x.flatten().tolist())
                continue
            frames.append(x.clone())
            self.pool.checkin_latent(x)
        return frames


def with_latent(pool: LatentPool, shape: Shape, fn: Callable[[torch.Tensor], float]) -> float | None:
    x = pool.checkout_latent(shape)  # clean: both outcomes of fn check it in
    if x is None:
        return None
    try:
        return fn(x)
    except ValueError:
        log.warning("fn refused")
        return None
    finally:
        pool.checkin_latent(x)
