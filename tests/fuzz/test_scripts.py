"""scripts/fuzz.py and scripts/soak.py: they find what is wrong, keep it, and say so with their exit code."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .core import dump_case, load_case

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fuzz():
    return load("fuzz")


@pytest.fixture(scope="module")
def soak():
    return load("soak")


def test_replay(fuzz, tmp_path, capsys):
    (tmp_path / "good.json").write_text(dump_case("plan", 1, ["layers", "1-3"], "none"))
    assert fuzz.main(["--replay", str(tmp_path / "good.json")]) == 0
    assert capsys.readouterr().out == "plan: fine\n"
    (tmp_path / "bad.json").write_text(dump_case("plan", 1, ["file", "text instead of bytes"], "TypeError"))
    assert fuzz.main(["--replay", str(tmp_path / "bad.json")]) == 1
    assert "TypeError" in capsys.readouterr().err
    assert fuzz.main(["--list"]) == 0
    assert "safetensors" in capsys.readouterr().out


def test_a_worker_counts_its_inputs_and_leaves_nothing(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPTS / "fuzz.py"), "--worker", "--target", "plan", "--seed", "5", "--seconds", "1", "--out", str(tmp_path)],
                          capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    tally = json.loads(done.stdout)
    assert done.returncode == 0 and tally["fault"] is None and sum(tally["outcomes"].values()) == tally["inputs"] > 0
    assert list(tmp_path.iterdir()) == []


class Process:
    """A worker that ends as told."""

    def __init__(self, out, name, returncode, stdout, stderr=""):
        self.returncode, self.output = returncode, (stdout, stderr)
        (out / f".{name}.current").write_text(dump_case(name, 3, b"deadly", "the process died or hung"))

    def communicate(self, timeout=None):
        return self.output


def test_a_worker_that_dies_leaves_its_last_input(fuzz, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fuzz.subprocess, "Popen", lambda *a, **k: Process(tmp_path, "image", -11, "", "Segmentation fault\n"))
    assert "Segmentation fault" in fuzz.supervise("image", 3, 1.0, tmp_path)
    assert load_case((tmp_path / "image-died-3.json").read_text()) == ("image", b"deadly")
    found = json.dumps({"inputs": 7, "outcomes": {"fine": 7}, "fault": "ValueError: x", "file": "f.json"})
    monkeypatch.setattr(fuzz.subprocess, "Popen", lambda *a, **k: Process(tmp_path, "image", 0, found))
    assert fuzz.supervise("image", 3, 1.0, tmp_path) == "image: ValueError: x (f.json)"
    assert "7 inputs: 7 fine" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "supervise", lambda *a: "image: broken")
    assert fuzz.main(["--target", "image", "--seconds", "1"]) == 1


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_a_short_soak(soak, family):
    run = soak.Soak(family, 1, 5)
    for _ in range(12):
        run.turn()
        run.check()
    assert run.counts["answers"] and run.counts["checks"] == 12


def test_a_soak_finds_a_cache_that_is_wrong(soak, monkeypatch, capsys):
    run = soak.Soak("llama", 2, 1)
    original = run.turn

    def turn():
        original()
        run.session.runner.cache.keys[0, 0, 0, :1] += 0.5

    monkeypatch.setattr(run, "turn", turn)
    assert run.run(20) == 1
    assert "of seed 2: keys of row 0: differ by" in capsys.readouterr().err


def test_a_soak_finds_memory_that_grows(soak, monkeypatch, capsys):
    sizes = itertools.count(100, 10)
    monkeypatch.setattr(soak, "resident", lambda: next(sizes) * 2**20)
    assert soak.Soak("llama", 1, 1).run(6) == 1
    assert "memory grew by" in capsys.readouterr().err
    monkeypatch.setattr(soak, "resident", lambda: 2**20)
    assert soak.Soak("llama", 1, 1).run(2) == 0
