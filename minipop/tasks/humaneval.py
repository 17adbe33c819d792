"""HumanEval's metric: the model's code runs, in a process of its own with limits, and passes its tests or does not.

It is not a jail. The limits keep a runaway loop, a memory hog or a careless `open("x", "w")` from doing harm (time, memory, file size,
open files, processes, an empty temporary folder, a bare environment, no network where the kernel lets a user drop it), but the code
can read and delete whatever the user who runs it can. Whoever does not trust a model runs this in a container.
"""

import os
import signal
import subprocess
import sys
import tempfile

SECONDS, MEMORY = 10, 1 << 30  # for one item: wall-clock time (processor time, too), bytes of address space

# What the other process runs: limits first, then the program that comes on stdin. Its verdict is the last line on stdout; the
# program's own output goes nowhere, and a program that exits early (sys.exit(0) before its tests) leaves no verdict.
CHILD = """
import ctypes, os, resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
program = sys.stdin.read()
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 20), ("NOFILE", 64), ("NPROC", 0), ("CORE", 0)):
    if hasattr(resource, "RLIMIT_" + name):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
try:
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # Linux: a user and a network namespace of its own; refused in some containers
except Exception:
    pass
verdict, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
try:
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    line = "passed"
except BaseException as problem:
    line = "failed: " + " ".join(f"{type(problem).__name__}: {problem}".split())[:200]
os.write(verdict, ("\\n" + line).encode(errors="replace"))
"""


def process_results(doc: dict, results: list[str]) -> dict[str, float]:
    """lm-eval's hook: doc and [the generated text] -> the metric."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(run_program(program) == "passed")}


def run_program(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """Run Python source within limits: "passed", "timed out", or "failed: " and why."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CHILD, str(seconds), str(memory)], stdin=subprocess.PIPE, stdout=output,
            stderr=subprocess.DEVNULL, cwd=folder, env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"},
            start_new_session=True)
        try:
            child.communicate(program.encode(errors="replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            if hasattr(os, "killpg"):  # the program, and whatever it started
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            child.kill()
            child.wait()
        output.seek(0)
        verdict = output.read(1 << 20).decode(errors="replace").splitlines()[-1:]
    if verdict and (verdict[0] == "passed" or verdict[0].startswith("failed: ")):
        return verdict[0]
    return "timed out" if child.returncode == -signal.SIGXCPU else f"failed: ended with code {child.returncode}"
