"""How checkpoints spell the names of their tensors, and how a rename table becomes a list of sources."""

from collections.abc import Collection, Mapping

from ..errors import CheckpointError

Sources = dict[str, tuple[str, ...]]  # a parameter of ours -> the checkpoint's tensors, stacked along dim 0


def find_prefix(names: Collection[str], prefixes: tuple[str, ...], probe: str) -> str:
    """The prefix under which the tensor `probe` lies in the checkpoint. Raises CheckpointError if it is under none."""
    for prefix in prefixes:
        if prefix + probe in names:
            return prefix
    raise CheckpointError(f"the checkpoint has no tensor {probe} under any known prefix ({', '.join(prefixes)}): is it a "
                          "checkpoint of the family that config.json names?")


def expand(table: Mapping[str, str | tuple[str, ...]], prefix: str = "", ours: str = "", **counts: int) -> Sources:
    """Write a rename table out in full: "{i}" runs over 0 .. counts["i"] - 1; `prefix` is the checkpoint's, `ours` the model's."""
    sources: Sources = {}
    for name, theirs in table.items():
        theirs = (theirs,) if isinstance(theirs, str) else theirs
        counter = next((c for c in counts if "{" + c + "}" in name), None)
        for value in range(counts[counter]) if counter else (None,):
            fill = {counter: value} if counter else {}
            sources[ours + name.format(**fill)] = tuple(prefix + t.format(**fill) for t in theirs)
    return sources
