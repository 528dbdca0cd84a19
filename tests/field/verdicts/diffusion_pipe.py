"""Latent diffusion sampling loop with reusable latent canvases."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, List, Optional, Tuple

import torch


@dataclass
class PipelineConfig:
    height: int = 64
    width: int = 64
    channels: int = 4
    steps: int = 20
    guidance: float = 7.5
    tile_decode: bool = False


class CanvasBank:
    def __init__(self, shape: Tuple[int, ...], n: int, device: str = "cpu"):
        self.shape = shape
        self.device = device
        self._stack: List[torch.Tensor] = [torch.zeros(shape, device=device) for _ in range(n)]
        self.outstanding = 0

    def rent_canvas(self) -> torch.Tensor:
        self.outstanding += 1
        if self._stack:
            return self._stack.pop()
        return torch.zeros(self.shape, device=self.device)

    def release_canvas(self, canvas: torch.Tensor) -> None:
        self.outstanding -= 1
        self._stack.append(canvas)

    @contextmanager
    def canvas(self) -> Iterator[torch.Tensor]:
        c = self.rent_canvas()  # clean: released in finally around the yield
        try:
            yield c
        finally:
            self.release_canvas(c)


class DiffusionPipeline:
    def __init__(self, cfg: PipelineConfig, unet: Callable, vae: Callable, bank: CanvasBank):
        self.cfg = cfg
        self.unet = unet
        self.vae = vae
        self.bank = bank
        self._preview: Optional[torch.Tensor] = None
        self._mask: Optional[torch.Tensor] = None

    def sample(self, cond: torch.Tensor, on_step: Optional[Callable[[int], bool]] = None):
        latent = self.bank.rent_canvas()  # leak: a stop request from the callback returns None with the canvas out
        latent.normal_()
        for step in range(self.cfg.steps):
            if on_step is not None and not on_step(step):
                return None
            eps = self.unet(latent, step, cond)
            latent.sub_(eps, alpha=1.0 / self.cfg.steps)
        image = self.vae(latent)
        self.bank.release_canvas(latent)
        return image

    def sample_cfg(self, cond: torch.Tensor, uncond: Optional[torch.Tensor]):
        use_cfg = uncond is not None and self.cfg.guidance > 1.0
        latent = self.bank.rent_canvas()  # clean: near miss, released on the only exit
        guide = self.bank.rent_canvas() if use_cfg else None  # clean: near miss, the same flag guards the release
        latent.normal_()
        for step in range(self.cfg.steps):
            eps = self.unet(latent, step, cond)
            if use_cfg:
                guide.copy_(self.unet(latent, step, uncond))
                eps = guide + self.cfg.guidance * (eps - guide)
            latent.sub_(eps)
        if use_cfg:
            self.bank.release_canvas(guide)
        out = self.vae(latent)
        self.bank.release_canvas(latent)
        return out

    def img2img(self, init: torch.Tensor, strength: float, cond: torch.Tensor):
        noise = self.bank.rent_canvas()  # leak: strength out of range raises after both canvases were rented
        work = self.bank.rent_canvas()  # leak: strength out of range raises after both canvases were rented
        if not 0.0 <= strength <= 1.0:
            raise ValueError("strength must lie in [0, 1]")
        noise.normal_()
        torch.lerp(init, noise, strength, out=work)
        for step in range(int(self.cfg.steps * strength)):
            work.sub_(self.unet(work, step, cond))
        result = self.vae(work)
        self.bank.release_canvas(noise)
        self.bank.release_canvas(work)
        return result

    def inpaint(self, init: torch.Tensor, mask: torch.Tensor, cond: torch.Tensor):
        with self.bank.canvas() as work, self.bank.canvas() as known:  # clean: both leave through the with statement
            known.copy_(init * mask)
            work.normal_()
            for step in range(self.cfg.steps):
                work.sub_(self.unet(work, step, cond))
                work.mul_(1 - mask).add_(known)
                if not torch.isfinite(work).all():
                    return None
            return self.vae(work)

    def set_preview(self, frame: torch.Tensor) -> None:
        self._preview = self.bank.rent_canvas()  # leak: a second frame overwrites the canvas still held
        self._preview.copy_(frame)

    def set_mask(self, mask: torch.Tensor) -> None:
        if self._mask is None:
            self._mask = self.bank.rent_canvas()  # clean: near miss, rented only once and released by close
        self._mask.copy_(mask)

    def close(self) -> None:
        if self._preview is not None:
            self.bank.release_canvas(self._preview)
            self._preview = None
        if self._mask is not None:
            self.bank.release_canvas(self._mask)
            self._mask = None

    def decode_tiles(self, latents: List[torch.Tensor]) -> List[torch.Tensor]:
        tiles = []
        for lat in latents:
            staged = self.bank.rent_canvas()  # clean: near miss, released on the skip path as well
            staged.copy_(lat)
            if not staged.any():
                self.bank.release_canvas(staged)
                continue
            tiles.append(self.vae(staged))
            self.bank.release_canvas(staged)
        return tiles
