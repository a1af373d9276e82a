"""Run proofs and write their cards: python -m tests.proofs [--pages] [NAME ...].

Without names all proofs are run, one after the other. --pages: none is run, and the pages are made
of the records that are there.
"""

import argparse
import sys

from tests.proofs.pages import verdict, write
from tests.proofs.proofs import PROOFS
from tests.proofs.record import run_proof, save


def main() -> int:
    """Return 1 if a proof was wrong."""
    names = [proof.name for proof in PROOFS]
    parser = argparse.ArgumentParser(prog="python -m tests.proofs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--pages", action="store_true", help="write the pages alone")
    args = parser.parse_args()
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"no proof {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    is_wrong = False
    if not args.pages:
        for proof in PROOFS:
            if args.names and proof.name not in args.names:
                continue
            print(f"{proof.name}: {proof.promise}", flush=True)
            record = run_proof(proof)
            save(record)
            is_wrong |= not record.proven
            print(f"{proof.name}: {verdict(record)}, {record.minutes:g} minutes", flush=True)
    write()
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
