"""Vision and audio encoders that write feature rows."""
from __future__ import annotations

from typing import List, Optional

import torch

from .features import FeatureRows


class EncoderOutput:
    """Rows of one item; the holder calls dispose()."""

    def __init__(self, rows_of: FeatureRows, rows: List[int]):
        self._rows_of = rows_of
        self.rows = rows

    def dispose(self) -> None:
        if self.rows:
            self._rows_of.unassign(self.rows)
            self.rows = []


class VisionEncoder:
    def __init__(self, rows_of: FeatureRows, patch: int):
        self.rows_of = rows_of
        self.patch = patch

    def encode(self, pixels: torch.Tensor) -> Optional[EncoderOutput]:
        n = max(1, pixels.shape[0] // self.patch)
        rows = self.rows_of.assign(n)  # clean: the returned output owns the rows
        if rows is None:
            return None
        for i, r in enumerate(rows):
            self.rows_of.table[r].fill_(float(pixels[i * self.patch]))
        return EncoderOutput(self.rows_of, rows)

    def encode_cropped(self, pixels: torch.Tensor, crop: int) -> Optional[EncoderOutput]:
        n = max(1, pixels.shape[0] // self.patch)
        rows = self.rows_of.assign(n)  # leak: the rows beyond crop are sliced off and belong to nobody
        if rows is None:
            return None
        kept = rows[:crop]
        for i, r in enumerate(kept):
            self.rows_of.table[r].fill_(float(pixels[i * self.patch]))
        return EncoderOutput(self.rows_of, kept)

    def encode_trimmed(self, pixels: torch.Tensor, limit: int) -> Optional[EncoderOutput]:
        n = max(1, pixels.shape[0] // self.patch)
        rows = self.rows_of.assign(n)  # clean: near miss, the rows cut off are unassigned, the rest is in the output
        if rows is None:
            return None
        self.rows_of.unassign(rows[limit:])
        return EncoderOutput(self.rows_of, rows[:limit])

    def pooled(self, pixels: torch.Tensor) -> Optional[torch.Tensor]:
        """Mean feature as a plain tensor."""
        out = self.encode(pixels)  # leak: the mean is returned and the output not disposed
        if out is None:
            return None
        return self.rows_of.table[out.rows].mean(0)

    def max_pooled(self, pixels: torch.Tensor) -> Optional[torch.Tensor]:
        out = self.encode(pixels)  # clean: disposed after the indexing has copied the rows
        if out is None:
            return None
        feats = self.rows_of.table[out.rows]
        out.dispose()
        return feats.max(0).values
