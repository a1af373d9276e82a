"""The built site in a browser: no page is wider than its screen, and wide tables scroll within it."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.project.test_readme import ROOT

PHONE = 360
DESK = 1400
# Each page in a frame of the screen's width; sizes are CSS pixels.
LOOK = """<!doctype html><body><pre></pre><script>
async function shown(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  await new Promise((loaded) => { frame.onload = loaded; frame.src = page; document.body.append(frame); });
  const inner = frame.contentDocument;
  const tables = [...inner.querySelectorAll(".table-wrapper")].map((around) => {
    const style = frame.contentWindow.getComputedStyle(around);
    const table = around.querySelector("table");
    return {wide: table.offsetWidth, place: around.clientWidth, scrolls: style.overflowX === "auto",
            wants: around.scrollWidth};
  });
  const root = inner.documentElement;
  const told = {page, excess: root.scrollWidth - root.clientWidth, tables};
  frame.remove();
  return told;
}
(async () => {
  const told = [];
  for (const page of PAGES) told.push(await shown(page, WIDTH));
  document.querySelector("pre").textContent = JSON.stringify(told);
})();
</script>"""
Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of a built site and its address on this machine."""
    place = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "website", place], cwd=ROOT, check=True)
    handler = partial(Quiet, directory=str(place / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield place / "site", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def look(site: tuple[Path, str], width: int, profile: Path) -> Told:
    """What a browser says of each page on a screen of so many pixels."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    folder, address = site
    pages = [str(page.relative_to(folder)) for page in sorted(folder.rglob("*.html"))]
    script = LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width))
    (folder / "look.htm").write_text(script)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command = [browser, *options, "--virtual-time-budget=600000", "--window-size=1600,900"]
    command += ["--dump-dom", f"{address}/look.htm"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (said,) = re.findall(r"<pre>(.*?)</pre>", shown, re.DOTALL)
    told = json.loads(unescape(said))
    assert [entry["page"] for entry in told] == pages
    return told


@pytest.mark.slow
def test_no_page_is_wider_than_its_screen_and_tables_that_are_scroll(
    site: tuple[Path, str], tmp_path: Path
) -> None:
    for width in (PHONE, DESK):
        told = look(site, width, tmp_path / str(width))
        assert [entry["page"] for entry in told if entry["excess"] > 0] == []
        wider = [
            table
            for entry in told
            for table in entry["tables"]
            if table["wide"] > table["place"] + 1
        ]
        assert len(wider) > 5
        assert all(table["scrolls"] and table["wants"] >= table["wide"] for table in wider)


@pytest.mark.slow
def test_a_table_of_sentences_is_no_narrow_column_on_a_phone(
    site: tuple[Path, str], tmp_path: Path
) -> None:
    told = {entry["page"]: entry["tables"] for entry in look(site, PHONE, tmp_path / "phone")}
    assert min(table["wide"] for table in told["keys.html"]) >= 600
