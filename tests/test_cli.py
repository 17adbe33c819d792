"""What the command lines share: how they end, and what they make of their arguments."""

import io
import json
import signal
import sys

import pytest
import torch

from minipop import PrefillPlan, SamplingParams, cli
from minipop.errors import CheckpointError, MinipopError, PlanError, PromptError
from tests.tiny import tiny_model


def parse(*arguments, default_ckpt="some default"):
    parser = cli.Parser(prog="test")
    cli.add_model_arguments(parser, default_ckpt)
    cli.add_plan_arguments(parser)
    cli.add_sampling_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def raising(problem):
    def command():
        raise problem

    return command


@pytest.mark.parametrize("problem, code, line", [
    (MinipopError("two\nlines  of it"), 2, "error: two lines of it\n"), (PromptError("short"), 2, "error: short\n"),
    (FileNotFoundError(2, "No such file or directory", "a.json"), 2, "error: a.json: No such file or directory\n"),
    (OSError("disk on fire"), 2, "error: disk on fire\n"), (KeyboardInterrupt(), 130, ""),
    (BrokenPipeError(32, "Broken pipe"), 0, ""),
])
def test_how_a_command_ends(capsys, problem, code, line):
    assert cli.run(raising(problem)) == code
    assert capsys.readouterr() == ("", line)


def test_codes_pass_through_and_faults_of_ours_are_not_hidden(capsys):
    assert [cli.run(lambda: code) for code in (0, 1)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        cli.run(raising(ZeroDivisionError()))
    with pytest.raises(SystemExit) as ended:
        cli.run(lambda: parse("--help"))
    assert ended.value.code == 0 and "--skip-layers" in capsys.readouterr().out


def test_termination_is_an_exit_that_cleans_up():
    cleaned = []

    def command():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.run(command)
    assert ended.value.code == 143 and cleaned and signal.getsignal(signal.SIGTERM) is before


def test_streams_take_what_they_cannot_hold(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff!"), encoding="utf-8", errors="surrogateescape"))
    monkeypatch.setattr(sys, "stderr", None)  # closed before we were started
    cli.prepare_streams()
    print("snow \u2603", flush=True)
    print("into the void", file=sys.stderr)
    assert out.buffer.getvalue() == b"snow ?\n" and sys.stdin.read() == "\ufffd!"
    assert cli.clean_text("a\udc80b\ud800") == "a\ufffdb\ufffd" and cli.clean_text("fine \u2603") == "fine \u2603"


@pytest.mark.parametrize("arguments", [["--bogus"], ["--rat", "0.5"], ["--full", "--plan", "x"], ["--dtype", "int3"],
                                           ["--top-k", "x"],
                                       ["--threads", "-1"], ["--max-seq-len", "1.5"], ["--max-new-tokens", "9" * 30], ["stray"]])
def test_complaints_about_arguments_are_mistakes_like_any_other(arguments):
    with pytest.raises(MinipopError, match=r"see test --help") as problem:
        parse(*arguments)
    assert "\n" not in str(problem.value)
    with pytest.raises(MinipopError, match="--ckpt"):
        parse(default_ckpt=None)


@pytest.mark.parametrize("arguments, skip", [
    ([], {20, 21, 22, 23, 24, 25, 26, 27, 28, 29}), (["--full"], set()), (["--ratio", "1/10"], {27, 28, 29}), (["--ratio",
    "0"], set()),
    (["--skip-layers", "3,6-7"], {3, 6, 7}), (["--skip-layers", ""], set()),
])
def test_plans(arguments, skip):
    plan = cli.plan_from(parse(*arguments), 30)
    assert plan == PrefillPlan(30, skip)


def test_plan_files_calibration_and_other_defaults(tmp_path):
    saved = PrefillPlan(30, {1, 2}, project_kv=False)
    saved.save(tmp_path / "plan.json")
    assert cli.plan_from(parse("--plan", tmp_path / "plan.json"), 30) == saved
    assert cli.plan_from(parse(), 30, ratio=0) == PrefillPlan.full(30)
    assert cli.plan_from(parse("--kv", "kv.safetensors"), 30) == PrefillPlan.deepest(30, kv="kv.safetensors")
    assert cli.plan_from(parse("--kv", "a", "--skip-layers", "5"), 30) == PrefillPlan(30, {5}, kv="a")
    for arguments in (["--full", "--kv", "a"], ["--ratio", "0", "--kv", "a"], ["--ratio", "x"], ["--skip-layers", "30"],
                      ["--plan", "nothing"]):
        with pytest.raises(PlanError):
            cli.plan_from(parse(*arguments), 30)


def test_plans_in_one_word(tmp_path):
    saved = PrefillPlan(30, {1, 2})
    saved.save(tmp_path / "plan.json")
    words = {"full": PrefillPlan.full(30), "1/3": PrefillPlan.deepest(30), "0.1": PrefillPlan(30, {27, 28, 29}),
             "5": PrefillPlan(30, {5}), "3,20-21": PrefillPlan(30, {3, 20, 21}), str(tmp_path / "plan.json"): saved}
    for text, plan in words.items():
        assert cli.parse_plan(text, 30) == plan
    for text in ("1/0", "2.0", "30", "all", "-1", "missing.json"):
        with pytest.raises(PlanError):
            cli.parse_plan(text, 30)


@pytest.mark.parametrize("config, expected", [
    (None, SamplingParams(temperature=0.0)), ({"temperature": 0.7}, SamplingParams(temperature=0.0)),
    ({"do_sample": False, "top_k": 5}, SamplingParams(temperature=0.0)), ({"do_sample": True}, SamplingParams()),
    ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "min_p": None},
     SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)),
])
def test_sampling_starts_from_what_the_checkpoint_says(tmp_path, config, expected):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert cli.sampling_from(parse(), tmp_path) == expected
    arguments = parse("--temperature", 0.5, "--top-k", 0, "--seed", 0, "--max-new-tokens", 7)
    given = cli.sampling_from(arguments, tmp_path, max_new_tokens=99)
    assert (given.temperature, given.top_k, given.seed, given.max_new_tokens) == (0.5, 0, 0, 7)
    assert (given.top_p, given.repetition_penalty) == (expected.top_p, expected.repetition_penalty)
    assert cli.sampling_from(parse(), tmp_path, max_new_tokens=99).max_new_tokens == 99


