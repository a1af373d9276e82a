"""`python -m website [FOLDER]`: build the documentation site into FOLDER/site, build/site without.

A warning is an error, and so is a link or an anchor of the built pages that leads nowhere, and
anything that a page would fetch from elsewhere. Exit code 0: all is well; 1: it is not.
"""

import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from website.built import problems_of
from website.sources import ROOT, write_sources


def main(place: Path) -> int:
    """Build the site anew in `place/site`, from pages that are written beside it; return the exit
    code."""
    sources = place / "site-sources"
    site = place / "site"
    for folder in (sources, site):
        shutil.rmtree(folder, ignore_errors=True)
    write_sources(sources)
    here = str(Path(__file__).parent)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", here]
    cache = ["-d", str(place / "site-cache"), "-E"]
    code = build_main([*options, *cache, str(sources), str(site)])
    problems = problems_of(site)
    for problem in problems:
        print(problem, file=sys.stderr)
    if code or problems:
        return 1
    pages = len(list(site.rglob("*.html")))
    print(f"{pages} pages: {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(Path(given[0]) if given else ROOT / "build"))
