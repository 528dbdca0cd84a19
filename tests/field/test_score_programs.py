"""What is found in the strangers' programs stays found, and what is wrongly said does not grow."""

from tests.field.score_strangers import judged, programs

FOUND_AT_LEAST = 137
WRONGLY_SAID: set[str] = set()


def test_the_score_of_the_strangers_programs_is_kept() -> None:
    labels = []
    for program in programs():
        its, elsewhere = judged(program)
        assert not elsewhere, f"reported where nothing is labelled: {elsewhere}"
        labels += its
    assert len(labels) == 435
    assert sum(each.leaks and bool(each.codes) for each in labels) >= FOUND_AT_LEAST
    assert {f"{each.path}:{each.line}" for each in labels if each.codes and not each.leaks} <= WRONGLY_SAID
