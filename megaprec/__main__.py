"""`python -m megaprec`: the command, wherever it is started."""

import sys

from megaprec.command_path import leave_out_working_folder

leave_out_working_folder()

from tools.start import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
