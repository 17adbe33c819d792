"""What the commands that draw share: matplotlib when it is wanted, and figures written whole or not at all."""

import os
from pathlib import Path

from .errors import MinipopError
from .files import temporary_beside


def load_pyplot():
    """matplotlib.pyplot, drawing to files only. Raises MinipopError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise MinipopError("--figure needs matplotlib: pip install -e '.[plot]' in the repository") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    return pyplot


def check_figure(path: str | os.PathLike) -> None:
    """Raises MinipopError where matplotlib cannot write what the name's ending says."""
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:
        raise MinipopError(f"--figure {path}: the name must end in one of .{', .'.join(sorted(kinds))}")


def save_figure(figure, path: str | os.PathLike) -> None:
    """Write a figure in the format its name ends in (.png, .pdf, .svg), under a temporary name first."""
    path = Path(path)
    temporary = temporary_beside(path, path.suffix or ".png")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    except (OSError, ValueError) as problem:
        raise MinipopError(f"{path}: the figure cannot be written: {problem}") from None
    finally:
        temporary.unlink(missing_ok=True)
