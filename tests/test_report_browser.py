"""report.html in a browser: nothing fails, nothing is fetched, what moves moves, and everybody can read it.

Needs Chromium (`apt-get install chromium`, or HEADPRUNE_BROWSER names another one's program) and the packages playwright and
axe-playwright-python of the extra ``dev``; without them these tests are skipped.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headprune.app.documents import Heads, LayerProfile, Metrics, Positions, Run, Sample, SampleLayer
from headprune.app.report import page as pages
from headprune.app.runs import RunFolder
from headprune.seeing import HeadProfile
from tests.support.documents import HOSTILE

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
PROGRAM = os.environ.get("HEADPRUNE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")]
REPORTS = Path(__file__).parent.parent / "reports"
WIDTHS = {"wide": (1280, 900), "phone": (360, 740)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield found
        found.close()


def seen_heads(run: Run, picture: bool) -> Heads:
    """A heads.json of a run: head h attends to position h alone; a hostile token, or patches of an image, whose weights are scaled."""
    side = 10
    weights = np.zeros((run.model.layers[0].num_heads, side, side), np.float32)
    for h in range(len(weights)):
        weights[h, :, h % side] = 0.25 if picture else 1
    positions = Positions(labels=(HOSTILE, *(f"t{i}" for i in range(1, side))))
    if picture:
        dot = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
        positions = Positions(labels=("[CLS]", *(f"{i // 3},{i % 3}" for i in range(9))), grid=(3, 3), image=dot)
    profile = HeadProfile(9, 1.25, 0.5, previous=0.8, role="previous token", because="0.80 goes to the previous token")
    return Heads(
        examples=9, tokens=90, unit="tokens",
        layers=tuple(LayerProfile(name=a.name, index=a.index, kind=a.kind, heads=(profile,) * a.num_heads) for a in run.model.layers),
        samples=tuple(
            Sample(title=f"{HOSTILE} {k}", positions={"input": positions}, layers=tuple(
                SampleLayer.packed(a.index, weights, "input", "input", tuple(range(side)) if picture else None) for a in run.model.layers
            )) for k in range(2)
        ),
    )  # fmt: skip


def language_page() -> str:
    """Of a language model: perplexities, one of them infinite; trained on the choosing part or not, both have to be drawn."""
    source = RunFolder(REPORTS / "digits")
    run, metrics = source.read_run(), source.read_metrics()
    assert metrics is not None
    given = metrics.to_json()
    given["metric"] = "perplexity"
    for place in (given["dense"], *(b["pruned"] for b in given["budgets"])):
        value = 60 / place["metrics"]["accuracy"]
        place |= {"metrics": {"perplexity": value, "loss": math.log(value)}, "low": 0.95 * value, "high": 1.05 * value}
    for b in given["budgets"]:
        b["change"] |= {"metric": "perplexity", "value": 0.1, "low": 0.05, "high": 0.15, "verdict": "worse"}
        b["random"] = [80.0, math.inf]
        b["repair"] = None
    for p in given["curve"]:
        value = 60 / p["value"] if p["kept"] > 5 else math.inf
        p |= {"value": value, "low": 0.95 * value, "high": 1.05 * value}
    return pages.render(run, source.read_scores(), Metrics.model_validate(given))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages: of a text model, of an image model, of a language model, of scores alone without heads.json, of a plan without scores."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    found["language"] = folder / "language.html"
    found["language"].write_text(language_page())
    for name, of, scored, pruned, looked in (
        ("text", "minilm-rt", True, True, True), ("image", "digits", True, True, True), ("scored", "minilm-rt", True, False, False),
        ("planned", "digits", False, True, False),
    ):  # fmt: skip
        source = RunFolder(REPORTS / of)
        run = source.read_run()
        text = pages.render(
            run, source.read_scores() if scored else [], source.read_metrics() if pruned else None,
            seen_heads(run, of == "digits") if looked else None,
        )  # fmt: skip
        found[name] = folder / f"{name}.html"
        found[name].write_text(text)
    return found


@pytest.fixture
def visit(browser: Any, files: dict[str, Path]) -> Iterator[Any]:
    """Opens a page as ``visit(name, width, scheme)``; afterwards, nothing may have failed, been asked for or popped up."""
    trouble: list[str] = []
    opened = []

    def visited(name: str, width: str = "wide", scheme: str = "light") -> Any:
        size = WIDTHS[width]
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=width == "phone"
        )
        opened.append(context)
        page = context.new_page()
        page.on("console", lambda message: trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or trouble.append(request.url))
        page.goto(files[name].as_uri())
        page.wait_for_selector("#map rect[role=button]")
        return page

    yield visited
    for context in opened:
        context.close()
    assert trouble == []


def crosses(page: Any) -> int:
    """Heads that the map shows as pruned."""
    return page.evaluate(
        "[...document.querySelectorAll('#map text')].filter(t => t.textContent === '×' && t.style.display !== 'none').length"
    )


def labels(page: Any) -> list[str]:
    return page.locator("#heads tbody th").all_inner_texts()


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        *(("text", width, scheme) for width in WIDTHS for scheme in ("light", "dark")),
        ("image", "phone", "light"), ("image", "wide", "dark"), ("scored", "phone", "dark"), ("planned", "wide", "light"),
        ("language", "phone", "dark"),
    ],
)  # fmt: skip
def test_nothing_fails_and_everybody_can_read_it(visit: Any, name: str, width: str, scheme: str) -> None:
    """No error and no request (`visit`); no violation of WCAG 2.2 AA; no sideways scrolling of the page."""
    page = visit(name, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.locator("#map rect[role=button]").nth(5).click()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= WIDTHS[width][0]
    if width == "wide":  # and no column of the main tables is hidden
        hidden = "['sizes', 'heads'].map(by => document.getElementById(by)).filter(t => t && t.scrollWidth > t.parentElement.clientWidth).length"
        assert page.evaluate(hidden) == 0
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = axe.Axe().run(page, options={"runOnly": {"type": "tag", "values": tags}}).response
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_the_slider_changes_the_map_the_figures_and_the_charts(visit: Any) -> None:
    page = visit("text")
    slider = page.locator("#size")
    metrics = RunFolder(REPORTS / "minilm-rt").read_metrics()
    assert metrics is not None
    seen = []
    slider.focus()
    slider.press("Home")
    for i, b in enumerate([*sorted(metrics.budgets, key=lambda b: b.kept), None]):
        assert slider.input_value() == str(i)
        assert crosses(page) == (b.total - b.kept if b else 0)
        said = page.locator("#size-said").inner_text()
        row = page.locator("#sizes tbody tr.chosen").inner_text().split()
        if b:
            assert f"{100 * b.pruned.metrics['accuracy']:.1f} %" in said
            assert f"({100 * b.pruned.low:.1f} % to {100 * b.pruned.high:.1f} %)" in said
            assert b.checkpoint in said
            assert b.change.verdict in said
            assert row[0] == str(b.kept)
            assert f"{b.kept} of {b.total} heads" in slider.get_attribute("aria-valuetext")
        bars = page.locator("#latency g rect[fill='var(--accent)']")
        assert bars.count() == len(metrics.latency.rows)
        seen.append((said, page.locator("#curve").inner_html()))
        slider.press("ArrowRight")
    assert len(set(seen)) == len(metrics.budgets) + 1


def test_the_table_sorts_by_numbers_both_ways(visit: Any) -> None:
    page = visit("text")
    for column, s in enumerate(RunFolder(REPORTS / "minilm-rt").read_scores(), 1):
        flat = dict(zip(s.labels(), s.flat().tolist(), strict=True))
        button = page.locator("#heads thead th").nth(column).locator("button")
        for way in ("descending", "ascending"):
            button.focus()
            page.keyboard.press("Enter")
            assert page.locator("#heads thead th").nth(column).get_attribute("aria-sort") == way
            assert labels(page) == sorted(flat, key=lambda label: flat[label], reverse=way == "descending")
    page.locator("#heads thead th").first.locator("button").click()
    assert labels(page)[:2] == ["L0.H0", "L0.H1"]
    page.get_by_role("button", name="with 18").click()
    shown = page.locator("#heads tbody tr").nth(0).inner_text()
    assert shown.startswith("L0.H")
    assert page.locator("#heads [aria-sort]").count() == 1


def test_a_head_is_shown_on_hover_held_by_a_click_and_let_go_by_escape(visit: Any) -> None:
    page = visit("text")
    cells, title = page.locator("#map rect[role=button]"), page.locator("#head-title")
    cells.nth(15).hover()
    assert title.inner_text() == "L1.H3"
    assert "0.003428 ± 0.0026" in page.locator("#head-body").inner_text()
    assert "previous token: 0.80 goes to the previous token" in page.locator("#head-body").inner_text()
    cells.nth(15).click()
    cells.nth(30).hover()
    assert title.inner_text() == "L1.H3"
    page.keyboard.press("Escape")
    cells.nth(31).hover()
    assert title.inner_text() == "L2.H7"
    page.locator("#heads tbody tr").nth(2).hover()
    assert title.inner_text() == "L0.H2"
    assert page.locator("#attention .token").count() == 10
    darkest = "[...document.querySelectorAll('#attention .paint')].map((p) => Number(p.style.opacity))"
    assert page.evaluate(darkest) == [0, 0, 1, *[0] * 7]
    assert "(1.00)" in page.locator("#attention").inner_text()
    page.locator("#sample").select_option(index=1)
    page.locator("#query").select_option(index=3)
    assert page.locator("#query").input_value() == "3"
    assert HOSTILE in page.locator("#attention .token").first.inner_text()


def test_the_map_is_walked_with_the_keyboard(visit: Any) -> None:
    page = visit("text")
    title = page.locator("#head-title")
    page.locator("#map rect[tabindex='0']").focus()
    for key, shown in (
        ("Home", "L3.H0"), ("ArrowRight", "L3.H1"), ("ArrowDown", "L4.H1"), ("End", "L4.H11"), ("ArrowRight", "L4.H11"),
        ("ArrowUp", "L3.H11"), ("ArrowLeft", "L3.H10"),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert title.inner_text() == shown
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"{shown}, ablation ")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    assert page.locator("#map rect[tabindex='0']").count() == 1
    page.get_by_label("gradient").check()
    assert "gradient" in page.locator("#map rect[tabindex='0']").get_attribute("aria-label")


def test_on_a_phone_a_tap_brings_a_head_up_and_its_button_closes_it(visit: Any) -> None:
    page = visit("text", "phone")
    panel = page.locator("#head")
    assert not panel.is_visible()
    page.locator("#map rect[role=button]").nth(7).tap()
    assert panel.is_visible()
    assert page.locator("#head-title").inner_text() == "L0.H7"
    page.get_by_role("button", name="Close").tap()
    assert not panel.is_visible()
    page.locator("#heads tbody button").nth(3).tap()
    assert page.locator("#head-title").inner_text() == "L0.H3"
    box = page.locator("#map rect[role=button]").first.bounding_box()
    assert box["width"] >= 22
    assert box["height"] >= 22


def test_an_image_is_shown_with_what_is_attended_to(visit: Any) -> None:
    page = visit("image")
    page.locator("#map rect[role=button]").nth(0).hover()
    assert page.locator("#attention .token").first.get_attribute("title") == "0.25"
    page.locator("#map rect[role=button]").nth(2).hover()
    assert page.locator("#attention img").get_attribute("src").startswith("data:image/png;base64,")
    assert page.evaluate("document.querySelector('#attention img').naturalWidth") == 1
    opacity = (
        "[...document.querySelectorAll('#attention .patches rect')].map((r) => Number(r.getAttribute('fill-opacity')))"
    )
    painted = page.evaluate(opacity)
    assert len(painted) == 9
    assert [i for i, found in enumerate(painted) if found > 0] == [1]


def test_without_javascript_the_figures_are_there(browser: Any, files: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(files["text"].as_uri())
    assert page.locator("#sizes tbody tr").count() == 4
    assert page.locator("#heads tbody tr").count() == 72
    assert not page.locator(".bar").is_visible()
    assert "need JavaScript" in page.locator("noscript").inner_text()
    context.close()
