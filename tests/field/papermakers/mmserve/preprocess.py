from __future__ import annotations

from typing import Callable, Iterable

import torch

from .frames import FramePool


def resize_into(pool: FramePool, src: torch.Tensor, h: int, w: int) -> torch.Tensor | None:
    """Pooled copy of src scaled to h x w; the caller puts it back."""
    dst = pool.get_frame(h, w)  # clean: returned to the caller, or None
    if dst is None:
        return None
    scaled = torch.nn.functional.interpolate(src[None].float(), (h, w), mode="bilinear")
    dst.copy_(scaled[0].round())
    return dst


def to_patches(pool: FramePool, src: torch.Tensor, size: int, patch: int) -> torch.Tensor | None:
    small = resize_into(pool, src, size, size)  # clean: put back after the unfold
    if small is None:
        return None
    patches = small.unfold(1, patch, patch).unfold(2, patch, patch).contiguous()
    pool.put_frame(small)
    return patches.view(3, -1, patch, patch).transpose(0, 1).clone()


def mean_color(pool: FramePool, src: torch.Tensor) -> list[float]:
    tiny = resize_into(pool, src, 8, 8).float()  # leak: float() copies the pooled frame, which is dropped
    return tiny.mean((1, 2)).tolist()


def sample_video(pool: FramePool, decode: Callable, count: int, h: int, w: int) -> list[torch.Tensor]:
    """Evenly spaced frames; the caller puts every one back."""
    picked: list[torch.Tensor] = []
    for i in range(count):
        frame = pool.get_frame(h, w)  # leak: a corrupt packet continues with the frame in hand
        if frame is None:
            break
        if not decode(i, frame):
            continue
        picked.append(frame)
    return picked


def sample_video_strict(pool: FramePool, decode: Callable, count: int, h: int, w: int) -> list[torch.Tensor]:
    picked: list[torch.Tensor] = []
    for i in range(count):
        frame = pool.get_frame(h, w)  # clean: near miss, joined to picked first, which is emptied on a corrupt packet
        if frame is None:
            break
        picked.append(frame)
        if not decode(i, frame):
            put_all(pool, picked)
            return []
    return picked


def put_all(pool: FramePool, frames: Iterable[torch.Tensor]) -> None:
    for f in frames:
        pool.put_frame(f)
