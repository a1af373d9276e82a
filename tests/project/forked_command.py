"""The commands `megaprec`, `python` and `torchrun` in forked processes, which begin in
milliseconds, imports done.

A server that has imported all that commands import waits at a socket. The program that a shell
finds as `megaprec` is a small client, which hands its arguments, folder, environment and streams to
the server, passes signals on, and ends as the forked process did. Local ranks that the command
launches are clients as well. `python` runs a file, `-m` or `-c` in the same way; so does what
either starts as `sys.executable`. The code that runs is that of the command line; how an
interpreter starts it is tested by the README's commands and by the tests of the launcher.

Forked processes have their own process ids and are children of the server: what looks for children
of a command or kills its launcher without a word needs real interpreters. They are on the host that
the client is on (tests/hosts.py).
"""

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from megaprec.front_door import exports_of
from tools import cli
from tools.parts import optional_parts

ROOT = Path(__file__).parents[2]
# What many commands import late, and what a server that forks imports last (tests/frozen.py).
LATE = [
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]
LATE += ["transformers.models.llama.modeling_llama", "tokenizers", "tests.frozen"]
NAMESPACES = ("net", "uts")  # what makes a host of its own
PROGRAMS = ("megaprec", "python", "torchrun")
CLIENT = """#!{python} -ISs
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({place!r})
asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", range(3)))
server.sendmsg([len(asked).to_bytes(8, "big")], [streams])
server.sendall(asked)
answers = server.makefile()
process = int(answers.readline())
def forward(number, _):
    try:
        os.kill(process, number)
    except ProcessLookupError:  # it has just ended, and the next answer says how
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(number, forward)
code = int(answers.readline() or 1)
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def served(folder: Path, late: Sequence[str] = LATE) -> Iterator[Path]:
    """Yield `folder` with the programs of `PROGRAMS`, which work until the end of the context.

    All processes that they started end then too. So they do when this process dies: the server's
    stdin is a pipe that ends with it. late: modules that the server imports besides those of all
    commands.
    """
    place = str(folder / "socket")
    for name in PROGRAMS:
        (folder / name).write_text(CLIENT.format(python=sys.executable, place=place, name=name))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(64)  # who connects waits until the server has imported everything
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.project.forked_command",
                str(folder),
                str(listener.fileno()),
                *late,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            process_group=0,
        )
    try:
        yield folder
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def import_all(names: Sequence[str] = LATE) -> None:
    """Import the modules that are there, in this order."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def _serve(folder: Path, listener: socket.socket, late: Sequence[str]) -> NoReturn:
    """Fork a keeper for each client that connects, and end with all of them once stdin has
    ended."""
    cli.parser_of_all()
    parts = exports_of(Path(optional_parts.__file__))
    modules = [module for module, _ in parts.values()]
    import_all([*modules, *late, "tests.frozen"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    # nohup, which may have started the tests, is not for their commands
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    while True:
        if 0 in select.select([0, listener], [], [])[0]:
            os.killpg(0, signal.SIGKILL)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(folder, connection)
        connection.close()


def _keep(folder: Path, connection: socket.socket) -> NoReturn:
    """Fork the process of a command, tell the client its pid and how it ended, and end it if the
    client is gone."""
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as asking:
        name, argv, here, environment = json.loads(asking.read(int.from_bytes(size, "big")))
    if (process := os.fork()) == 0:
        _join_host_of(connection)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(folder / name, argv, here, environment)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    connection.sendall(f"{process}\n".encode())
    end = os.pidfd_open(process)
    if end not in select.select([connection, end], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _join_host_of(connection: socket.socket) -> None:
    """Enter the namespaces of the client, so that this process has its network and its name of the
    host."""
    if sys.platform == "linux":
        client, _, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        for name in NAMESPACES:
            theirs = Path(f"/proc/{client}/ns/{name}")
            ours = Path(f"/proc/self/ns/{name}")
            if theirs.readlink() != ours.readlink():
                with theirs.open("rb") as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                        raise OSError(ctypes.get_errno(), f"setns {name}")


def _run(client: Path, argv: Sequence[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Run the command line as `python -m megaprec` or as `python` would, and end this process."""
    code = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[0] = folder
        # the server's know another kind of file
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1)
        code = _command(client, argv) if client.name == "megaprec" else _interpret(client, argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _command(client: Path, argv: Sequence[str]) -> int:
    sys.executable = str(client.with_name("python"))
    sys.argv[:] = [str(client), *argv]
    return cli.main(argv)


def _interpret(client: Path, argv: Sequence[str]) -> int:
    """Run what the words of python's command line say: [-u] [-P] and -c code, -m module or a file,
    with arguments."""
    sys.executable = str(client.with_name("python"))
    argv = ["-m", "torch.distributed.run", *argv] if client.name == "torchrun" else argv
    sys.path += [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path not in ("", *sys.path)
    ]
    while argv[0] in ("-u", "-P"):
        argv = argv[1:]
    first, *rest = argv
    if first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = argv
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
    return 0


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), sys.argv[3:])
