"""The HTML page in a real Chromium: nothing on the console, no request, phone width, contrast, print."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.findings.figures import ModuleEntry, SourceExcerpt
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, ParityEntry, Report
from ddpcheck.report.matrix.matrix import Matrix
from tests.chromium import PROGRAM, Chromium
from tests.render.test_html import CURVE, CUT, HANG, MATRIX, html
from tests.render.test_render import REPORT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists(PROGRAM), reason=f"there is no {PROGRAM}: apt-get install chromium"),
]

LONG = "blocks." + "very_long_name_of_a_module_" * 6 + ".weight"
FULL = replace(
    HANG,
    target=f"examples/{LONG}.py",
    findings=(replace(CUT, subjects=(LONG, "<script>alert(1)</script>")), *HANG.findings),
    checks=REPORT.checks,
    parity=tuple(ParityEntry(0, f"{n}.{LONG}", "local", 10.0**-n, 1e-6) for n in range(1, 30)),
    curves=(CURVE, replace(CURVE, name=LONG, location=Location(f"{LONG}.py", 7))),
    modules=tuple(ModuleEntry(f"a{'.b' * depth}", "Linear", ("weight",), 8) for depth in range(12)),
    excerpts=(SourceExcerpt("net.py", 1, tuple(f"line = {'x' * 20 * number}" for number in range(12))),),
)

CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d');
  const rgba = text => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = '#000'; canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    const rect = element instanceof SVGElement && element.parentElement.querySelector('rect');
    const fill = rect ? getComputedStyle(rect).fill : 'none';
    if (fill !== 'none') return rgba(fill);
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3]) return color;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    if (!element.checkVisibility || !element.checkVisibility()) continue;
    if (![...element.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const style = getComputedStyle(element);
    const [a, b] = [rgba(element.tagName === 'text' ? style.fill : style.color), behind(element)].map(light);
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) low.push([element.tagName, element.className.baseVal ?? element.className, ratio]);
  }
  return low;
})()"""
UNFOLD = "[...document.querySelectorAll('details')].forEach(e => e.open = true)"
WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


PAGES = {"report": REPORT, "full": FULL, "hang": HANG, "matrix": MATRIX}


@pytest.mark.parametrize("shown", PAGES.values(), ids=PAGES)
def test_a_page_in_a_browser(chromium: Chromium, shown: Report | Matrix, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html(shown), encoding="utf-8")
    background = "getComputedStyle(document.body).backgroundColor"
    for width, dark in ((360, False), (1280, True)):
        chromium.open(page, width=width, dark=dark)
        assert chromium.complaints == [] and chromium.requests == [page.as_uri()]
        assert (chromium.evaluate(background) == "rgb(20, 22, 25)") == dark
        assert chromium.evaluate(WIDE) == 0
        chromium.evaluate(UNFOLD)
        assert chromium.evaluate(WIDE) == 0 and chromium.evaluate(CONTRAST) == []
    assert chromium.evaluate("document.querySelectorAll('script').length") == 1
    chromium.open(page, width=720, dark=True, print_=True)
    assert chromium.evaluate(WIDE) == 0 and chromium.evaluate(background) == "rgb(255, 255, 255)"
    assert chromium.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    hidden = "[...document.querySelectorAll('details > :not(summary)')].filter(e => !e.getClientRects().length).length"
    assert chromium.evaluate(hidden) == 0
