"""The table."""


def table() -> str:
    """The table."""
    return ""
