"""A bounded number of inputs of every target. The seed is fixed; scripts/fuzz.py tries others, for longer."""

import json

import pytest
from hypothesis import strategies as st

from minipop.errors import MinipopError

from .core import Fault, Tally, Target, attempt, check_message, dump_case, judge, load_case, run
from .targets import TARGETS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_a_fault(name):
    target, tally = TARGETS[name], Tally()
    try:
        run(target, 0, target.examples, tally)
    except Fault as fault:
        pytest.fail(f"{fault}\nscripts/fuzz.py --replay can try this file again:\n{dump_case(name, 0, tally.case, str(fault))}")
    assert tally.inputs >= target.examples
    assert set(target.outcomes) <= set(tally.outcomes), f"the inputs led to {dict(tally.outcomes)} only"


# --- the harness itself -----------------------------------------------------------------------------------------------------------------


def raising(problem):
    def check(number):
        if number > 100:
            raise problem
        return "fine"

    return Target("test", "", st.integers(0, 10**6), check)


class Panic(BaseException):
    """As a native library's panic arrives in Python."""


@pytest.mark.parametrize("problem", [ValueError("x"), AssertionError("x"), Panic("x"), RecursionError("x")])
def test_a_fault_is_found_and_made_small(problem):
    tally = Tally()
    with pytest.raises(Fault, match=f"{type(problem).__name__}: x"):
        run(raising(problem), 3, 200, tally)
    assert tally.case == 101
    with pytest.raises(Fault):
        judge(raising(problem), 101)


def test_the_same_seed_gives_the_same_inputs():
    def seen(seed):
        cases = []
        run(Target("test", "", st.text(), lambda case: cases.append(case) or "fine"), seed, 20, Tally())
        return cases

    assert seen(1) == seen(1) != seen(2)


def test_refusals_must_be_one_clear_line():
    def refuse(text):
        raise MinipopError(text)

    assert attempt(refuse, "a line")[0] is None and attempt(len, "abc") == (3, None)
    for bad in ("", " ", "two\nlines", "\x1b[2J", "x" * 5000, "half \ud800"):
        with pytest.raises(AssertionError):
            attempt(refuse, bad)
    check_message("wide 世界 letters")


def test_cases_survive_their_files():
    for case in (None, b"\xff\0", [1, [2.5, "\ud800"], {"a": b"", "b": True}], {"bytes": "not bytes", "x": 1}, float("inf")):
        assert load_case(dump_case("name", 1, case, "why")) == ("name", case)
    for bad in ("[]", "{}", "nonsense", json.dumps({"target": 1, "case": 2})):
        with pytest.raises(ValueError):
            load_case(bad)
