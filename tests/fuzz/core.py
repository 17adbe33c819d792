"""What a fuzz target is, and how a bounded number of inputs is tried on it.

An input (a case) is plain data: None, bools, numbers, strings, bytes, lists, dicts with string keys. So whatever breaks something can be
written to a file and tried again, without the random numbers that led to it.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import hypothesis.errors
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from minipop.errors import MinipopError

LONGEST_MESSAGE = 4000  # characters: ten tensors are listed with their names, which are cut at 200


@dataclass(frozen=True)
class Target:
    """One kind of input. check(case) gives the outcome ("refused", "fine", ...); an exception from it is a fault."""

    name: str
    what: str  # what is fed where, for people
    cases: SearchStrategy
    check: Callable[[Any], str]
    examples: int = 100  # how many inputs the test suite tries
    outcomes: tuple[str, ...] = ("refused", "fine")  # those that inputs must have led to, or the target tests too little


@dataclass
class Tally:
    """What a run saw. case: the latest input; after a fault, the smallest one that shows it."""

    inputs: int = 0
    outcomes: Counter = field(default_factory=Counter)
    case: Any = None


class Fault(AssertionError):
    """What must not happen: an exception that is no MinipopError, or an answer that is wrong."""


def judge(target: Target, case: Any) -> str:
    """Try one input: its outcome. Raises Fault, whatever went wrong, also for panics of native libraries."""
    try:
        return target.check(case)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: B036  a panic in tokenizers is a BaseException
        raise Fault(f"{type(problem).__name__}: {problem}") from problem


def run(target: Target, seed: int, examples: int, tally: Tally, before: Callable[[Any], bool] = lambda case: True) -> None:
    """Try `examples` random inputs. before(case) is called first; where it says no, the input is passed over.

    Raises Fault for the smallest input found that shows it; `tally.case` is that input. So it does for one that fails only at times.
    """

    @hypothesis.seed(seed)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
              phases=(Phase.generate, Phase.shrink), print_blob=False)
    @given(target.cases)
    def trial(case):
        if before(case):
            tally.inputs, tally.case = tally.inputs + 1, case
            tally.outcomes[judge(target, case)] += 1

    try:
        trial()
    except hypothesis.errors.Flaky as flaky:
        raise Fault(f"at times: {flaky}") from flaky


def attempt(function: Callable, *arguments, **options) -> tuple[Any, MinipopError | None]:
    """(result, None), or (None, the MinipopError it was refused with), whose message must be one clear line."""
    try:
        return function(*arguments, **options), None
    except MinipopError as problem:
        check_message(str(problem))
        return None, problem


def check_message(text: str) -> None:
    """One line, not empty, not endless, with nothing in it that moves a terminal's cursor."""
    assert text.strip(), "an error without a message"
    assert text.isprintable(), f"a message that cannot be shown on one line: {text!r:.500}"
    assert len(text) <= LONGEST_MESSAGE, f"a message of {len(text)} characters: {text[:200]!r}"


# --- cases as files ---------------------------------------------------------------------------------------------------------------


def to_json(case: Any) -> Any:
    """A case with its bytes as {"bytes": base64}."""
    if isinstance(case, bytes):
        return {"bytes": base64.b64encode(case).decode()}
    if isinstance(case, dict):
        return {key: to_json(value) for key, value in case.items()}
    return [to_json(value) for value in case] if isinstance(case, (list, tuple)) else case


def from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"bytes"} and isinstance(value["bytes"], str):
            return base64.b64decode(value["bytes"])
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def dump_case(name: str, seed: int, case: Any, fault: str) -> str:
    return json.dumps({"target": name, "seed": seed, "fault": fault, "case": to_json(case)}, indent=1) + "\n"


def load_case(text: str) -> tuple[str, Any]:
    """(target's name, case) of a saved finding. Raises ValueError if the file is none."""
    values = json.loads(text)
    if not isinstance(values, dict) or not isinstance(values.get("target"), str) or "case" not in values:
        raise ValueError("no saved finding")
    return values["target"], from_json(values["case"])
