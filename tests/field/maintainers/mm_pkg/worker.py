"""Per-request handling of encoder outputs."""
from __future__ import annotations

from typing import Dict, List, Optional

import torch

from .encoder import EncoderOutput, VisionEncoder
from .features import FeatureRows


class MMWorker:
    def __init__(self, rows_of: FeatureRows, encoder: VisionEncoder):
        self.rows_of = rows_of
        self.encoder = encoder
        self.outputs: Dict[str, List[EncoderOutput]] = {}
        self.thumb: Dict[str, EncoderOutput] = {}

    def process(self, rid: str, images: List[torch.Tensor]) -> bool:
        """All images of a request, or none."""
        outs: List[EncoderOutput] = []
        for img in images:
            out = self.encoder.encode(img)  # clean: near miss, a failure disposes of the earlier ones; free disposes of the rest
            if out is None:
                for o in outs:
                    o.dispose()
                return False
            outs.append(out)
        self.outputs.setdefault(rid, []).extend(outs)
        return True

    def process_video(self, rid: str, frames: List[torch.Tensor], max_frames: int) -> int:
        bucket = self.outputs.setdefault(rid, [])
        used = 0
        for frame in frames:
            out = self.encoder.encode_trimmed(frame, 4)  # leak: the break at max_frames drops the output just made
            if out is None or used == max_frames:
                break
            bucket.append(out)
            used += 1
        return used

    def refresh_thumbnail(self, rid: str, img: torch.Tensor) -> bool:
        out = self.encoder.encode(img)  # leak: replaces the thumbnail in the dict without disposing of it
        if out is None:
            return False
        self.thumb[rid] = out
        return True

    def preview(self, img: torch.Tensor) -> Optional[float]:
        span = self.rows_of.assign_contiguous(2)  # clean: near miss, unassigned in the finally, also by the early return
        if span is None:
            return None
        try:
            if img.numel() == 0:
                return None
            self.rows_of.table[span.start].fill_(float(img.flatten()[0]))
            return float(self.rows_of.table[span.start].sum())
        finally:
            self.rows_of.unassign(span)

    def mark(self, value: float) -> bool:
        row = self.rows_of.assign_even()  # clean: near miss, row 0 is not mistaken for None, and it is unassigned
        if row is None:
            return False
        self.rows_of.table[row].fill_(value)
        self.rows_of.unassign([row])
        return True

    def free(self, rid: str) -> None:
        for out in self.outputs.pop(rid, []):
            out.dispose()
        out = self.thumb.pop(rid, None)
        if out is not None:
            out.dispose()
