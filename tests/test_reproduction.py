"""scripts/reproduce.py: the page from given results, and steps of it on a tiny checkpoint."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_evaluate import data, tokenizer_files  # noqa: F401 (a fixture)
from tests.test_inspect import save_tiny

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import reproduce  # noqa: E402
from reproduction import report  # noqa: E402
from reproduction.steps import QUICK, Study, steps  # noqa: E402

pytest.importorskip("matplotlib")


def write(folder: Path, **steps) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in steps.items():
        (folder / f"{name.replace('_', ' ')}.json").write_text(json.dumps({"settings": {}, "seconds": 1.0, "result": result}))


def cells(page: str, row: str) -> list[str]:
    """Of the first line of a table that begins with `row`."""
    return [cell.strip() for cell in next(line for line in page.splitlines() if line.startswith(f"| {row} |")).split("|")[2:-1]]


def test_differences_are_paired():
    mean, error = report.difference([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0])
    assert mean == 0.5 and math.isclose(error, math.sqrt(1 / 3) / 2)  # of 1, 0, 0, 1
    assert report.show("minipop_piqa", [1.0, 0.0], [1.0, 1.0]) == "50.0 (-50.0 ± 50.0)"
    assert report.show("minipop_continuation", [3.25]) == "3.250"
    assert report.show("minipop_continuation", [3.25], [3.0]) == "3.250 (+0.250)"  # one item has no error


def test_speedups_are_of_one_turn():
    """The machine was twice as slow in the second turn: that cancels."""
    assert report.speedups({"full": [3.0, 6.0, 3.0], "POP": [2.0, 4.0, 1.5]}, "POP") == (1.5, 1.5, 2.0)


def test_the_page(tmp_path):
    tasks = {"minipop_piqa": [1.0, 1.0, 1.0, 0.0], "minipop_boolq": [1.0, 0.0, 0.0, 0.0], "minipop_continuation": [3.0, 4.0]}
    pop = {"minipop_piqa": [1.0, 1.0, 0.0, 0.0], "minipop_boolq": [1.0] * 4, "minipop_continuation": [3.5, 4.5]}
    seconds = {"full": [3.0, 3.0], "POP": [2.0, 2.0]}
    sweep = {name: {"skipped": n, "minipop_continuation": [3.0 + n, 3.0 + n]} for name, n in (("0%", 0), ("50%", 3), ("50% calibrated", 3))}
    write(tmp_path / "results" / "tiny", quality_full=tasks, quality_POP=pop,
          speed={"dtype": "float32", "threads": 1, "torch": "2", "processor": "a CPU", "prompts": {"512": {"seconds": seconds, "ideal": 1.6}}, "swept": "1024",
                 "sweep": {name: {"seconds": [4.0 - n, 4.0 - n], "ideal": 1.0 + n} for name, n in (("0%", 0), ("50%", 3), ("50% calibrated", 3))}},
          sweep=sweep, calibration={"samples": 2, "tokens": 9, "fresh": 2, "full": [1.0, 2.0],
                                    "cuts": [{"skipped": 2, "pop": [2.0, 3.0], "calibrated": [1.25, 2.25]}]},
          importance={"prefill": [4.0, 1.0, 0.0], "decode": [1.0, 1.0, 2.0], "prefill_stderr": [0.1] * 3, "decode_stderr": [0.1] * 3, "samples": 5,
                      "response_tokens": 8, "validation": {"samples": 3, "removal": [[1, 2, 3]] * 2, "rank_correlation": [0.5, 1.0]}},
          ablation={name: {"minipop_continuation": [float(i)] * 2} for i, name in enumerate(report.PLANS)})
    page = report.write(tmp_path / "results", tmp_path / "RESULTS.md", "a command")
    assert cells(page, "full") != cells(page, "POP")
    table = page[page.index("### Quality and prefill speed"):]
    assert cells(table, "POP") == ["50.0 (-25.0 ± 25.0)", "100.0 (+75.0 ± 25.0)", "4.000 (+0.500 ± 0.000)", "66.7%", "1.50x"]
    assert "without BoolQ, where full is not above chance" in table
    assert cells(page[page.index("### Time to first token"):], "POP") == ["1.50x (1.50-1.50)"]
    assert cells(page, "50% (3)")[0] == "6.000 (+3.000 ± 0.000)" and cells(page, "50% (3)")[1:3] == ["4.00x", "4.00x"]
    assert cells(page[page.index("### Calibrated K/V"):], "2")[-1] == "75%"
    assert "hold 0.0% of all prefill importance and 50.0% of all decode importance" in page
    assert {file.name for file in tmp_path.glob("*.png")} == {"tiny-ratio.png", "tiny-importance.png"}


def test_a_step_is_made_once(tmp_path, data):  # noqa: F811
    """A run writes a file a step, goes on from there, and the page holds what was measured."""
    save_tiny(tmp_path / "tiny", "llama", extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=1, pad_token_id=1, max_position_embeddings=640)
    (data / "calibration").mkdir(exist_ok=True)
    (data / "calibration" / "text.txt").write_text((data / "continuation" / "text.txt").read_text())

    def run(*options: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, ROOT / "scripts" / "reproduce.py", "--ckpt", tmp_path / "tiny", "--quick", "--data", data, "--results",
                               tmp_path / "results", *options], capture_output=True, text=True)

    first = run("--only", "quality full,quality POP")
    assert first.returncode == 2 and "run the step 'calibration' first (--only calibration) (all it said is in " in first.stderr
    made = json.loads((tmp_path / "results" / "tiny" / "quality POP.json").read_text())
    assert len(made["result"]["minipop_piqa"]) == 4 == made["settings"]["choice_items"]
    again = run("--only", "quality full")
    assert again.returncode == 0 and "quality" not in again.stderr and "| POP |" in (tmp_path / "results" / "RESULTS.md").read_text()
    (tmp_path / "results" / "RESULTS.md").unlink()
    assert run("--report").returncode == 0 and "| POP |" in (tmp_path / "results" / "RESULTS.md").read_text()


class Process:
    """Stands in for a step's process: ends when it has been asked three times, with the exit code that `codes` has for it."""

    running: list["Process"] = []
    history: list[tuple[str, str, set[str]]] = []  # of each start: checkpoint, step, what ran beside it
    codes: dict[str, int] = {}

    def __init__(self, command, env, stderr):
        self.name, self.threads, self.asked, self.returncode = command[command.index("--step") + 1], env["OMP_NUM_THREADS"], 0, None
        Process.history.append((Path(command[command.index("--ckpt") + 1]).name, self.name, {other.name for other in Process.running}))
        Process.running.append(self)

    def poll(self):
        self.asked += 1
        if self.asked == 3:
            self.returncode = self.codes.get(self.name, 0)
            Process.running.remove(self)
        return self.returncode


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """All steps of two checkpoints; nothing is really started."""
    monkeypatch.setattr(Process, "running", [])
    monkeypatch.setattr(Process, "history", [])
    monkeypatch.setattr(reproduce.subprocess, "Popen", Process)
    monkeypatch.setattr(reproduce.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(reproduce, "report_step", lambda *arguments: None)
    found = []
    for family in ("llama", "gemma3_text"):
        save_tiny(tmp_path / family, family)
        (tmp_path / "results" / family).mkdir(parents=True)
        study = Study(tmp_path / family, tmp_path / "results" / family, tmp_path, QUICK)
        found += [reproduce.Job(study, step) for step in steps(study)]
    return found


def test_steps_side_by_side_wait_for_what_they_need(jobs):
    reproduce.run_side_by_side(jobs, 2, [])
    order = [(folder, name) for folder, name, _ in Process.history]
    assert sorted(order) == sorted((job.study.folder.name, job.step.name) for job in jobs)
    for job in jobs:
        for need in job.step.needs:
            assert order.index((job.study.folder.name, need)) < order.index((job.study.folder.name, job.step.name))
    assert {len(beside) for _, name, beside in Process.history if name != "speed"} == {0, 1}
    assert all(name == "speed" and not beside for _, name, beside in Process.history[-2:])  # the timings: last, and alone


def test_a_step_that_fails_starts_no_others(jobs, monkeypatch):
    monkeypatch.setattr(Process, "codes", {"baselines": 2})
    with pytest.raises(reproduce.MinipopError, match="llama: baselines, gemma3_text: baselines failed|llama: baselines failed"):
        reproduce.run_side_by_side(jobs, 2, [])
    assert not Process.running and len(Process.history) == 4


def test_without_data(tmp_path):
    wrong = subprocess.run([sys.executable, ROOT / "scripts" / "reproduce.py", "--ckpt", tmp_path, "--data", tmp_path], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and "fetch_eval_data.py" in wrong.stderr


def test_mistakes(tmp_path):
    """One line, and the page is left as it is."""
    def run(*options) -> str:
        done = subprocess.run([sys.executable, ROOT / "scripts" / "reproduce.py", *map(str, options)], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
        return done.stderr

    page = ROOT / "docs" / "RESULTS.md"
    before = page.read_text()
    (tmp_path / "calibration").mkdir()
    ready = ("--ckpt", ROOT / "weights" / "tiny-qwen3-vl", "--data", tmp_path, "--results", tmp_path / "results")
    assert "no step has such a name; there are calibration, " in run(*ready, "--only", "nosuch")
    assert "there are no results yet" in run("--report", "--results", tmp_path / "none")
    (tmp_path / "results" / "tiny-qwen3-vl" / "speed.json").write_text("{")
    assert "speed.json" in run("--report", "--results", tmp_path / "results")
    (tmp_path / "results" / "tiny-qwen3-vl" / "checkpoint.txt").write_text("of another")
    assert "holds results of another checkpoint" in run(*ready, "--only", "speed")
    assert page.read_text() == before
