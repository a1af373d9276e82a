"""The end of a run that `megaprec.train` has started: written to a file for the caller."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaprec.checkpoint.atomic import latest
from megaprec.errors import UserError
from megaprec.tokens.places import is_remote
from megaprec.train_program import TrainingResult, tell_end
from tools.config.run_file import RunConfig
from tools.journal.records import HELD_OUT_LOSS, read_metrics
from tools.training.ends import as_user_error
from tools.training.launched import LostRank, OnLostRank


class EndReport:
    """Collects which run it is and why it ended, and writes both at the end.

    file: where `telling` writes; None for a command that a user has started, which writes nothing.
    config: the run, as soon as it is known. reason: why it ended, if it did before its last step.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.config: RunConfig | None = None
        self.reason = ""

    def noting(self, again: OnLostRank) -> OnLostRank:
        """Return a function that notes the message of a lost rank as the reason, and then does what
        `again` does: decides on how many ranks the run goes on."""

        def note(lost_rank: LostRank) -> int:
            self.reason = lost_rank.message
            return again(lost_rank)

        return note

    @contextmanager
    def telling(self) -> Iterator[None]:
        """When the block ends, write how it has ended: its errors, which pass through, and what the
        run has left."""
        if self._file is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = as_user_error(raised)
            self.reason = str(error) or type(error).__name__
            raise
        finally:
            problems = error.problems if isinstance(error, UserError) else ()
            tell_end(self._file, problems, self.reason, self._result())

    def _result(self) -> TrainingResult | None:
        """Return what the run has left; None if it is not known which run it is."""
        if self.config is None:
            return None
        folder = Path(self.config.train.folder).absolute()
        records = read_metrics(folder)
        newest = records[-1] if records else {}
        evaluations = [record[HELD_OUT_LOSS] for record in records if HELD_OUT_LOSS in record]
        checkpoint = None
        with suppress(UserError):  # a damaged one, which the run has named
            place = self.config.checkpoint_folder
            checkpoint = latest(place if is_remote(place) else place.absolute())
        return TrainingResult(
            folder=folder,
            step=newest.get("step", 0),
            loss=newest.get("loss"),
            eval_loss=evaluations[-1] if evaluations else None,
            checkpoint=checkpoint,
        )
