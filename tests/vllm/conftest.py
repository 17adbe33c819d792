import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .common import ENVIRONMENT, TORCHVISION, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """family -> checkpoint folder, made once."""
    made = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory):
    """Run one vLLM engine on rounds of prompts: see engine.py. The result has the engine's output as "log"."""
    yield from engines(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="session")
def run_engine_with_torchvision(tmp_path_factory):
    """The same, where vLLM finds a torchvision."""
    yield from engines(tmp_path_factory.mktemp("engine"), str(TORCHVISION))


def engines(folder: Path, *arguments: str):
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("engine.py")), *arguments], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT)
    numbers = itertools.count()

    def run(arguments: dict, rounds: list, max_tokens: int = 10, sampling: dict | None = None, environment: dict | None = None) -> dict:
        number = next(numbers)
        result, log = folder / f"{number}.json", folder / f"{number}.log"
        job = {"engine": arguments, "rounds": rounds, "max_tokens": max_tokens, "sampling": sampling or {}, "environment": environment or {},
               "result": str(result), "log": str(log)}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        assert process.stdout.readline(), "the process that starts the engines has ended"
        text = log.read_text(errors="replace")
        assert result.exists(), text[-4000:]
        return json.loads(result.read_text()) | {"log": text}

    yield run
    process.stdin.close()
    process.wait(60)
