"""`python -m website`: build the documentation site into build/site.

A warning is an error, and so is a link or an anchor of the built pages that leads nowhere, and
anything that a page would fetch from elsewhere. Exit code 0: all is well; 1: it is not.
"""

import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from website.built import problems_of
from website.sources import ROOT, write_sources


def main() -> int:
    """Build the site anew and return the exit code."""
    sources = ROOT / "build/site-sources"
    site = ROOT / "build/site"
    for folder in (sources, site):
        shutil.rmtree(folder, ignore_errors=True)
    write_sources(sources)
    here = str(Path(__file__).parent)
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", here]
    cache = ["-d", str(ROOT / "build/site-cache"), "-E"]
    code = build_main([*options, *cache, str(sources), str(site)])
    problems = problems_of(site)
    for problem in problems:
        print(problem, file=sys.stderr)
    if code or problems:
        return 1
    pages = len(list(site.rglob("*.html")))
    print(f"{pages} pages: {(site / 'index.html').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
