# poolaudit leaktests, sha256 094bdf862054cb91: written again as long as that is the digest of the rest
"""The equivalence pass: the pool changes nothing. Outputs and gradients are the same to the bit with it and
without, on fresh blocks, on blocks that hold what others left in them, and on blocks full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import Mismatch
from .pools import counter_watched, pair_of, pools_of
from .randomness import set_seed
from .scenarios import SHAPES, Feed, Target, loss_of, tensors_in, with_gradients

Build = Callable[[bool], Target]
Results = dict[str, torch.Tensor]
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, memory that operations hand out uncleared is full of NaN (of large numbers for
    integers).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in watch.Watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            _poison(result)
        return result


def assert_equivalent(
    build: Build, feed: Feed, *, turns: int = SHAPES, seed: int = 0, gradients: bool = True
) -> int:
    """Compare `build(True)`, with its pool, to `build(False)`, without; returns how many tensors were
    compared.

    Both get the same parameters, the same inputs and the same random numbers. Raises `Mismatch` naming the
    tensor, the values and the kind of blocks. `gradients=False` is for code that
    takes none. If `build` fails to give the pooled one a pool to find, only
    torch's own memory is poisoned.
    """
    if not gradients:
        with torch.no_grad():
            return _compared(build, feed, turns, seed)
    return _compared(build, feed, turns, seed)


def _compared(build: Build, feed: Feed, turns: int, seed: int) -> int:
    plain, pooled = _built(build, False, seed), _built(build, True, seed)
    if isinstance(plain, torch.nn.Module) and isinstance(pooled, torch.nn.Module):
        pooled.load_state_dict(plain.state_dict())
    pools = pools_of(pooled)
    compared = 0
    for turn in range(turns):
        lent: list[tuple[Any, Any]] = []

        def called(act: str, pool: Any, what: tuple[Any, ...], lent: list[tuple[Any, Any]] = lent) -> None:
            if act == "ask":
                lent.append((pool, what))

        state = _state(plain)
        expected = _run(plain, feed, turn, seed)
        with counter_watched(pools, called):
            for blocks in ("fresh", "reused", "poisoned"):
                if blocks == "poisoned":
                    _poison_idle(lent)
                with _memory(blocks):
                    _set_state(pooled, state)
                    compared += _compare(expected, _run(pooled, feed, turn, seed), turn, blocks)
    return compared


def _memory(blocks: str) -> AbstractContextManager[object]:
    if blocks != "poisoned":
        return nullcontext()
    return PoisonedMemory()  # type: ignore[no-untyped-call]


def _built(build: Build, pool: bool, seed: int) -> Target:
    set_seed(seed)
    return build(pool)


def _state(target: Target) -> dict[str, Any]:
    """What a run may change: running statistics, counters."""
    if not isinstance(target, torch.nn.Module):
        return {}
    return {name: value.clone() for name, value in target.named_buffers()}


def _set_state(target: Target, state: dict[str, Any]) -> None:
    if isinstance(target, torch.nn.Module):
        for name, value in target.named_buffers():
            value.copy_(state[name])


def _run(target: Target, feed: Feed, turn: int, seed: int) -> Results:
    set_seed(seed + turn)
    args, kwargs = with_gradients(feed(turn)) if torch.is_grad_enabled() else feed(turn)
    parameters = dict(target.named_parameters()) if isinstance(target, torch.nn.Module) else {}
    for parameter in parameters.values():
        parameter.grad = None
    set_seed(seed + turn)
    outputs = target(*args, **kwargs)
    results = {f"output {number}": out.detach().clone() for number, out in enumerate(tensors_in(outputs))}
    loss = loss_of(outputs)
    if loss is not None:
        loss.backward()  # type: ignore[no-untyped-call]
    leaves = {f"input {number}": leaf for number, leaf in enumerate(tensors_in((args, kwargs)))} | parameters
    gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return results | gradients


def _poison_idle(lent: list[tuple[Any, Any]]) -> None:
    """Borrow everything once more that was borrowed, fill it with NaN, and give it back."""
    borrowed = [(pool, getattr(pool, name)(*args, **kwargs)) for pool, (name, args, kwargs) in list(lent)]
    for _, block in borrowed:
        for tensor in tensors_in(block):
            _poison(tensor)
    for pool, block in borrowed:
        pair = pair_of(pool)
        if pair is not None:
            getattr(pool, pair[1])(block)


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _compare(expected: Results, found: Results, turn: int, blocks: str) -> int:
    if expected.keys() != found.keys():
        raise Mismatch(
            f"turn {turn}, {blocks} blocks: with the pool there are {', '.join(found) or 'no tensors'}, "
            f"without {', '.join(expected) or 'none'}"
        )
    for name, right in expected.items():
        if not _same_bits(right, found[name]):
            raise Mismatch(f"turn {turn}, {blocks} blocks: {name} {_difference(right, found[name])}")
    return len(expected)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other) if tensor.numel()]
    return not bits or torch.equal(*bits)


def _difference(right: torch.Tensor, found: torch.Tensor) -> str:
    if right.shape != found.shape or right.dtype != found.dtype:
        return (
            f"is {found.dtype} {tuple(found.shape)} with the pool, {right.dtype} {tuple(right.shape)} without"
        )
    places = (right != found).nonzero()
    if not len(places):
        return "differs in the sign of a zero or the bits of a NaN"
    first = tuple(places[0].tolist())
    return (
        f"differs in {len(places)} of {right.numel()} values, first at {list(first)}: "
        f"{found[first].item()} with the pool, {right[first].item()} without"
    )