def test_bad_generation_settings_name_their_file(tmp_path):
    for text in ('{"do_sample": true, "temperature": "hot"}', '{"do_sample": true, "top_p": 3}', "[", "[1]"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(CheckpointError, match="generation_config.json"):
            cli.sampling_from(parse(), tmp_path)


def test_the_cache_is_as_long_as_asked_or_as_the_model_allows(monkeypatch):
    model = tiny_model("llama")  # 6 layers, 2 kv heads of 16, 512 positions, float32
    plan = PrefillPlan.deepest(6)
    assert cli.runner_from(parse(), model, plan).cache.max_seq_len == 512
    runner = cli.runner_from(parse("--max-seq-len", 100), model, plan, batch_size=3)
    stored = runner.cache.keys.nbytes + runner.cache.values.nbytes
    assert cli.cache_bytes(model.config, 100, torch.float32, 3) == stored == 2 * 6 * 3 * 2 * 16 * 100 * 4
    with pytest.raises(PromptError, match="512 positions"):
        cli.runner_from(parse("--max-seq-len", 513), model, plan)

    monkeypatch.setattr(cli, "available_memory", lambda: stored - 1)
    with pytest.raises(MinipopError, match="a cache of 100 tokens for 3 rows takes 450.0 KiB, but .* lower --max-seq-len"):
        cli.runner_from(parse("--max-seq-len", 100), model, plan, batch_size=3)
    monkeypatch.setattr(cli, "available_memory", lambda: stored)
    assert cli.runner_from(parse("--max-seq-len", 100), model, plan, batch_size=3).cache.max_seq_len == 100
    monkeypatch.setattr(cli, "available_memory", lambda: None)  # not told
    assert cli.runner_from(parse(), model, plan).cache.max_seq_len == 512


def test_available_memory(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:     2048 kB\n")
    assert cli.available_memory(file) == 2048 * 1024
    file.write_text("MemTotal:       16000 kB\n")
    assert cli.available_memory(file) is None and cli.available_memory(tmp_path / "none") is None
    assert [cli.show_bytes(n) for n in (512, 3 * 2**19, 5 * 2**30)] == ["0.5 KiB", "1.5 MiB", "5.0 GiB"]


@pytest.mark.parametrize("name", ["nowhere", "meta", "cpu:x", ""])
def test_devices_that_cannot_be_used(name):
    with pytest.raises(MinipopError, match="--device"):
        cli.check_device(name)
    cli.check_device("cpu")


def test_loading_sets_threads_and_fails_before_the_weights_are_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    threads = torch.get_num_threads()
    try:
        monkeypatch.setattr(cli, "load_model", lambda *_: pytest.fail("the config is at fault already"))
        with pytest.raises(MinipopError, match="config.json"):
            cli.load_from(parse("--ckpt", tmp_path, "--threads", 1))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_outputs_are_checked_before_the_work(tmp_path):
    text, folder, other = tmp_path / "text.txt", tmp_path / "checkpoint", tmp_path / "out.json"
    text.write_text("words")
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    (tmp_path / "link.txt").symlink_to(text)
    inputs = [text, folder, None, "org/model"]
    cli.check_outputs({"--out": str(other), "--figure": None, "--plan-out": str(tmp_path / "new.json")}, inputs)
    for outputs, words in (({"--out": str(text)}, "would overwrite .*text.txt, which is read"), ({"--out": str(tmp_path / "link.txt")}, "would overwrite"),
                           ({"--out": str(folder / "model.safetensors")}, "would overwrite model.safetensors of"),
                           ({"--out": str(folder)}, "is not the name of a file"), ({"--out": ""}, "is not the name of a file"),
                           ({"--out": str(tmp_path / "no" / "x")}, "there is no folder"), ({"--out": "/proc/x"}, "there is no folder"),
                           ({"--out": str(other), "--plan-out": str(other)}, "--plan-out .*would overwrite what --out writes")):
        with pytest.raises(PromptError, match=words):
            cli.check_outputs(outputs, inputs)
    assert text.read_text() == "words"
