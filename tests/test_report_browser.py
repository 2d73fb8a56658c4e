"""report.html in a browser: nothing fails, nothing is fetched, what moves moves, and everybody can read it.

Needs Chromium (`apt-get install chromium`, or HEADPRUNE_BROWSER names another one's program) and the packages playwright and
axe-playwright-python of the extra ``dev``; without them these tests are skipped.
"""

import copy
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import HOSTILE, METRICS, heads_document, scores_of
from tests.support.reports import reported

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
PROGRAM = os.environ.get("HEADPRUNE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.drawn, pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")]
REPORTS = Path(__file__).parent.parent / "reports"
WIDTHS = {"wide": (1280, 900), "phone": (360, 740)}
SCORES = scores_of([0.3, 0.2, -0.1, 0.005])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a text model, an image model, a language model with an infinite perplexity, of scores or a plan alone, of hostile names."""
    language = copy.deepcopy(METRICS)
    language["metric"] = "perplexity"
    for place in (language["dense"], language["budgets"][0]["pruned"]):
        place |= {"metrics": {"perplexity": 62.0, "loss": 4.1}, "low": 58.0, "high": 66.0}
    language["budgets"][0]["random"] = [80.0, math.inf]
    for point in language["curve"]:
        point |= {"value": 70.0, "low": 60.0, "high": math.inf}
    folders = {"text": REPORTS / "minilm-rt", "image": REPORTS / "digits"}
    for name, documents, heads in (
        ("language", (language, SCORES), None), ("scored", (None, SCORES, scores_of([1, 2, 3, 4], "gradient")), None),
        ("planned", (METRICS,), None), ("hostile", (METRICS, SCORES), heads_document(title=HOSTILE, token=HOSTILE, role=HOSTILE)),
    ):  # fmt: skip
        folders[name] = tmp_path_factory.mktemp("pages") / name
        reported(folders[name], *documents, heads=heads)
    return {name: folder / "report.html" for name, folder in folders.items()}


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a page as ``visit(name, width, scheme)``; afterwards, nothing may have failed, been asked for or popped up."""
    trouble: list[str] = []
    opened = []

    def visited(name: str, width: str = "wide", scheme: str = "light") -> Any:
        size = {"width": WIDTHS[width][0], "height": WIDTHS[width][1]}
        opened.append(browser.new_context(viewport=size, color_scheme=scheme, has_touch=width == "phone"))
        page = opened[-1].new_page()
        page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or trouble.append(request.url))
        page.goto(pages[name].as_uri())
        page.wait_for_selector("#map button")
        return page

    yield visited
    for context in opened:
        context.close()
    assert trouble == []


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("text", width, scheme) for width in WIDTHS for scheme in ("light", "dark")),
        ("image", "phone", "light"), ("image", "wide", "dark"), ("scored", "phone", "dark"), ("planned", "wide", "light"),
        ("language", "phone", "dark"), ("hostile", "wide", "light"),
    ],
)  # fmt: skip
def test_nothing_fails_and_everybody_can_read_it(visit: Any, name: str, width: str, scheme: str) -> None:
    """No error and no request (`visit`); no violation of WCAG 2.2 AA; no sideways scrolling of the page."""
    page = visit(name, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.locator("#map button").nth(3).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[width][0]
    if width == "wide":  # and no column of a table is hidden
        tables = "[...document.querySelectorAll('table')]"
        assert page.evaluate(f"{tables}.filter(t => t.scrollWidth > t.parentElement.clientWidth).length") == 0
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = axe.Axe().run(page, options={"runOnly": {"type": "tag", "values": tags}}).response
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_the_slider_changes_the_map_and_the_figures(visit: Any) -> None:
    page = visit("text")
    slider = page.locator("#size")
    budgets = json.loads((REPORTS / "minilm-rt" / "metrics.json").read_text())["budgets"]
    slider.focus()
    slider.press("Home")
    for i, b in enumerate([*sorted(budgets, key=lambda b: b["kept"]), None]):
        assert slider.input_value() == str(i)
        assert page.locator("#map button.gone").count() == (b["total"] - b["kept"] if b else 0)
        said, row = page.locator("#size-facts").inner_text(), page.locator("tr.chosen").first.inner_text().split()
        if b:
            value = f"{100 * b['pruned']['metrics']['accuracy']:.1f} % ({100 * b['pruned']['low']:.1f} % to"
            assert all(words in said for words in (value, b["checkpoint"], b["change"]["verdict"]))
            assert row[0] == str(b["kept"])
            assert f"{b['kept']} heads: {value}" in slider.get_attribute("aria-valuetext")
        slider.press("ArrowRight")


def test_the_table_sorts_by_numbers_both_ways(visit: Any) -> None:
    page = visit("text")
    labels = page.locator("#heads tbody td:first-child")
    for column, s in enumerate(json.loads((REPORTS / "minilm-rt" / "scores.json").read_text())["scores"], 1):
        flat = [float(f"{value:.4g}") for values in s["values"].values() for value in values]
        order = {f"L{i // 12}.H{i % 12}": value for i, value in enumerate(flat)}
        button = page.locator("#heads thead th").nth(column).locator("button")
        for way in ("descending", "ascending"):
            button.focus()
            page.keyboard.press("Enter")
            assert page.locator("#heads thead th").nth(column).get_attribute("aria-sort") == way
            assert labels.all_inner_texts() == sorted(order, key=order.__getitem__, reverse=way == "descending")
    page.get_by_role("button", name="with 18").click()
    assert page.locator("#heads [aria-sort]").count() == 1


def test_a_head_is_chosen_by_pointer_keyboard_and_finger(visit: Any) -> None:
    page = visit("text")
    title = page.locator("#head h3")
    page.locator("#map button").nth(15).click()
    assert "0.003428 ± 0.0026, number" in page.locator("#head").inner_text()
    for key, shown in (
        ("Home", "L1.H0"), ("ArrowRight", "L1.H1"), ("ArrowDown", "L2.H1"), ("End", "L2.H11"), ("ArrowRight", "L2.H11"), ("ArrowUp", "L1.H11"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert title.inner_text() == shown
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{shown}, ablation ")
    assert page.locator("#map button[tabindex='0']").count() == 1
    page.get_by_label("gradient").check()
    assert "gradient" in page.locator("#map button[tabindex='0']").get_attribute("aria-label")
    phone = visit("text", "phone")
    phone.locator("#heads tbody button").nth(3).tap()
    assert phone.locator("#head h3").inner_text() == "L0.H3"
    box = phone.locator("#map button").first.bounding_box()
    assert min(box["width"], box["height"]) >= 24


def test_what_a_head_attends_to(visit: Any) -> None:
    page = visit("hostile")  # where head h attends to token h - 1 alone
    page.locator("#map button").nth(2).click()
    opacity = "[...document.querySelectorAll('#head .paint')].map((p) => Number(p.style.opacity))"
    assert page.evaluate(opacity) == [0, 1, 0]
    assert "Most to “b” (1.00)" in page.locator("#head").inner_text()
    page.locator("#query").select_option(index=2)
    assert page.locator("#query").input_value() == "2"
    assert HOSTILE in page.locator("#head .token").first.inner_text()
    image = visit("image")
    assert image.evaluate("document.querySelector('#head .patches img').naturalWidth") > 8
    assert image.evaluate("document.querySelector('#head .patches canvas').width") == 4
