# poolaudit leaktests, sha256 a62e83ff6e567f2a: written again as long as that is the digest of the rest
"""Who still refers to a storage: a chain from the memory outwards, in words.

Python objects are asked through the collector. Where only C++ holds the memory, the graphs of autograd that
living tensors hold are walked for a node that saved it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from .storages import storage_of

LONGEST_CHAIN = 12
WIDEST_SEARCH = 2_000
MOST_NODES = 100_000


def holders(storage: torch.UntypedStorage) -> tuple[str, ...]:
    """The shortest chain of holders found from the storage to something that lives by itself."""
    chain = _chain(_tensors_over(storage))
    if len(chain) > 1:
        return tuple(_words(chain))
    found = _saved_by(storage)
    if found is not None:
        tensor, node = found
        return (
            f"autograd's node {node}, which saved it, in the graph of a tensor",
            *_words(_chain([tensor])),
        )
    return tuple(_words(_chain([storage])))


def holders_of(found: object) -> tuple[str, ...]:
    """The same for any object that the collector knows."""
    gc.unfreeze()
    return tuple(_words(_chain([found])))


def cycle_of(storage: torch.UntypedStorage, garbage: list[object]) -> tuple[str, ...]:
    """The way from the storage round a cycle of unreachable objects."""
    members = {id(member) for member in garbage}
    start: list[object] = [m for m in garbage if isinstance(m, torch.Tensor) and _shares(m, storage)]
    start = start or [member for member in garbage if _saves(member, storage)]
    if not start:
        return ()
    chain: list[object] = [start[0]]
    seen = {id(chain[0])}
    while len(chain) < LONGEST_CHAIN:
        around = [r for r in gc.get_referrers(chain[-1]) if id(r) in members]
        following = next((r for r in around if id(r) not in seen), None)
        if following is None:
            break
        seen.add(id(following))
        chain.append(following)
    return tuple(_words(chain))


def _living_tensors() -> Iterator[torch.Tensor]:
    return (found for found in gc.get_objects() if issubclass(type(found), torch.Tensor))


def _tensors_over(storage: torch.UntypedStorage) -> list[Any]:
    tensors = []
    for found in _living_tensors():  # no comprehension: its closure would be a holder of the storage
        if _shares(found, storage):
            tensors.append(found)
    return tensors


def _shares(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    own = storage_of(tensor)
    return own is not None and own._cdata == storage._cdata


def _chain(start: list[Any]) -> list[object]:
    """Breadth first over referrers until a root; the path from the first held object to that root."""
    if not start:
        return []
    came_from: dict[int, Any] = {id(found): None for found in start}
    level = start[:WIDEST_SEARCH]
    kept: list[list[Any]] = [start]  # ids stay theirs, and our own lists are no holders
    for _ in range(LONGEST_CHAIN):
        kept.append(level)
        own = {id(kept), id(came_from), *map(id, kept)} | _own_frames()
        held_by_id = {id(held): held for held in level}
        own.add(id(held_by_id))
        following = [r for r in gc.get_referrers(*level) if id(r) not in own and id(r) not in came_from]
        for referrer in following:
            came_from[id(referrer)] = next(
                held_by_id[id(held)] for held in gc.get_referents(referrer) if id(held) in held_by_id
            )
        root = next(filter(_is_root, following), None)
        if root is not None or not following:
            return _back(level[0] if root is None else root, came_from)
        level = following[:WIDEST_SEARCH]
        del following  # in the next turn it would be a holder
    return _back(level[0], came_from)


def _back(last: object, came_from: dict[int, Any]) -> list[object]:
    path = [last]
    while (before := came_from.get(id(path[-1]))) is not None:
        path.append(before)
    return path[::-1]


def _own_frames() -> set[int]:
    found, frame = set(), sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__package__") == __package__:
            found.add(id(frame))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_root(found: object) -> bool:
    if isinstance(found, (ModuleType, FrameType)):
        return True
    return isinstance(found, dict) and _module_of(found) is not None


def _module_of(names: dict[Any, Any]) -> str | None:
    name = names.get("__name__")
    if isinstance(name, str) and getattr(sys.modules.get(name), "__dict__", None) is names:
        return name
    return None


def _words(chain: list[object]) -> Iterator[str]:
    """Each holder by its kind, and under which name or number it holds the one before it."""
    position = 1
    while position < len(chain):
        held, holder = chain[position - 1], chain[position]
        owner = chain[position + 1] if position + 1 < len(chain) else None
        if isinstance(holder, dict) and getattr(owner, "__dict__", None) is holder:
            yield f"attribute `{_key(holder, held)}` of a {_kind(owner)}"
            position += 2
            continue
        yield _holding(holder, held)
        position += 1


def _holding(holder: object, held: object) -> str:
    if isinstance(holder, dict):
        module = _module_of(holder)
        name = _key(holder, held)
        return f"global `{name}` of module {module}" if module else f"a dict of {len(holder)}, under {name}"
    if isinstance(holder, (list, tuple)):
        place = next((number for number, item in enumerate(holder) if item is held), "?")
        return f"item {place} of a {_kind(holder)} of {len(holder)}"
    if isinstance(holder, FrameType):
        names = [name for name, value in holder.f_locals.items() if value is held]
        return f"local `{', '.join(names) or '?'}` of {holder.f_code.co_qualname}, line {holder.f_lineno}"
    if isinstance(holder, FunctionType):
        return f"the closure or defaults of function {holder.__qualname__}"
    if isinstance(holder, (MethodType, BuiltinFunctionType)):
        return f"the bound method {getattr(holder, '__qualname__', holder)}"
    if isinstance(holder, BaseException):
        return f"the exception {type(holder).__name__}"
    names = [name for name, value in _slots(holder) if value is held]
    return f"attribute `{names[0]}` of a {_kind(holder)}" if names else f"a {_kind(holder)}"


def _slots(holder: object) -> Iterator[tuple[str, object]]:
    own = getattr(holder, "__dict__", None)
    if isinstance(own, dict):
        yield from own.items()
    for base in type(holder).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield name, getattr(holder, name, None)


def _key(holder: Any, held: object) -> str:
    for key, value in holder.items():
        if value is held:
            return key if isinstance(key, str) else _short(key)
    return f"the key {type(held).__name__}"


def _short(key: object) -> str:
    words = repr(key) if isinstance(key, (int, float, tuple, frozenset, bytes)) else f"a {_kind(key)} as key"
    return words if len(words) <= 60 else f"{words[:57]}..."


def _kind(found: object) -> str:
    kind = type(found)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _saved_by(storage: torch.UntypedStorage) -> tuple[torch.Tensor, str] | None:
    """A living tensor whose graph saved the storage, and the name of the node."""
    seen: set[int] = set()
    keep: list[Any] = []  # nodes' Python objects are made anew when asked for; ids must stay theirs
    for tensor in list(_living_tensors()):
        if tensor.grad_fn is None:
            continue
        waiting = [tensor.grad_fn]
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            keep.append(node)
            if _saves(node, storage):
                return tensor, node.name()
            waiting += [following for following, _ in node.next_functions if following is not None]
    return None


def _saves(node: Any, storage: torch.UntypedStorage) -> bool:
    if not hasattr(node, "next_functions"):
        return False
    for name in dir(node):
        if name == "saved_tensors" or (name.startswith("_saved_") and not name.startswith("_saved_raw")):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed by a backward pass that went through here
                continue
            for value in saved if isinstance(saved, (tuple, list)) else (saved,):
                if isinstance(value, torch.Tensor) and _shares(value, storage):
                    return True
    return False
