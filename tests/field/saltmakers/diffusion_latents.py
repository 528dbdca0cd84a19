"""Text-to-image pipeline whose latents and embeddings are reused by shape between requests."""
from __future__ import annotations

from collections import defaultdict
from typing import Optional, Sequence

import torch
from torch import Tensor


class LatentCache:
    """Idle tensors by (shape, dtype). `borrow` hands one out, `restore` takes it back."""

    def __init__(self, device: torch.device | str = "cuda"):
        self.device = device
        self._idle: dict[tuple, list[Tensor]] = defaultdict(list)
        self._lent: dict[int, tuple] = {}

    def borrow(self, shape: Sequence[int], dtype: torch.dtype = torch.float16) -> Tensor:
        key = (tuple(shape), dtype)
        if self._idle[key]:
            t = self._idle[key].pop()  # clean: lent to the caller
        else:
            t = torch.empty(key[0], dtype=dtype, device=self.device)
        self._lent[t.data_ptr()] = key
        return t

    def restore(self, t: Tensor) -> None:
        key = self._lent.pop(t.data_ptr())
        self._idle[key].append(t)

    def trim(self) -> None:
        self._idle.clear()


class Pipeline:
    def __init__(self, text_encoder, unet, vae, scheduler, cache: LatentCache):
        self.text_encoder = text_encoder
        self.unet = unet
        self.vae = vae
        self.scheduler = scheduler
        self.cache = cache
        self.ip_embed: Optional[Tensor] = None

    # -- stages ------------------------------------------------------------

    def encode_prompt(self, tokens: Tensor) -> Tensor:
        emb = self.cache.borrow((tokens.shape[0], tokens.shape[1], 768))  # clean: returned
        self.text_encoder(tokens, out=emb)
        return emb

    def vae_encode(self, image: Tensor) -> Tensor:
        b, _, h, w = image.shape
        z = self.cache.borrow((b, 4, h // 8, w // 8))  # clean: returned
        self.vae.encode(image, out=z)
        z.mul_(self.vae.scale)
        return z

    def vae_decode(self, latents: Tensor) -> Tensor:
        b, _, h, w = latents.shape
        pixels = self.cache.borrow((b, 3, h * 8, w * 8))  # clean: returned
        self.vae.decode(latents, out=pixels)
        return pixels

    def _denoise(self, latents: Tensor, cond: Tensor, uncond: Optional[Tensor], cfg: float) -> Tensor:
        """Takes over `latents`; what is returned is the caller's."""
        for t in self.scheduler.timesteps:
            eps = self.unet(latents, t, cond)
            if uncond is not None:
                eps = torch.lerp(self.unet(latents, t, uncond), eps, cfg)
            nxt = self.cache.borrow(latents.shape)  # clean: near miss, swapped with latents and the older of the two restored
            self.scheduler.step(eps, t, latents, out=nxt)
            latents, nxt = nxt, latents
            self.cache.restore(nxt)
        return latents

    # -- entry points ------------------------------------------------------

    def generate(self, tokens: Tensor, negative: Tensor, size: tuple[int, int], cfg: float) -> Tensor:
        cond = self.encode_prompt(tokens)  # clean: restored below
        uncond = None
        if cfg > 1.0:
            uncond = self.encode_prompt(negative)  # clean: near miss, restored under the same cfg test
        latents = self.cache.borrow((tokens.shape[0], 4, *size))  # clean: _denoise takes it over
        latents.normal_()
        latents = self._denoise(latents, cond, uncond, cfg)  # clean: restored after decoding
        pixels = self.vae_decode(latents)  # clean: copied to the host and restored
        image = pixels.float().cpu()
        self.cache.restore(pixels)
        self.cache.restore(latents)
        self.cache.restore(cond)
        if cfg > 1.0:
            self.cache.restore(uncond)
        return image

    def img2img(self, tokens: Tensor, image: Tensor, strength: float) -> Tensor:
        cond = self.encode_prompt(tokens)  # clean: restored below
        latents = self.vae_encode(image)  # leak: rebound to a fresh tensor by the noising line
        noise = self.cache.borrow(latents.shape).normal_()  # clean: restored once it is mixed in
        latents = latents * (1.0 - strength) + noise * strength
        self.cache.restore(noise)
        for t in self.scheduler.tail(strength):
            latents = self.scheduler.step(self.unet(latents, t, cond), t, latents)
        self.cache.restore(cond)
        return self.vae.decode(latents)

    def preview(self, latents: Tensor) -> Tensor:
        small = torch.nn.functional.interpolate(latents, scale_factor=0.5)
        return self.vae_decode(small).clamp(-1, 1).cpu()  # leak: pooled pixels are copied to the host and dropped

    def decode_tiles(self, latents: Tensor, tile: int, canvas: Tensor) -> int:
        done = 0
        for y in range(0, latents.shape[2], tile):
            for x in range(0, latents.shape[3], tile):
                part = latents[:, :, y : y + tile, x : x + tile]
                pixels = self.vae_decode(part)  # leak: the continue for flat tiles skips the restore
                if float(pixels.std()) < 1e-4:
                    canvas[:, :, y * 8 : (y + tile) * 8, x * 8 : (x + tile) * 8] = 0
                    continue
                canvas[:, :, y * 8 : (y + tile) * 8, x * 8 : (x + tile) * 8] = pixels
                self.cache.restore(pixels)
                done += 1
        return done

    def upscale(self, image: Tensor, latents: Optional[Tensor] = None) -> Tensor:
        owned = latents is None
        if owned:
            latents = self.vae_encode(image)  # clean: near miss, restored under the owned flag
        try:
            hi = torch.nn.functional.interpolate(latents, scale_factor=2.0)
            return self.vae.decode(hi)
        finally:
            if owned:
                self.cache.restore(latents)

    def inpaint(self, image: Tensor, mask: Tensor, cond: Optional[Tensor], tokens: Tensor) -> Tensor:
        own_cond = False
        if cond is None:
            cond = self.encode_prompt(tokens)  # leak: own_cond is never set, so nobody restores it
        z = self.vae_encode(image)  # clean: restored below
        for t in self.scheduler.timesteps:
            step = self.scheduler.step(self.unet(z, t, cond), t, z)
            z.copy_(torch.where(mask, step, z))
        out = self.vae.decode(z)
        self.cache.restore(z)
        if own_cond:
            self.cache.restore(cond)
        return out

    # -- conditioning ------------------------------------------------------

    def set_ip_image(self, feats: Tensor) -> None:
        self.ip_embed = self.cache.borrow(feats.shape)  # leak: a second image overwrites the embedding of the first
        self.ip_embed.copy_(feats)

    def drop_ip_image(self) -> None:
        if self.ip_embed is not None:
            self.cache.restore(self.ip_embed)
            self.ip_embed = None
