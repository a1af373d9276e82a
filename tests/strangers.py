"""Another user of this machine, in tests that run as root."""

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534
MINUTE = 60


def as_nobody(act: Callable[[], Any]) -> Any:
    """What `act` returns in a process of the user nobody; the name of the error that it raises."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    answer, told = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(MINUTE)  # a lock that another thread held at the fork is never free here
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            result = act()
        except BaseException as error:  # the child must not go on with the tests
            result = type(error).__name__
        os.write(told, json.dumps(result).encode())
        os._exit(0)
    os.waitpid(child, 0)
    # not to its end, which processes that the child has left hold open
    result = json.loads(os.read(answer, 1 << 16))
    os.close(answer)
    os.close(told)
    return result
