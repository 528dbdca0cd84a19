"""How the HTML report looks, as far as a machine can tell: contrast, room, targets, empty states."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from auditor.model import Run
from reports import _summary
from tests.browser import CHROMIUM, Browser
from tests.fixtures.reports.page_runs import many, page
from tests.fixtures.reports.sample_runs import EMPTY, HOSTILE, TYPICAL

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

NO_FILES = replace(EMPTY, summary=replace(EMPTY.summary, files=0, lines=0), paths=("src",))
UNREADABLE = """(() => {
  const parts = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (front, back, share) => back.map((value, n) => value * (1 - share) + front[n] * share);
  const light = (colour) => {
    const [r, g, b] = colour.map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const above = (element) => element ? [element, ...above(element.parentElement)] : [];
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.offsetParent) continue;
    const layers = above(element).map((each) => parts(getComputedStyle(each).backgroundColor)).reverse();
    const back = layers.reduce((under, layer) => over(layer, under, layer[3]), [255, 255, 255]);
    const opacity = above(element).reduce((all, each) => all * Number(getComputedStyle(each).opacity), 1);
    const ink = parts(getComputedStyle(element).color);
    const [one, two] = [light(over(ink, back, ink[3] * opacity)), light(back)];
    const contrast = (Math.max(one, two) + .05) / (Math.min(one, two) + .05);
    if (contrast < 4.5) found.push(`${walker.currentNode.data.trim()} ${contrast.toFixed(2)}`);
  }
  return found;
})()"""
SMALL = """[...document.querySelectorAll('button, select, input, summary, .bar a, .rule-link')]
  .map((each) => each.closest('label') ?? each)
  .filter((each) => each.offsetParent && each.getBoundingClientRect().height < 24)
  .map((each) => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def opened(browser: Browser, run: Run, folder: Path, *, width: int = 1280, dark: bool = False) -> Browser:
    file = folder / "report.html"
    file.write_bytes(page(run).encode("utf-8", "replace"))
    browser.complaints.clear()
    browser.resize(width, 900, dark=dark)
    browser.open(file)
    browser.run("document.querySelectorAll('.head').forEach(head => head.click())")
    return browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("run", [TYPICAL, NO_FILES], ids=["typical", "nothing"])
def test_every_text_stands_out_from_its_ground(
    browser: Browser, run: Run, dark: bool, tmp_path: Path
) -> None:
    opened(browser, run, tmp_path, dark=dark)
    assert browser.run(UNREADABLE) == []


@pytest.mark.parametrize("run", [TYPICAL, HOSTILE, NO_FILES], ids=["typical", "hostile", "nothing"])
def test_a_phone_shows_all_of_it_and_every_target_can_be_hit(
    browser: Browser, run: Run, tmp_path: Path
) -> None:
    opened(browser, run, tmp_path, width=360)
    assert browser.run("document.documentElement.scrollWidth") == 360
    assert browser.run(SMALL) == []


def test_where_nothing_was_audited_nothing_is_praised(browser: Browser, tmp_path: Path) -> None:
    opened(browser, NO_FILES, tmp_path)
    assert browser.run("document.querySelector('h1').textContent") == "Nothing was audited"
    assert browser.run("document.querySelector('h1').className") == "verdict failed"
    said = "No Python file in src, or every one is excluded."
    assert browser.run("document.querySelector('.scope').textContent.trim()") == said
    summary = _summary.summary(NO_FILES, color=False, width=80, statistics=False)
    assert summary.endswith("Nothing was audited: no Python file there, or all are excluded.\n")


def test_where_no_pool_was_recognised_the_page_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    opened(browser, EMPTY, tmp_path)
    assert browser.run("document.querySelector('h1').textContent") == "Nothing found"
    assert "setting protocols declares them" in browser.run("document.querySelector('.scope').textContent")


def test_the_first_key_leads_past_the_navigation(browser: Browser, tmp_path: Path) -> None:
    opened(browser, TYPICAL, tmp_path)
    browser.press("Tab")
    assert browser.run("document.activeElement.textContent") == "Skip to the findings"
    assert browser.run("document.activeElement.getBoundingClientRect().top") >= 0


def test_the_first_sort_and_filter_of_five_thousand(browser: Browser, tmp_path: Path) -> None:
    """To the frame after next, when what was asked for has been painted; of the processor, half a second."""
    run = many()
    file = tmp_path / "report.html"
    file.write_text(page(run))
    browser.resize(1280, 900)
    for field, value in (("sort", "place"), ("search", "buffer_4999")):
        browser.open(file)
        begun = browser.busy()
        browser.run(
            f"""new Promise((done) => {{
              const field = document.getElementById('{field}');
              field.value = '{value}';
              field.dispatchEvent(new Event('input', {{ bubbles: true }}));
              requestAnimationFrame(() => requestAnimationFrame(done));
            }})"""
        )
        assert browser.busy() - begun < 0.5
