"""The ground on which local ranks meet: the loopback interface, and open files.

torch's store tries for minutes to reach a port that cannot be reached, prints traces of C++
meanwhile, and answers no signal. So both are tried before it is asked.
"""

import resource
import socket

from megaprec.errors import UserError

LOOPBACK = "127.0.0.1"  # where local ranks meet; the name localhost need not resolve
CONNECT_SECONDS = 10.0  # that a connection within this machine may take
FILES = 32  # open files of a launcher, or of a rank, without those that each rank adds
# the launcher's pipe and its store's connection; a rank's connections to its peers
FILES_PER_RANK = 2


def require_local_meeting(ranks: int) -> None:
    """Raise UserError if local ranks cannot meet on this machine.

    A soft limit of open files that is too low is raised as far as the hard limit allows.
    """
    _require_files(FILES + FILES_PER_RANK * ranks)
    _require_loopback()


def _require_files(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError.of("training.open_files", hard=hard, needed=needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _require_loopback() -> None:
    """Raise UserError if this process cannot connect to a port of its own."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            address = server.getsockname()[:2]
            socket.create_connection(address, CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError.of(
            "training.loopback", loopback=LOOPBACK, strerror=error.strerror or error
        ) from error
