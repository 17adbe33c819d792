"""PrefillPlan: which layers the prefill skips, and how (arXiv 2602.03295, sections 3 and 4.4)."""

import json
import math
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Iterable

from .errors import PlanError
from .files import read_json, write_text

MAX_LAYER = 10_000  # no model is that deep; a range beyond it is a slip of the keyboard


@dataclass(frozen=True)
class PrefillPlan:
    """Layers to skip while the prompt is encoded; decoding always runs them all.

    num_layers: L of the model. skip: layer indices, 0-based, any set.
    project_kv: skipped layers still write K/V for the prompt (the paper's independent projections). False is an ablation:
        those rows are then masked out of attention in that layer.
    split_boundary: the last prompt token runs through all layers (the paper's boundary handling). False is an ablation.
    kv: a file of calibrated K/V projections made by `python -m minipop.calibrate`, or None for the model's own W_K, W_V.

    Raises PlanError for indices outside the model. (Whether a kv file belongs to the model and the plan is for the Runner to say.)
    """

    num_layers: int
    skip: frozenset[int] = frozenset()
    project_kv: bool = True
    split_boundary: bool = True
    kv: str | None = None

    def __post_init__(self):
        if type(self.num_layers) is not int or self.num_layers < 1:
            raise PlanError(f"num_layers must be a positive whole number, not {self.num_layers!r:.60}")
        try:
            layers = list(self.skip)
        except TypeError:
            raise PlanError(f"skip must be a set of layer indices, not {self.skip!r:.60}") from None
        wrong = [i for i in layers if type(i) is not int or not 0 <= i < self.num_layers]
        if wrong:
            raise PlanError(f"skip names layer {wrong[0]!r:.60}; the model has layers 0 to {self.num_layers - 1}")
        for name in ("project_kv", "split_boundary"):
            if type(getattr(self, name)) is not bool:
                raise PlanError(f"{name} must be True or False, not {getattr(self, name)!r:.60}")
        object.__setattr__(self, "skip", frozenset(layers))
        if self.kv is not None and (not isinstance(self.kv, (str, os.PathLike)) or not os.fspath(self.kv)):
            raise PlanError(f"kv must be the name of a file of calibrated K/V, not {self.kv!r:.60}")
        object.__setattr__(self, "kv", None if self.kv is None else os.fspath(self.kv))

    @classmethod
    def full(cls, num_layers: int) -> "PrefillPlan":
        """Skip nothing: the plain model."""
        return cls(num_layers)

    @classmethod
    def deepest(cls, num_layers: int, ratio: float | str | Fraction = 1 / 3, kv: str | None = None) -> "PrefillPlan":
        """Skip the floor(ratio * L) deepest layers: 10 of 30, 10 of 32, 12 of 36, 16 of 48 for one third."""
        cls.full(num_layers)  # refuses a number that is none
        count = math.floor(parse_ratio(ratio) * num_layers + 1e-9)  # 1e-9: a third written as 0.333333333333 is meant as one
        return cls(num_layers, frozenset(range(num_layers - count, num_layers)), kv=kv)

    @property
    def is_suffix(self) -> bool:
        """Whether the skipped layers are exactly the deepest ones (the empty set counts)."""
        return self.skip == frozenset(range(self.cut, self.num_layers))

    @property
    def cut(self) -> int:
        """Number of layers the plan runs below a suffix: the first skipped layer's index when `is_suffix`."""
        return self.num_layers - len(self.skip)

    def describe(self) -> str:
        """For people: "10 of 30 layers skipped in prefill (20-29)"."""
        if not self.skip:
            return f"full: all {self.num_layers} layers run in prefill"
        text = f"{len(self.skip)} of {self.num_layers} layers skipped in prefill ({format_layers(self.skip)})"
        notes = [note for note, on in (("no K/V in skipped layers", not self.project_kv),
                                       ("no boundary split", not self.split_boundary), ("calibrated K/V", self.kv)) if on]
        return text + "".join(f", {note}" for note in notes)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, through a temporary file."""
        path = Path(path)
        values = {"num_layers": self.num_layers, "skip": sorted(self.skip), "project_kv": self.project_kv,
                  "split_boundary": self.split_boundary, "kv": self.kv}
        write_text(path, json.dumps(values) + "\n", PlanError)

    @classmethod
    def load(cls, path: str | Path) -> "PrefillPlan":
        """Read a plan file. Raises PlanError when it is not one."""
        values = read_json(Path(path), PlanError)
        known = {"num_layers", "skip", "project_kv", "split_boundary", "kv"}
        if not {"num_layers", "skip"} <= values.keys() <= known:
            raise PlanError(f"{path}: a plan file has the keys num_layers and skip (and project_kv, split_boundary, kv), "
                            f"this one has {sorted(values)!r:.200}")
        if not isinstance(values["skip"], list) or not isinstance(values.get("kv"), (str, type(None))):
            raise PlanError(f"{path}: skip must be a list of layer indices and kv a file name or null")
        try:
            return cls(**values)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def ablations(num_layers: int, ratio: float | str | Fraction = 1 / 3) -> dict[str, PrefillPlan]:
    """The paper's ablations by name (section 4.4): POP, the whole model, and POP with one choice made otherwise.

    All but "full" skip as many layers as POP does. "every third layer" skips 2, 5, 8, ... at one third, and at another ratio layers at
    that density, evenly spread.
    """
    pop = PrefillPlan.deepest(num_layers, ratio)
    count, ratio = len(pop.skip), parse_ratio(ratio)
    spread = frozenset(math.floor((i + 1) / ratio + 1e-9) - 1 for i in range(count))
    return {"full": PrefillPlan.full(num_layers), "POP": pop,
            "first third": PrefillPlan(num_layers, frozenset(range(count))), "every third layer": PrefillPlan(num_layers, spread),
            "no K/V": PrefillPlan(num_layers, pop.skip, project_kv=False), "no boundary": PrefillPlan(num_layers, pop.skip, split_boundary=False)}


def ratio_sweep(num_layers: int, ratios: Iterable[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)) -> dict[float, PrefillPlan]:
    """POP at each ratio."""
    return {ratio: PrefillPlan.deepest(num_layers, ratio) for ratio in ratios}


def parse_ratio(value: float | str | Fraction) -> float:
    """A share of the layers: 0.25, "0.25" or "1/3"; at least 0 and at most 1."""
    try:
        # Only a/b is left to Fraction: it would also write out 1e999999999, digit by digit.
        ratio = float(Fraction(value.strip()) if isinstance(value, str) and "/" in value else value)
    except (ValueError, ZeroDivisionError, TypeError, OverflowError):
        raise PlanError(f"ratio must be a number or a fraction like 1/3, not {value!r:.60}") from None
    if not 0 <= ratio <= 1:
        raise PlanError(f"ratio must lie between 0 and 1, not {value!r:.60}")
    return ratio


def parse_layers(text: str) -> frozenset[int]:
    """ "20-29" or "3,6,9-11" -> the layer indices; the empty string is the empty set."""
    layers: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isdecimal() and (not dash or last.isdecimal())) or len(part) > 20:
            raise PlanError(f"cannot read layers {text!r:.60}: write indices and ranges like 3,6,20-29")
        low, high = int(first), int(last or first)
        if high < low or high > MAX_LAYER:
            raise PlanError(f"cannot read layers {text!r:.60}: {part!r} is not a range from low to high, up to {MAX_LAYER}")
        layers.update(range(low, high + 1))
    return frozenset(layers)


def format_layers(layers: Iterable[int]) -> str:
    """The reverse of parse_layers: {3, 20, 21, 22} -> "3,20-22"."""
    runs: list[list[int]] = []
    for i in sorted(layers):
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
