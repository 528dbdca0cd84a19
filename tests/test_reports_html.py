"""The HTML report in a real browser: it opens, filters and sorts, and text of the audited code stays text."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.model import Finding, Run, Severity, Span, Step
from tests.browser import CHROMIUM, Browser
from tests.fixtures.reports.page_runs import MARKUP, evil, many, page
from tests.fixtures.reports.sample_runs import EMPTY, HOSTILE, TYPICAL

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def opened(browser: Browser, run: Run, folder: Path) -> Browser:
    file = folder / "report.html"
    file.write_bytes(page(run).encode("utf-8", "replace"))
    browser.complaints.clear()
    browser.resize(1280, 900)
    browser.open(file)
    return browser


def heads(browser: Browser) -> list[str]:
    found: list[str] = browser.run(
        "[...document.querySelectorAll('#finding-list .badge')].map(b => b.textContent)"
    )
    return found


def choose(browser: Browser, field: str, value: str) -> None:
    event = "dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(f"(f => {{ f.value = {json.dumps(value)}; f.{event}; }})(document.getElementById('{field}'))")


@needs_browser
@pytest.mark.parametrize("run", [TYPICAL, HOSTILE, EMPTY], ids=["typical", "hostile", "empty"])
def test_opens_without_complaints(browser: Browser, run: Run, tmp_path: Path) -> None:
    opened(browser, run, tmp_path)
    browser.run("document.querySelectorAll('.head').forEach(head => head.click())")
    assert browser.run("document.querySelectorAll('.detail').length") >= len(run.findings)
    assert browser.complaints == []


@needs_browser
def test_text_of_the_audited_code_stays_text(browser: Browser, tmp_path: Path) -> None:
    opened(browser, evil(), tmp_path)
    choose(browser, "group", "symbol")
    browser.run("document.querySelectorAll('.head, summary').forEach(head => head.click())")
    assert browser.run("window.pwned") is None
    assert browser.run("document.querySelectorAll('img, iframe, object, embed').length") == 0
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.querySelector('#finding-list .symbol').textContent") == MARKUP
    shown = browser.run("document.querySelector('.text').textContent")
    assert shown == MARKUP
    assert browser.run("document.querySelector('.added').textContent") == f"+ {MARKUP}"
    assert browser.run("document.querySelector('.advice b').textContent") == MARKUP
    command = f"poolaudit adopt --diff {shlex.quote(MARKUP)} ./-x --class {shlex.quote(MARKUP)}"
    assert browser.run("document.querySelector('.advice .copy').dataset.copy") == command
    assert browser.complaints == []


@needs_browser
def test_a_foreign_script_would_not_run(browser: Browser, tmp_path: Path) -> None:
    """The second door: even markup that got through the first is refused by the page's policy."""
    file = tmp_path / "broken.html"
    file.write_text(page(EMPTY).replace("</main>", "<script>window.pwned = 1</script></main>"))
    browser.open(file)
    assert browser.run("window.pwned") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


