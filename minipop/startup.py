"""Ctrl-C while a command of ours is still importing PyTorch, which takes seconds: end at once, without a traceback.

Until `cli.run` answers Ctrl-C with an exit code, the operating system's own way (the process ends) is the quiet one. A program that imports
minipop as a library is left alone.
"""

import signal
import sys


def is_command(arguments: list[str]) -> bool:
    """Whether the interpreter was started as `python -m minipop.something`."""
    return any(flag == "-m" and name.startswith("minipop.") for flag, name in zip(arguments, arguments[1:]))


if is_command(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
