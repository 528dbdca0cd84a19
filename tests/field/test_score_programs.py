"""What is found in the labelled programs stays found, and what is wrongly said does not grow."""

import pytest

from tests.field.score_programs import judged, programs

KEPT = {
    "strangers": (435, 141, set[str]()),
    "serving": (472, 162, set[str]()),
    "training": (446, 143, {"moe_dispatch.py:97", "param_prefetch.py:134"}),
    "services": (437, 113, {"kv_connector/connector.py:83", "rdma_transport.py:171"}),
}
"""Of each set the labels, the leaks found at least, and the clean sites that are reported all the same."""

UNLABELLED = {"ssm_state_cache.py:183"}
"""Right as well: an object whose `__enter__`, a line below, is what is labelled."""


@pytest.mark.parametrize("of", KEPT)
def test_the_score_of_the_programs_is_kept(of: str) -> None:
    sites, found_at_least, wrongly_said = KEPT[of]
    labels = []
    for program in programs(of):
        its, elsewhere = judged(program)
        assert set(elsewhere) <= UNLABELLED, f"reported where nothing is labelled: {elsewhere}"
        labels += its
    assert len(labels) == sites
    assert sum(each.leaks and bool(each.codes) for each in labels) >= found_at_least
    assert {f"{each.path}:{each.line}" for each in labels if each.codes and not each.leaks} <= wrongly_said
