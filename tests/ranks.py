"""Several processes of one process group, on this machine: started from a server that has imported torch once, so in a blink.

    answers = run_ranks(worker, 2, "argument")    worker(rank, "argument") in each; what they return, by rank

What a worker raises is raised here. A worker that dies, or takes longer than PATIENCE, has no answer: None.
"""

import contextlib
import io
import multiprocessing
import os
import pickle
import queue
import socket
import time
import traceback

import pytest
import torch

PATIENCE = 180  # seconds: for when something hangs; everything is done in a few
CONTEXT = multiprocessing.get_context("forkserver") if "forkserver" in multiprocessing.get_all_start_methods() else None
if CONTEXT is not None:
    CONTEXT.set_forkserver_preload(["minipop.disagg", "tests.ranks"])
needs_forkserver = pytest.mark.skipif(CONTEXT is None, reason="this system has no forkserver")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(worker, rank, size, port, results, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        results.put((rank, pickle.dumps(worker(rank, *arguments)), None))  # not as tensors in shared memory, which dies with us
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_ranks(worker, size: int, *arguments, patience: float = PATIENCE) -> list:
    """worker: a function of a test module. arguments and results must be picklable."""
    results, port = CONTEXT.Queue(), free_port()
    ranks = [CONTEXT.Process(target=_rank, args=(worker, rank, size, port, results, arguments), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    answers, end = {}, time.monotonic() + patience
    try:
        while len(answers) < size and time.monotonic() < end:
            try:
                rank, answer, trouble = results.get(timeout=0.2)
            except queue.Empty:
                if not any(process.is_alive() for process in ranks):
                    break
                continue
            if trouble is not None:
                pytest.fail(f"rank {rank}:\n{trouble}")
            answers[rank] = pickle.loads(answer)
    finally:
        for process in ranks:
            if len(answers) < size:
                process.kill()
            process.join()
    return [answers.get(rank) for rank in range(size)]


def command(main, arguments) -> tuple[int, str, str]:
    """A command line in this process -> exit code, stdout, stderr."""
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()  # stdout with a buffer below, for those that write bytes
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
        out.flush()
    return code or 0, out.buffer.getvalue().decode(), err.getvalue()
