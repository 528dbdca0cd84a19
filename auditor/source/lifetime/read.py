"""Which files may hold something that outlives its use, decided from bytes, and what is found in them."""

import re
from collections.abc import Callable, Iterator

from auditor.source.entries import Source
from auditor.source.lifetime.accumulation import graphs_kept
from auditor.source.lifetime.code import Code
from auditor.source.lifetime.contexts import tensors_on_context
from auditor.source.lifetime.handlers import exceptions_held
from auditor.source.lifetime.hooks import hooks_closed, hooks_dropped
from auditor.source.lifetime.module_caches import objects_cached
from auditor.source.lifetime.recording import recordings
from auditor.source.lifetime.recurrence import states_carried
from auditor.source.lifetime.retained import graphs_retained
from auditor.source.lifetime.shape_caches import shapes_cached
from auditor.source.lifetime.sighting import Kind, Sighting
from auditor.source.lifetime.steps import caches_emptied, gradients_on

Reader = Callable[[Code], Iterator[Sighting]]

_CACHED = re.compile(rb"@[\w.]*cache\b")
_WRAPPED = re.compile(rb"lru_cache\([^\n]*\)\(")
_TABLES = tuple(
    re.compile(word + rb"\w*\[[^\n:]*\] = ") for word in (rb"ache", rb"CACHE")
)  # literals first: fast
_CELLS = tuple(b"nn." + kind + end for kind in (b"LSTM", b"GRU", b"RNN") for end in (b"(", b"Cell("))

# For each reader what the bytes of a file that says torch must hold for it to find anything.
_READERS: tuple[tuple[Callable[[bytes], object], Reader], ...] = (
    (lambda data: b".backward(" in data or _evaluates(data), graphs_kept),
    (lambda data: b".backward(" in data or any(cell in data for cell in _CELLS), states_carried),
    (lambda data: b"_hook(" in data, hooks_dropped),
    (lambda data: _CACHED.search(data) or _WRAPPED.search(data), objects_cached),
    (lambda data: b"except" in data and (b".backward(" in data or _runs_out(data)), exceptions_held),
    (lambda data: b"def backward(" in data and b"Function" in data, tensors_on_context),
    (lambda data: b"_graph=True" in data, graphs_retained),
    (lambda data: any(table.search(data) for table in _TABLES) or _CACHED.search(data), shapes_cached),
    (lambda data: b"_hook(" in data, hooks_closed),
    (lambda data: b"_record_memory_history" in data or b"profile(" in data, recordings),
    (lambda data: b"empty_cache(" in data, caches_emptied),
    (lambda data: _evaluates(data), gradients_on),
)
_TEST = re.compile(r"(?:^|/)(?:tests?|testing)/|(?:^|/)(?:test_[^/]*|conftest|[^/]*_test)\.py$")


def _evaluates(data: bytes) -> bool:
    return b".eval()" in data


def _runs_out(data: bytes) -> bool:
    return (
        b"OutOfMemoryError" in data
        or b"out of memory" in data
        or b"is_oom" in data
        or b"should_reduce_" in data
    )


def suspects(path: str, data: bytes) -> tuple[int, ...]:
    """The readers that may find something, by number; tests are not read, for they end."""
    if b"torch" not in data or _TEST.search(path):
        return ()
    return tuple(number for number, (may_hold, _) in enumerate(_READERS) if may_hold(data))


def sightings(source: Source, readers: tuple[int, ...]) -> tuple[Sighting, ...]:
    """What these readers find in a file, in the order of its text."""
    if not readers:
        return ()
    code = Code(source)
    found = {each for number in readers for each in _READERS[number][1](code)}
    return tuple(sorted(_told_once(found), key=lambda each: (each.span, each.kind)))


def _told_once(found: set[Sighting]) -> set[Sighting]:
    """One cause, one sighting: a sum that keeps graphs says more than the missing `no_grad` that lets it."""
    kept = {each.symbol for each in found if each.kind is Kind.GRAPH_KEPT and each.how == "in evaluation"}
    carried = {(each.symbol) for each in found if each.kind is Kind.STATE_CARRIED}
    return {
        each
        for each in found
        if not (each.kind is Kind.GRADIENTS_ON and each.symbol in kept)
        and not (each.kind is Kind.GRAPH_RETAINED and each.how == "for nobody" and each.symbol in carried)
    }
