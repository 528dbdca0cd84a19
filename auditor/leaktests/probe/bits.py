"""Whether two tensors are the same to the last bit, and where they are not."""

import torch


def difference(before: torch.Tensor, after: torch.Tensor) -> str:
    """In words; empty where shape, dtype and every bit are the same."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"is {before.dtype} {tuple(before.shape)} before, {after.dtype} {tuple(after.shape)} after"
    if not before.numel() or torch.equal(_bits(before), _bits(after)):
        return ""
    before, after = _plain(before), _plain(after)
    same = (before == after) | ((before != before) & (after != after))  # two NaN are one value to a reader
    places = (~same).nonzero()
    if not len(places):
        return "differs in the sign of a zero or the bits of a NaN"
    first = tuple(places[0].tolist())
    return (
        f"differs in {len(places)} of {before.numel()} values, first at {list(first)}: "
        f"{before[first].item()!r} before, {after[first].item()!r} after"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor).contiguous().flatten().view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.resolve_conj().resolve_neg()
