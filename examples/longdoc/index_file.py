"""Embeddings on disk: a file of vectors, a line of text for each."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longdoc.memory_pool import TensorMemoryPool


def save(vectors: Tensor, titles: list[str], folder: Path) -> None:
    """Write both files; the vectors first, so that a title never stands without its vector."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vectors, folder / "vectors.pt")
    with (folder / "titles.txt").open("w", encoding="utf-8") as file:
        file.writelines(f"{title}\n" for title in titles)


def load(folder: Path) -> tuple[Tensor, list[str]]:
    titles = (folder / "titles.txt").read_text(encoding="utf-8").splitlines()
    return torch.load(folder / "vectors.pt", weights_only=True), titles
