"""Joining the world: all ranks connect to one store, and rank 0 waits until the last one has.

torch's own rendezvous waits without a word, and at the end does not say for whom. Here each rank
writes the name of its host into the store. While rank 0 waits it says for which ranks, and a rank
that cannot reach the store says where it looks for it. All give up after the same time.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from threading import Event, Thread

import torch.distributed as dist

from megaprec.errors import UserError
from parallel.described_world import (
    is_rank_of_world,
    lone_task,
    require_consistent,
    waits_for_a_person,
)
from parallel.local_store import STORE, LocalStore
from parallel.loopback import INTERFACE, ONE_MACHINE

JOIN = 600.0  # seconds in which all ranks must have joined
NEWS = 30.0  # seconds between lines about waiting
ALONE = 3.0  # seconds after which a task of Slurm without any other says so
LOOPBACK = "127.0.0.1"
SECONDS_TO_READ = 1.0  # seconds in which others read why rank 0, which has the store, gives up
SHOWN = 8  # ranks that a line names at most
OUTCOME = "why not all ranks have joined"  # key of the store; empty if they have


def join(
    environment: Mapping[str, str] = os.environ,
    seconds: float = 0.0,
    over_gloo: bool = False,
) -> tuple[dist.Store, int, int]:
    """Return the ranks' store, this rank and the number of ranks, once all ranks have joined.

    environment: describes the world. Without torchrun's variables it is this process alone.
    seconds: the time limit; 0: JOIN.
    over_gloo: the ranks will communicate over gloo.
    Raises UserError on every rank that has joined if others have not within the time limit; for
    variables that describe no world; and over gloo if a rank would tell the others an address that
    only its own machine reaches.
    """
    seconds = seconds or JOIN
    if not is_rank_of_world(environment):
        return dist.HashStore(), 0, 1
    require_consistent(environment)
    rank = int(environment["RANK"])
    size = int(environment["WORLD_SIZE"])
    if environment.get(STORE):
        store = LocalStore(Path(environment[STORE]), timedelta(seconds=seconds))
    else:
        store = _connect(environment, rank, size, seconds)
    # tells rank 0 that this rank is there, and where
    seat = Seat.of_this_process()
    store.set(_key(rank), json.dumps(asdict(seat)))
    if rank == 0:
        problem = _decide_outcome(store, size, seconds, environment, over_gloo)
        store.set(OUTCOME, problem)
        # the store ends with this process, and the others are to read why
        if problem:
            time.sleep(SECONDS_TO_READ)
    else:
        # longer than rank 0 waits for the ranks, so that its reason arrives first
        store.wait([OUTCOME], timedelta(seconds=seconds + 10))
        problem = store.get(OUTCOME).decode()
    if problem:
        raise UserError(problem)
    return store, rank, size


def _decide_outcome(
    store: dist.Store,
    size: int,
    seconds: float,
    environment: Mapping[str, str],
    over_gloo: bool,
) -> str:
    """Wait on rank 0 for all ranks, and note in the store whether they are on one machine. Return
    the reason why they cannot work together, "" if they can.

    The arguments are those of `join`; size: the number of ranks.
    """
    alone_line = lone_task(environment)
    ends_alone = waits_for_a_person(environment, _reads_a_terminal())
    problem = _wait_for_ranks(store, size, seconds, alone_line, ends_alone)
    if problem:
        return problem
    seats = _read_seats(store, range(size))
    store.set(ONE_MACHINE, "yes" if _on_one_machine(seats) else "no")
    return _unreachable(seats) if over_gloo else ""


def _connect(
    environment: Mapping[str, str],
    rank: int,
    size: int,
    seconds: float,
) -> dist.Store:
    """Return a connection to torch's store at MASTER_ADDR and MASTER_PORT. Rank 0 hosts the store
    itself, unless torchrun's agent does.

    seconds: the time limit of the connection and of each request. Raises UserError if the store
    cannot be opened or reached.
    """
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    hosts_store = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=seconds)
    here = f"rank {rank} on {socket.gethostname()}"

    def waiting_line() -> str:
        waits = f"{here} waits for the ranks' store at {address}:{port}"
        unknown = _why_unknown(address)
        return f"{waits} ({unknown})" if unknown else waits

    try:
        with _report_waiting(waiting_line):
            return dist.TCPStore(
                address,
                port,
                size,
                hosts_store,
                limit,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=_listen_on_loopback(address, port) if hosts_store else None,
            )
    except (dist.DistError, OSError) as error:
        reason = _why_unknown(address) or str(error).splitlines()[0]
        if hosts_store:
            raise UserError.of(
                "parallel.port_not_opened", here=here, port=port, reason=reason
            ) from error
        raise UserError.of(
            "parallel.no_answer",
            here=here,
            address=address,
            port=port,
            seconds=seconds,
            reason=reason,
        ) from error


def _why_unknown(address: str) -> str:
    """Return why this machine cannot resolve the address of the first one, MASTER_ADDR; "" if it
    can."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host's name"
        return f"MASTER_ADDR {address}: {reason}"
    return ""


