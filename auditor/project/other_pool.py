"""Whether a lease came from one pool and went to another: only where both are surely two."""

from collections.abc import Iterator

from auditor.flow.lifetime import Lifetime
from auditor.flow.spelling import spelt
from auditor.ir.ops import Call, Path
from auditor.project.modules import Function
from auditor.project.recognise import Recogniser
from auditor.protocols.vocabulary import split


def differ(recogniser: Recogniser, function: Function, acquire: Call, domain: Lifetime) -> Iterator[int]:
    """Nodes of releases that go to another pool than `acquire` asked."""
    source = acquire.receiver and spelt(function.graph, acquire.receiver)
    if not source or not _hands_out_itself(recogniser, function, acquire):
        return
    for node, release in sorted(domain.releases.items()):
        target = release.pool and spelt(function.graph, release.pool)
        if target and target != source and _two_of_a_kind(source, target):
            yield node


def _hands_out_itself(recogniser: Recogniser, function: Function, acquire: Call) -> bool:
    """A wrapper may get its leases from any pool."""
    targets = recogniser.calls.targets(function, acquire.at)[0]
    return not any(target in recogniser.wrappers for target in targets)


def _two_of_a_kind(one: Path, other: Path) -> bool:
    """`self.key_pool` and `self.value_pool`: the same owner, the same last word, different first ones.

    `pool` and `self.pool` may be one and the same, and so may `self.pool` and `other.pool`."""
    if one[:-1] != other[:-1] or one[-1][0] == "[" or other[-1][0] == "[":
        return False
    words, others = split(one[-1].lstrip(".@")), split(other[-1].lstrip(".@"))
    if len(words) < 2 or len(others) < 2:
        return False
    return words[-1] == others[-1] or words[:-1] == others[:-1]