@needs_browser
def test_filter_sort_and_group(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    assert heads(browser) == ["PA107", "PA102", "PA108", "PA302"]  # by severity, then as they came
    choose(browser, "sort", "place")
    assert heads(browser) == ["PA108", "PA302", "PA107", "PA102"]
    choose(browser, "sort", "code")
    assert heads(browser) == ["PA102", "PA107", "PA108", "PA302"]
    choose(browser, "group", "path")
    groups = browser.run("[...document.querySelectorAll('.group')].map(g => g.textContent)")
    assert groups == ["longdoc/ring.py 3", "longdoc/helpers.py 1"]
    choose(browser, "group", "")
    choose(browser, "search", "RING.forward still")
    assert heads(browser) == ["PA102", "PA107"]
    assert browser.run("document.getElementById('shown').textContent") == "2 of 4 findings"
    browser.run("document.querySelector('.toggles input[value=error]').click()")
    assert heads(browser) == []
    browser.run("document.querySelector('[type=reset]').click()")
    browser.wait("document.querySelectorAll('#finding-list .finding').length === 4")
    browser.run("document.querySelector('[data-rule=PA107]').click()")
    assert heads(browser) == ["PA107"]


@needs_browser
def test_the_path_is_drawn_on_the_source(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    choose(browser, "rule", "PA102")
    browser.run("document.querySelector('#finding-list .head').click()")
    numbers = browser.run("[...document.querySelectorAll('.detail .note')].map(n => n.textContent)")
    assert numbers == [
        "1 acquired, held by part",
        "2 taken when self.skips(turn) is true",
        "3 leaves the turn with part held",
    ]
    marks = browser.run("[...document.querySelectorAll('.detail mark')].map(m => m.textContent)")
    assert marks == [
        'self.pool.allocate(x.shape, x.dtype, device=x.device, zero=True, name="part")',
        "if",
        "continue",
    ]
    rows = browser.run(
        "[...document.querySelectorAll('.diff > div')].map(r => [r.className, r.textContent.trim()])"
    )
    assert rows == [
        ["kept", "5              part = " + marks[0]],
        ["kept", "6              if self.skips(turn):"],
        ["added", "+                 self.pool.deallocate(part)"],
        ["kept", "7                  continue"],
        ["kept", "8              x = attend(x, part)"],
    ]


@needs_browser
def test_commands_to_copy(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    browser.run("document.querySelectorAll('.head').forEach(head => head.click())")
    copied = "row => [...row.querySelectorAll('[data-copy]')].map(button => button.dataset.copy)"
    offered = browser.run(f"[...document.querySelectorAll('#finding-list .finding')].map({copied})")
    assert offered[0] == [  # advice without edits: nothing for `fix` to do
        "longdoc/ring.py:3:22",
        "poolaudit rule PA107",
        "poolaudit audit longdoc --select PA107",
        "# poolaudit: ignore[PA107]",
    ]
    assert offered[1] == [
        "longdoc/ring.py:5:20",
        "poolaudit rule PA102",
        "poolaudit audit longdoc --select PA102",
        "poolaudit fix --diff longdoc --select PA102",
        "poolaudit fix longdoc --select PA102",
        "# poolaudit: ignore[PA102]",
    ]
    adopt = "poolaudit adopt --diff longdoc --class Sparse"
    own = ".commands:not(.finding .commands) [data-copy]"
    pages = browser.run(
        "[...document.querySelectorAll('#class-list > .class')].map("
        f"row => [...row.querySelectorAll('{own}')].map(button => button.dataset.copy))"
    )
    assert pages == [
        ["longdoc/sparse.py:9", adopt, "poolaudit audit longdoc"],
        ["longdoc/gather.py:30", "poolaudit audit longdoc"],
        ["longdoc/ring.py:1", "poolaudit audit longdoc"],
    ]
    assert browser.run(f"[...document.querySelectorAll('.advice > li')].map({copied})") == [[adopt]]


@needs_browser
def test_a_path_is_never_an_option(browser: Browser, tmp_path: Path) -> None:
    opened(browser, replace(TYPICAL, paths=("-a b",)), tmp_path)
    browser.run("document.querySelectorAll('#finding-list .head')[3].click()")
    audit = browser.run("document.querySelectorAll('#finding-list .detail [data-copy]')[2].dataset.copy")
    assert audit == "poolaudit audit './-a b' --select PA302"


@needs_browser
def test_a_finding_about_a_class_offers_to_adopt_it(browser: Browser, tmp_path: Path) -> None:
    span = Span("longdoc/sparse.py", 9, 1, 20, 1)
    finding = Finding("PA302", "module-without-pool", Severity.WARNING, span, "Sparse", "m")
    opened(browser, replace(TYPICAL, findings=(finding,)), tmp_path)
    browser.run("document.querySelector('#finding-list .head').click()")
    offered = browser.run("[...document.querySelectorAll('#finding-list .copy')].map(b => b.dataset.copy)")
    assert "poolaudit adopt --diff longdoc --class Sparse" in offered


@needs_browser
def test_what_is_recommended(browser: Browser, tmp_path: Path) -> None:
    span = Span("longdoc/gather.py", 31, 1, 31, 5)
    of_gather = Finding("PA101", "never-released", Severity.ERROR, span, "Gather.run", "m")
    opened(browser, replace(TYPICAL, findings=(of_gather,)), tmp_path)
    said = browser.run("[...document.querySelectorAll('.advice > li')].map(r => r.innerText.split(/\\n+/))")
    assert said == [
        [
            "high",
            "Sparse longdoc/sparse.py:9",
            "scores are quadratic in the sequence length",
            "bytes",
            "b*h*n*n*4: about 4.0 GiB if b is batch 1, h is heads 16, n is length 8,192",
            "effort",
            "6 edits by poolaudit adopt",
            "poolaudit adopt --diff longdoc --class Sparse",
        ],
        [
            "low",
            "Gather longdoc/gather.py:30",
            "effort",
            "1 edit to finish what is begun; its findings say where",
        ],
    ]


@needs_browser
def test_columns_count_characters(browser: Browser, tmp_path: Path) -> None:
    line = "𝒙 = '🦀🦀'; buf = pool.allocate(n)"
    span = Span("a.py", 1, line.index("pool") + 1, 1, len(line) + 1)
    finding = Finding(
        "PA101", "never-released", Severity.ERROR, span, "f", "m", (Step("a.py", 1, span.column, "here"),)
    )
    opened(browser, replace(EMPTY, findings=(finding,), excerpts={"a.py": {1: line}}), tmp_path)
    browser.run("document.querySelector('.head').click()")
    assert browser.run("document.querySelector('mark').textContent") == "pool.allocate(n)"


@needs_browser
def test_the_keyboard_is_enough(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    for key in ("j", "j", "k", "j", "o"):
        browser.press(key)
    assert browser.run("document.activeElement.closest('.finding').finding.code") == "PA102"
    assert browser.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    browser.press("o")
    assert browser.run("document.activeElement.getAttribute('aria-expanded')") == "false"
    browser.press("/")
    browser.press("j")
    assert browser.run("document.activeElement.id + document.activeElement.value") == "searchj"
    browser.press("Escape")
    browser.press("?")
    assert browser.run("document.getElementById('help').open") is True
    browser.run("document.getElementById('help').close()")
    before = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.press("t")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != before
    browser.run("localStorage.clear()")


@needs_browser
def test_assumptions_change_the_bytes(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    amounts = "[...document.querySelectorAll('#bytes-bars tr')].map(row => row.textContent)"
    assert browser.run(amounts) == ["Sparse4.0 GiB", "Ring512 MiB"]
    browser.run("document.querySelector('.assume [name=length]').value = 1024")
    browser.run("document.querySelector('.assume').dispatchEvent(new Event('input'))")
    assert browser.run(amounts) == ["Ring64.0 MiB", "Sparse64.0 MiB"]


@needs_browser
def test_five_thousand_findings(browser: Browser, tmp_path: Path) -> None:
    run = many()
    size = len(page(run).encode())
    assert size < 15_000_000
    opened(browser, run, tmp_path)
    assert browser.run("document.querySelectorAll('.finding').length") < 200
    assert 0 < browser.busy() < 1.0  # of the processor: the clock measures what else the machine does
    begun = browser.busy()
    choose(browser, "search", "buffer_4999")
    assert heads(browser) == ["PA103"]
    choose(browser, "search", "")
    choose(browser, "group", "package")
    assert browser.busy() - begun < 1.0
    browser.run("scrollTo(0, document.getElementById('finding-list').getBoundingClientRect().bottom)")
    browser.wait("document.querySelectorAll('.finding').length > 40")
    assert browser.complaints == []


@needs_browser
def test_printing_opens_what_is_folded(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run("document.querySelectorAll('#finding-list .detail').length") == len(TYPICAL.findings)


@needs_browser
def test_paper_is_light(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    colours = """
        [document.body, document.querySelector('.verdict')].map(element => {
            const style = getComputedStyle(element);
            return [style.backgroundColor, style.color];
        })
    """
    browser.on_paper()
    light = browser.run(colours)
    browser.run("document.documentElement.dataset.theme = 'dark'")
    assert browser.run(colours) == light
    assert light[0] == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
