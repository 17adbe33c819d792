"""Command lines: a user's mistake is exit code 2 and one line; an interruption never shows a traceback."""

import contextlib
import importlib.util
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minipop import bench, chat, compare, generate, inspect
from minipop.cli import run

from .core import check_message
from .talk import call
from .worlds import world

ROOT = Path(__file__).resolve().parents[2]
MAINS = {"chat": chat.main, "generate": generate.main, "inspect": inspect.main, "compare": compare.main,
         "bench": lambda arguments: run(lambda: bench.main(arguments))}
IN_AND_OUT = {"generate": ["--input", os.devnull, "--output", "-"], "chat": ["--prompt", "hi"]}


def mistaken(main, arguments):
    code, out, err = call(main, arguments)
    assert (code, out) == (2, "") and err.startswith("error: "), (code, out, err)
    return err


@pytest.mark.parametrize("name", MAINS)
def test_mistakes_in_arguments(name):
    assert "--help" in mistaken(MAINS[name], ["--nonsense"])
    folder = str(world("llama").folder)
    for wrong in (["--dtype", "int4"], ["--ckpt"], ["extra words"], ["--ratio", "three"] if name != "inspect" else ["--ratios", "three"]):
        more = IN_AND_OUT.get(name, [])
        if name != "compare" or wrong[0] in ("--dtype", "--ckpt", "extra words"):  # the others come after importing transformers
            mistaken(MAINS[name], [*([] if wrong[0] == "--ckpt" else ["--ckpt", folder]), *more, *wrong])


@pytest.mark.parametrize("name", [name for name in MAINS if name != "compare"])
def test_checkpoints_that_are_none(name, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path / "empty"):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "hi"}\n')
        more = {"generate": ["--input", str(prompts), "--output", "-"]}.get(name, IN_AND_OUT.get(name, []))
        assert str(path) in mistaken(MAINS[name], ["--ckpt", str(path), *more])


@pytest.mark.parametrize("target", ["", "/", ".", "missing/x.json", "x" * 300])
def test_reports_that_cannot_be_written(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(inspect.main, ["--ckpt", str(world("llama").folder), "--json", target])
    assert code == 2 and err.startswith("error: ")
    assert list(tmp_path.iterdir()) == [], "something partial is left behind"


@pytest.mark.parametrize("script", ["fuzz", "soak"])
def test_mistakes_in_the_scripts_arguments(script, tmp_path):
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "no.json").write_text("{}")
    wrong = {"fuzz": [["--nonsense"], ["--seconds", "0"], ["--seconds", "long"], ["--target", "nothing"], ["--replay", str(tmp_path / "no.json")],
                      ["--replay", str(tmp_path / "missing")]],
             "soak": [["--nonsense"], ["--turns", "0"], ["--check-every", "x"], ["--family", "mamba"]]}[script]
    for arguments in wrong:
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            assert module.main(arguments) == 2
        line = told.getvalue()
        assert line.startswith("error: ") and line.count("\n") == 1
        check_message(line.strip())


def test_ctrl_c_while_pytorch_is_imported():
    """The first seconds of a command are imports: no traceback there either."""
    process = subprocess.Popen([sys.executable, "-X", "importtime", "-m", "minipop.chat", "--prompt", "hi"], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        seen = ""
        while "torch" not in seen:
            line = process.stderr.readline()
            assert line, f"the command ended: {seen[-500:]}"
            seen += line
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT and "Traceback" not in seen + rest
