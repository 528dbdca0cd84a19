"""The labelled misuse: enough of it, in its place, and the goals hold."""

from tests.field.score_misuse import HERE, OWN_FOLDERS, Site, audit, compare, labels, score_folder

SITE = Site("misuse", "", "a.py", 3, "PA201", "free(x)", "own", "")
CLEAN = Site("misuse", "", "a.py", 5, None, "free(x)", "own", "")


def test_the_goals_hold_on_our_own_files() -> None:
    own = [site for site in labels() if site.package == "misuse"]
    score = compare(own, audit(HERE / "misuse"))
    assert score.good and score.alarms == () and score.elsewhere == ()
    assert [site.reason for site in score.missed] == ["released by an ExitStack at its end"]


def test_the_goals_hold_on_what_bug_reports_tell() -> None:
    told = [site for site in labels() if site.package == "misuse_reports"]
    score = score_folder(HERE / "misuse_reports", told)
    assert score.good and score.alarms == () and score.elsewhere == ()
    assert [(site.code, site.file) for site in score.missed] == [
        ("PA203", "never_acquired.py"),  # what an unknown call returns
        ("PA206", "uninitialised.py"),  # written under a condition
    ]


def test_the_goals_hold_on_what_was_labelled_before_any_run() -> None:
    unseen = [site for site in labels() if site.package == "misuse_unseen"]
    score = score_folder(HERE / "misuse_unseen", unseen)
    assert score.good and score.alarms == () and score.elsewhere == ()
    assert [(site.code, site.file) for site in score.missed] == [
        ("PA202", "allocators.py"),  # numbers that are looked up after they were given back
        ("PA203", "allocators.py"),  # a count that was taken on one way only
        ("PA206", "tensors.py"),  # written under a condition
        ("PA205", "tensors.py"),  # an attribute that nothing says to be trained
    ]


def test_enough_of_it_is_from_outside() -> None:
    outside = [site for site in labels() if site.package != "misuse"]
    assert sum(site.code is not None for site in outside) >= 40
    assert sum(site.code is None for site in outside) >= 60
    assert all("https://github.com/" in site.source for site in outside if site.code is not None)


def test_there_are_enough_labels_of_every_rule() -> None:
    codes = [site.code for site in labels() if site.code is not None]
    assert len(codes) >= 40
    assert {code for code in codes if codes.count(code) >= 3} == {f"PA20{number}" for number in range(1, 9)}


def test_labels_name_the_lines_they_speak_of() -> None:
    for site in labels():
        if site.package in OWN_FOLDERS:
            line = (HERE / site.package / site.file).read_text(encoding="utf-8").splitlines()[site.line - 1]
            assert site.text in line


def test_another_rule_on_the_line_is_a_miss_and_any_rule_on_a_clean_line_is_an_alarm() -> None:
    score = compare([SITE, CLEAN], {("a.py", 3, "PA202"), ("a.py", 5, "PA202"), ("a.py", 9, "PA202")})
    assert score.missed == (SITE,)
    assert score.alarms == (CLEAN,)
    assert score.elsewhere == (("a.py", 9, "PA202"),)
    assert not score.good


def test_found_and_silent_are_good() -> None:
    score = compare([SITE, CLEAN], {("a.py", 3, "PA201")})
    assert (score.recall, score.false_rate, score.good) == (1.0, 0.0, True)
