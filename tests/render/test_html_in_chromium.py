"""The HTML page in a real Chromium: it fits the width of a phone, and its text has enough contrast."""

from __future__ import annotations

import html as escaping
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddpcheck.findings.figures import ModuleEntry, SourceExcerpt
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, ParityEntry, Report
from ddpcheck.report.matrix.matrix import Matrix
from tests.render.test_html import CURVE, CUT, HANG, MATRIX, html
from tests.render.test_render import REPORT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")]

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
PAGES = {"report": REPORT, "full": FULL, "hang": HANG, "matrix": MATRIX}
# A script that is no part of the page measures it, within a frame of the width that is asked for.
MEASURED = """<iframe width="{width}" height="900" srcdoc="{page}"></iframe><script>onload = () => {{
  const {{document, getComputedStyle, SVGElement}} = frames[0], wide = [];
  for (const open of [false, true]) {{
    document.querySelectorAll('details').forEach(e => e.open = open);
    wide.push(document.documentElement.scrollWidth - document.documentElement.clientWidth);
  }}
  const low = {contrast}, scripts = document.querySelectorAll('script').length;
  parent.document.title = JSON.stringify([getComputedStyle(document.body).backgroundColor, wide, low, scripts]);
}}</script>"""


@pytest.mark.parametrize("shown", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize(("width", "dark"), [(360, False), (1280, True)])
def test_a_page_in_a_browser(shown: Report | Matrix, width: int, dark: bool, tmp_path: Path) -> None:
    page = escaping.escape(re.sub("<meta http-equiv.*?>", "", html(shown)))
    text = MEASURED.format(width=width, page=page, contrast=CONTRAST)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=1400,1000"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom"]
    command = ["chromium", *options, (tmp_path / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    background, wide, low, scripts = json.loads(escaping.unescape(title[1]))
    assert (background == "rgb(20, 22, 25)") == dark
    assert (wide, low, scripts) == ([0, 0], [], 1)
