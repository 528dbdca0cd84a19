"""What a built module says of the sizes that it takes: input features, channels, vocabulary, images."""

from collections.abc import Iterator

import torch
from torch import nn

_USUAL = (64, 16)


def widths_of(module: nn.Module) -> tuple[str, ...]:
    """Tensors that its parts would take, the first part's first."""
    return tuple(dict.fromkeys(_hints(module)))[:8]


def _hints(module: nn.Module) -> Iterator[str]:
    sizes = getattr(module, "img_size", None) or getattr(module, "image_size", None)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield f"torch.randint(0, {part.num_embeddings}, (b, n), device=device)"
        elif isinstance(part, nn.Conv2d):
            side = sizes[0] if isinstance(sizes, tuple) else sizes if isinstance(sizes, int) else 16
            yield f"torch.randn(b, {part.in_channels}, {side}, {side}, device=device)"
        elif isinstance(part, nn.Conv1d):
            yield f"torch.randn(b, {part.in_channels}, n, device=device)"
        elif isinstance(part, nn.Linear) and part.in_features not in _USUAL:
            yield f"torch.randn(b, n, {part.in_features}, device=device)"
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 1 and parameter.shape[0] not in _USUAL:
            yield f"torch.randn(b, n, {parameter.shape[0]}, device=device)"
        elif (
            parameter.ndim >= 2 and isinstance(parameter, torch.Tensor) and parameter.shape[-1] not in _USUAL
        ):
            yield f"torch.randn(b, n, {parameter.shape[-1]}, device=device)"
