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
from auditor.source.lifetime.uninitialised import memory_unwritten
from auditor.source.lifetime.uninitialised_bytes import may_read_unwritten
from auditor.source.searched import Searched

Reader = Callable[[Code], Iterator[Sighting]]

# A decorator that keeps results, and the head of the function below it.
_CACHED = (
    rb"@[\w.]*cache(?!d_property)\w*%s[^\n]*\n"
    rb"(?:(?![ \t]*(?:async def|def|class)\b)[^\n]*\n){0,8}[ \t]*(?:async[ \t]+)?def[ \t]+\w+\("
)
_HELD = rb"(?:\s*self\b|(?:(?!\)\s*(?:->|:))[\s\S])*?\b(?:Module|Tensor|Parameter|PreTrainedModel)\b)"
_CACHES = re.compile(rb"@[\w.]*cache")
_RECURRENT = frozenset((b"LSTM", b"GRU", b"RNN", b"LSTMCell", b"GRUCell", b"RNNCell"))
_PATTERNS: dict[bytes, tuple[bytes | frozenset[bytes], re.Pattern[bytes]]] = {
    b"@cache(held)": (b"cache", re.compile(_CACHED % b"" + _HELD)),
    b"@cache(size)": (b"cache", re.compile(_CACHED % rb"(?<=[@.]cache)(?!\()" + rb"\s*[^)\s]")),
    b"@cache(None)": (b"cache", re.compile(_CACHED % rb"\(\s*(?:maxsize\s*=\s*)?None" + rb"\s*[^)\s]")),
    b"nn.RNN()": (_RECURRENT, re.compile(rb"nn\.(?:LSTM|GRU|RNN)(?:Cell)?\(")),
    b"lru_cache()()": (b"lru_cache(", re.compile(rb"lru_cache\([^\n]*\)\(")),
    b"cache[]": (b"ache", re.compile(rb"ache\w*\[[^\n:]*\] = ")),  # literals first: that is fast
    b"CACHE[]": (b"CACHE", re.compile(rb"CACHE\w*\[[^\n:]*\] = ")),
}
"""What is not looked for as it stands: what is quickly looked for first, or the words of which one must be
there, and the pattern."""
_OUT_OF_MEMORY = (b"OutOfMemoryError", b"out of memory", b"is_oom", b"should_reduce_")

# For each reader what the bytes of a file that says torch must hold for it to find anything: one of these.
_READERS: tuple[tuple[tuple[bytes, ...], Reader], ...] = (
    ((b".backward(", b".eval()"), graphs_kept),
    ((b".backward(", b"nn.RNN()"), states_carried),
    ((b"_hook(",), hooks_dropped),
    ((b"@cache(held)", b"lru_cache()()"), objects_cached),
    ((b".backward(", *_OUT_OF_MEMORY), exceptions_held),
    ((b"def backward(",), tensors_on_context),
    ((b"_graph=True",), graphs_retained),
    ((b"cache[]", b"CACHE[]", b"@cache(size)", b"@cache(None)"), shapes_cached),
    ((b"_hook(",), hooks_closed),
    ((b"_record_memory_history", b"profile("), recordings),
    ((b"empty_cache(",), caches_emptied),
    ((b".eval()",), gradients_on),
    ((), memory_unwritten),  # judged by more than words
)
_UNWRITTEN = len(_READERS) - 1
_WORDS = tuple(dict.fromkeys(word for words, _ in _READERS for word in words))
_TEST = re.compile(r"(?:^|/)(?:tests?|testing)/|(?:^|/)(?:test_[^/]*|conftest|[^/]*_test)\.py$")


def suspects(path: str, file: Searched) -> tuple[int, ...]:
    """The readers that may find something, by number; tests are not read, for they end."""
    if _TEST.search(path):
        return ()
    unwritten = (_UNWRITTEN,) if may_read_unwritten(file) else ()
    if not file.has(b"torch"):
        return unwritten
    caches = file.has(b"cache") and _CACHES.search(file.data) is not None  # few files have such a decorator
    there = {word for word in _WORDS if (caches or word[:1] != b"@") and _is_there(word, file)}
    found = tuple(number for number, (words, _) in enumerate(_READERS) if not there.isdisjoint(words))
    return found + unwritten


def _is_there(word: bytes, file: Searched) -> bool:
    if word not in _PATTERNS:
        return file.has(word)
    first, pattern = _PATTERNS[word]
    perhaps = file.has(first) if isinstance(first, bytes) else file.may_say(first)
    return perhaps and pattern.search(file.data) is not None


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