def _listen_on_loopback(address: str, port: int) -> int | None:
    """Return the file descriptor of a socket that listens at a loopback address, for torch's store;
    None for any other address.

    By itself torch's store would listen on all interfaces, although no rank on another machine
    reaches a loopback address.
    """
    try:
        family, *_, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    host, *_ = socket_address
    if not ip_address(host).is_loopback:
        return None
    return socket.create_server(socket_address, family=family).detach()


@dataclass(frozen=True)
class Seat:
    """The place where a rank runs.

    network: identifies machine and network namespace.
    address: at which gloo would be reached; "" if an interface is named.
    """

    host: str
    network: str
    address: str

    @staticmethod
    def of_this_process() -> "Seat":
        """Return the seat of this process."""
        host = socket.gethostname()
        address = "" if os.environ.get(INTERFACE) else _address_of(host)
        return Seat(host, _network_id(host), address)


def _network_id(host: str) -> str:
    """Return a name for this machine and its network namespace; `host` where the system has no
    /proc."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return host


def _address_of(host: str) -> str:
    """Return the address that torch gives gloo without GLOO_SOCKET_IFNAME.

    It is the first address of the host's name to which a socket can be bound; a loopback address if
    there is none.
    """
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return LOOPBACK
    for family, kind, protocol, _, socket_address in candidates:
        with suppress(OSError), socket.socket(family, kind, protocol) as trial:
            trial.bind(socket_address)
            return str(socket_address[0])
    return LOOPBACK


def _on_one_machine(seats: Sequence[Seat]) -> bool:
    return len({seat.network for seat in seats}) == 1


def _unreachable(seats: Sequence[Seat]) -> str:
    """Return why ranks could not reach each other over gloo, "" if they may: they are on several
    machines, and one would tell the others a loopback address."""
    if _on_one_machine(seats):
        return ""
    for seat in seats:
        if seat.address and ip_address(seat.address).is_loopback:
            return (
                f"{seat.host} is {seat.address} to itself (/etc/hosts), which no other machine "
                f"reaches: set {INTERFACE} on each machine to the network interface that joins "
                "them (ip -brief address lists them), such as eth0"
            )
    return ""


def _reads_a_terminal() -> bool:
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _wait_for_ranks(
    store: dist.Store,
    size: int,
    seconds: float,
    alone_line: str = "",
    ends_alone: bool = False,
) -> str:
    """Wait on rank 0 until all ranks are in the store, and print news of it. Return the reason why
    some are missing, "" if none is.

    seconds: the time limit.
    alone_line: a line for the case that no other rank has joined after ALONE seconds; "": none.
    ends_alone: that line is then the reason; otherwise it is printed, and waiting goes on.
    """
    start = time.monotonic()
    next_news = NEWS
    missing = list(range(size))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        waited = time.monotonic() - start
        if alone_line and waited > ALONE and len(missing) == size - 1:
            if ends_alone:
                return alone_line
            print(f"{alone_line} (waiting goes on)", file=sys.stderr, flush=True)
            alone_line = ""  # printed once
        line = f"{_count_missing(missing, size)} not joined"  # "ranks 1, 2 of 4 have not joined"
        if waited > seconds:
            joined = [rank for rank in range(size) if rank not in missing]
            hosts = sorted({seat.host for seat in _read_seats(store, joined)})
            return f"{line} within {seconds:.0f} s; there are the ranks of {', '.join(hosts)}"
        if waited > next_news:
            print(f"{line} for {waited:.0f} s so far", file=sys.stderr, flush=True)
            next_news += NEWS
        # seldom in a long wait: each rank is a request to the store
        time.sleep(min(1.0, 0.01 + waited / 20))
    return ""


def _count_missing(missing: list[int], size: int) -> str:
    """Return the beginning of a sentence about ranks: "ranks 1, 2 of 4 have"."""
    numbers = ", ".join(map(str, missing[:SHOWN]))
    if len(missing) > SHOWN:
        numbers += ", ..."
    if len(missing) > 1:
        return f"ranks {numbers} of {size} have"
    return f"rank {numbers} of {size} has"


def _read_seats(store: dist.Store, ranks: Iterable[int]) -> list[Seat]:
    texts = store.multi_get([_key(rank) for rank in ranks])
    return [Seat(**json.loads(text)) for text in texts]


def _key(rank: int) -> str:
    return f"host of rank {rank}"


@contextmanager
def _report_waiting(line: Callable[[], str]) -> Iterator[None]:
    """Within the context, print the line and the seconds every NEWS seconds."""
    over = Event()
    start = time.monotonic()

    def report() -> None:
        while not over.wait(NEWS):
            waited = time.monotonic() - start
            print(f"{line()}: {waited:.0f} s so far", file=sys.stderr, flush=True)

    thread = Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
