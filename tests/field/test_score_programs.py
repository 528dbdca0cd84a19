"""What is found in the labelled programs stays found, and what is wrongly said does not grow."""

import pytest

from tests.field.score_programs import judged, programs

KEPT = {
    "strangers": (435, 144, set[str]()),
    "serving": (472, 164, set[str]()),
    "training": (446, 152, {"param_prefetch.py:134"}),
    "services": (437, 127, {"rdma_transport.py:171"}),
    "attention": (454, 153, set[str]()),
    "companies": (
        565,
        179,
        {
            "grad_buckets.py:125",
            "prefix_tree.py:171",
            "prefix_tree.py:174",
            "stream_pool.py:68",
            "trainkit/loop.py:14",
        },
    ),
    "exam": (566, 172, {"window_cache.py:87"}),
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
