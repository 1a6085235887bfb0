"""What pip calls this package, its version, and the command that installs an extra."""

__version__ = "0.1.0"
DISTRIBUTION = "tatami-torch"
"""`tatami` is another project in the package index."""


def pip_command(extra: str) -> str:
    """The command that installs an extra, also where Tatami itself came from a clone or a wheel."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
