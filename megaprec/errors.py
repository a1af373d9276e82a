"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """Bad input, said in lines that a user can act on.

    Each problem is one line that names what was given, why it cannot be and what would do. All problems
    found are raised together; the command prints them without a traceback and exits with code 2.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
