"""`python -m megaprec`: the command, wherever it is started.

Python puts the working directory before everything that is installed. A folder there called tools, models or parallel
would be taken for ours, so the working directory is left out, unless megaprec itself lies in it.
"""

import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
sys.path[:] = [str(HOME), *(entry for entry in sys.path if Path(entry or ".").resolve() not in (HOME, Path.cwd()))]

from tools.start import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
