"""The batch command: every answer is the one its prompt gets alone, and a run that stops anywhere can go on."""

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import minipop
from minipop import PrefillPlan, Runner, SamplingParams, generate
from tests.test_inspect import save_tiny
from tests.tiny import random_ids, tiny_model

ROOT = Path(__file__).resolve().parent.parent
VOCAB = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>",
         *"abcdefghijklmnopqrstuvwxyz .?ABCDEFGHIJ0123456789\u0120\u010a"]  # the last two: a space and a new line
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>{% else %}{{ p.text }}{% endif %}"
            "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}")
QUESTIONS = ["abc", "a long question that goes on.", "b", "What is it?", "cc", "", "the end of", "abc"]
ENDS = ["a", "r", "7", "I"]  # single characters end an answer, so that random weights end some


def tokenizer_files():
    """A tokenizer of a token a character, and a chat template that takes pictures."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in VOCAB[:4]])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "add_bos_token": False,
              "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_tiny(folder, "llama", extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=[1, *map(VOCAB.index, ENDS)])
    return folder


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "vlm"
    pictures = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
                "image_processor_type": "Qwen2VLImageProcessorFast"}
    save_tiny(folder, "qwen3_vl", extra_files={**tokenizer_files(), "preprocessor_config.json": json.dumps(pictures)},
              image_token_id=3, vision_start_token_id=2)
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with prompts.jsonl, which is the current one."""
    monkeypatch.chdir(tmp_path)
    write_lines("prompts.jsonl", [{"prompt": text, "id": f"q{i}"} if i % 3 else {"messages": [{"role": "user", "content": text}]}
                                  for i, text in enumerate(QUESTIONS)])
    return tmp_path


def write_lines(file, values):
    Path(file).write_text("".join(json.dumps(value) + "\n" for value in values))


def read_lines(file="answers.jsonl"):
    data = Path(file).read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def run_generate(folder, *arguments, **options):
    options = {"ckpt": folder, "input": "prompts.jsonl", "output": "answers.jsonl", "max_new_tokens": 10, **options}
    return generate.main([*(f"--{name.replace('_', '-')}={value}" for name, value in options.items()), *map(str, arguments)])


def one_error(capsys):
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def prompt_ids(tokenizer, i):
    return tokenizer.encode(QUESTIONS[i]) if i % 3 else tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[i]}])


# --- answers --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size, window", [(1, 4), (3, 1), (3, 4), (100, 4)])
@pytest.mark.parametrize("plan, options", [(PrefillPlan.deepest(6), []), (PrefillPlan.full(6), ["--full"]),
                                           (PrefillPlan(6, {1, 3}), ["--skip-layers", "1,3"])])
def test_answers_are_those_of_solo_runs_in_the_order_of_the_prompts(folder, work, monkeypatch, batch_size, window, plan, options):
    monkeypatch.setattr(generate, "WINDOW", window)
    assert run_generate(folder, *options, batch_size=batch_size) == 0
    model, tokenizer = minipop.load_model(folder), minipop.load_tokenizer(folder)
    answers = read_lines()
    assert [(a["index"], a["id"]) for a in answers] == [(i, f"q{i}" if i % 3 else None) for i in range(len(QUESTIONS))]
    for i, answer in enumerate(answers):
        ids = prompt_ids(tokenizer, i)
        alone = list(Runner(model, plan, 100).generate(ids, SamplingParams(temperature=0.0, max_new_tokens=10)))
        assert answer["token_ids"] == alone and answer["prompt_tokens"] == max(1, len(ids))
        stopped = alone[-1] in model.config.eos_token_ids
        assert answer["finish_reason"] == ("stop" if stopped else "length")
        assert answer["text"] == tokenizer.decode(alone[:-1] if stopped else alone)
        assert set(answer) == {"index", "id", "text", "token_ids", "finish_reason", "prompt_tokens", "fingerprint"}
    assert len({answer["finish_reason"] for answer in answers}) == 2  # both kinds are there


def test_logprobs_are_those_of_the_model_itself(folder, work):
    """Whatever the sampling does to the logits, and with finished rows leaving the batch."""
    assert run_generate(folder, "--logprobs", batch_size=3, temperature=0.7, top_k=5, repetition_penalty=1.3, seed=3) == 0
    model, tokenizer = minipop.load_model(folder), minipop.load_tokenizer(folder)
    for i, answer in enumerate(read_lines()):
        runner = Runner(model, PrefillPlan.deepest(6), 100)
        logits = [runner.prefill(prompt_ids(tokenizer, i))]
        logits += [runner.decode([token]) for token in answer["token_ids"][:-1]]
        expected = torch.cat(logits).log_softmax(-1)[range(len(logits)), answer["token_ids"]]
        assert torch.allclose(torch.tensor(answer["logprobs"]), expected, atol=1e-5)


def test_on_token_sees_every_token_once_with_its_logits():
    model, prompts = tiny_model(), [random_ids(n, seed=n) for n in (4, 9, 1, 6, 3)]
    params, seen = SamplingParams(temperature=0.0, max_new_tokens=7, stop_token_ids=tuple(range(0, 60, 5))), {}

    def note(prompt, token_id, logits):
        assert logits.shape == (model.config.vocab_size,) and int(logits.argmax()) == token_id
        seen.setdefault(prompt, []).append(token_id)

    answers = Runner(model, max_seq_len=32, batch_size=2).generate_batch(prompts, params, note)
    assert seen == dict(enumerate(answers)) and len({len(answer) for answer in answers}) > 1


def test_on_token_can_end_an_answer():
    model, prompts = tiny_model(), [random_ids(n, seed=n) for n in (4, 9, 1, 6, 3)]
    params, lengths = SamplingParams(temperature=0.0, max_new_tokens=9), {0: 3, 2: 1, 3: 9}
    whole = Runner(model, max_seq_len=32, batch_size=2).generate_batch(prompts, params)
    seen = [0] * len(prompts)

    def enough(prompt, token_id, logits):
        seen[prompt] += 1
        return seen[prompt] == lengths.get(prompt)

    cut = Runner(model, max_seq_len=32, batch_size=2).generate_batch(prompts, params, enough)
    assert cut == [answer[: lengths.get(i)] for i, answer in enumerate(whole)] and seen == [3, 9, 1, 9, 9]


def test_a_full_cache_ends_an_answer(folder, work):
    texts = ["bcdefghij", "cc", "hello th", "b", "??"]
    write_lines("prompts.jsonl", [{"prompt": text} for text in texts])
    model, tokenizer = minipop.load_model(folder), minipop.load_tokenizer(folder)
    assert run_generate(folder, max_new_tokens=50, max_seq_len=9) == 0
    reasons = set()
    for answer, text in zip(read_lines(), texts, strict=True):
        runner = Runner(model, PrefillPlan.deepest(6), 9)
        alone = list(runner.generate(tokenizer.encode(text), SamplingParams(temperature=0.0, max_new_tokens=50)))
        assert answer["token_ids"] == alone
        reasons.add(answer["finish_reason"])
        assert answer["finish_reason"] == ("stop" if alone[-1] in model.config.eos_token_ids else "context")
        assert answer["finish_reason"] == "stop" or len(text) + len(alone) - 1 == 9
    assert reasons == {"stop", "context"}


def test_the_cache_is_no_longer_than_the_answers_can_use(folder, work, monkeypatch):
    made = []
    monkeypatch.setattr(generate, "runner_from", lambda args, *rest: made.append((args.max_seq_len, rest[-1])) or sys.exit(7))
    with pytest.raises(SystemExit):
        run_generate(folder, batch_size=100)
    longest = len(minipop.load_tokenizer(folder).apply_chat_template([{"role": "user", "content": QUESTIONS[6]}]))
    assert made == [(max(longest, len(QUESTIONS[1])) + 10 - 1, len(QUESTIONS))]


def test_a_seed_decides_whatever_the_batch(folder, work):
    texts = []
    for seed, batch_size in ((1, 3), (1, 5), (2, 3)):
        assert run_generate(folder, temperature=1.5, seed=seed, batch_size=batch_size, output=f"{seed}{batch_size}") == 0
        texts.append([answer["token_ids"] for answer in read_lines(f"{seed}{batch_size}")])
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][7]  # a conversation and a text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_pictures(vlm, work, batch_size):
    (work / "data").mkdir()
    for name, shade in (("dark", 30), ("light", 220)):
        Image.new("RGB", (16, 12), (shade, 90, shade)).save(work / "data" / f"{name}.png")

    def message(*parts):
        content = [{"type": "image", "image": str(p)} if "." in str(p) else {"type": "text", "text": p} for p in parts]
        return [{"role": "user", "content": content}]

    light = work / "data" / "light.png"
    asked = [message("dark.png", "what"), message("light.png", "what"), message("none"), message("dark.png", "and", light)]
    write_lines("data/prompts.jsonl", [{"messages": messages} for messages in asked] + [{"prompt": "text <|image_pad|>"}])
    assert run_generate(vlm, input="data/prompts.jsonl", batch_size=batch_size) == 0
    model, processor = minipop.load_model(vlm), minipop.load_processor(vlm)
    answers = read_lines()
    dark = work / "data" / "dark.png"
    inputs = [processor(m) for m in (message(dark, "what"), message(light, "what"), message("none"), message(dark, "and", light))]
    inputs.append(minipop.ModelInputs(processor.tokenizer.encode("text <|image_pad|>")))
    for answer, given in zip(answers, inputs, strict=True):
        runner = Runner(model, PrefillPlan.deepest(6), 200)
        alone = list(runner.generate(given, SamplingParams(temperature=0.0, max_new_tokens=10)))
        assert answer["token_ids"] == alone and answer["prompt_tokens"] == len(given)
    assert answers[0]["token_ids"] != answers[1]["token_ids"]


# --- going on -------------------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_after_the_last_whole_line(folder, work, monkeypatch):
    assert run_generate(folder, batch_size=2) == 0
    file = work / "answers.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    asked = []
    monkeypatch.setattr(Runner, "generate_batch", lambda self, inputs, *rest, original=Runner.generate_batch:
                        asked.extend(inputs) or original(self, inputs, *rest))
    for kept in (0, 1, 2, 5, len(lines)):
        for cut in (0, 1, 12, -1):
            if cut and kept == len(lines):
                continue
            file.write_bytes(b"".join(lines[:kept]) + (lines[kept][:cut] if cut else b""))
            asked.clear()
            assert run_generate(folder, batch_size=2) == 0
            assert file.read_bytes() == whole and len(asked) == len(lines) - kept
    write_lines("more.jsonl", [*read_lines("prompts.jsonl"), {"prompt": "one more"}])  # appended prompts are new ones
    asked.clear()
    assert run_generate(folder, input="more.jsonl", batch_size=2) == 0
    assert file.read_bytes().startswith(whole) and len(read_lines()) == len(lines) + 1 == len(asked) + len(lines)


def test_the_fingerprint_does_not_depend_on_how_files_are_named_or_on_batches(folder, work):
    assert run_generate(folder) == 0
    first = (work / "answers.jsonl").read_bytes()
    (work / "answers.jsonl").write_bytes(first.splitlines(keepends=True)[0])
    assert run_generate(str(folder) + "/", input=work / "prompts.jsonl", batch_size=3, threads=1) == 0
    assert (work / "answers.jsonl").read_bytes() == first


def test_ctrl_c_leaves_whole_lines_and_the_same_command_goes_on(folder, work, monkeypatch):
    monkeypatch.setattr(generate, "WINDOW", 1)
    assert run_generate(folder, batch_size=2) == 0
    whole = (work / "answers.jsonl").read_bytes()
    (work / "answers.jsonl").unlink()
    decode, steps = Runner.decode, iter(range(100))

    def interrupted(self, ids):
        if next(steps) == 22:
            raise KeyboardInterrupt
        return decode(self, ids)

    monkeypatch.setattr(Runner, "decode", interrupted)
    assert run_generate(folder, batch_size=2) == 130
    left = (work / "answers.jsonl").read_bytes()
    assert left.endswith(b"\n") and whole.startswith(left) and len(left) < len(whole)
    monkeypatch.setattr(Runner, "decode", decode)
    assert run_generate(folder, batch_size=2) == 0
    assert (work / "answers.jsonl").read_bytes() == whole


def test_a_line_that_cannot_be_written_leaves_no_trace(tmp_path):
    """The system refuses to let the file grow beyond a size in the middle of a line, as a full disk would."""
    file = tmp_path / "answers.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with generate.open_output(str(file)) as write:
        write(b"first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(OSError):
                write(b"second\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert file.read_bytes() == b"first\n"
        write(b"third\n")
    assert file.read_bytes() == b"first\nthird\n"


def swap_first_two(lines):
    return [lines[1], lines[0], *lines[2:]]


@pytest.mark.parametrize("change, message", [
    (lambda lines: [b"my notes"], "line 1: is not the beginning of an answer"),
    (lambda lines: [b"my notes\n"], "line 1: not valid JSON"),
    (lambda lines: [b'{"prompt": "abc"}\n'], "line 1: is no answer"),
    (lambda lines: [*lines[:2], b"\n"], "line 3: not valid JSON"),
    (lambda lines: [*lines[:2], b'{"index": 3, "id'], "line 3: is not the beginning"), (swap_first_two, "line 1: is no answer"),
    (lambda lines: [lines[0].replace(b"null", b'"x"', 1)], "line 1: answers another prompt than prompts.jsonl line 1"),
    (lambda lines: [*lines, lines[-1]], "has 9 lines, but there are only 8 prompts"),
])
def test_an_output_file_that_holds_something_else_is_left_alone(folder, work, capsys, change, message):
    assert run_generate(folder) == 0
    file = work / "answers.jsonl"
    data = b"".join(change(file.read_bytes().splitlines(keepends=True)))
    file.write_bytes(data)
    capsys.readouterr()
    assert run_generate(folder) == 2
    assert message in one_error(capsys) and file.read_bytes() == data


def test_answers_to_other_prompts_or_with_other_settings_are_not_mixed(folder, work, capsys, tmp_path):
    assert run_generate(folder) == 0
    save_tiny(tmp_path / "tuned", "llama", lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] + 1e-3},
              extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=[1, *map(VOCAB.index, ENDS)])
    whole = (work / "answers.jsonl").read_bytes()
    capsys.readouterr()
    for where, options in ((folder, ["--full"]), (folder, ["--temperature", "1"]), (folder, ["--logprobs"]),
                           (folder, ["--dtype", "bfloat16"]), (folder, ["--max-new-tokens", "11"]), (tmp_path / "tuned", [])):
        assert run_generate(where, *options) == 2
        assert "line 1: was made with another checkpoint or other settings" in one_error(capsys)
    settings_digest = generate.settings_digest
    assert settings_digest(model := minipop.load_model(folder), PrefillPlan(6, {5}, kv=work / "prompts.jsonl"), SamplingParams(), False) != \
        settings_digest(model, PrefillPlan(6, {5}, kv=work / "answers.jsonl"), SamplingParams(), False)  # what a K/V file holds, not its name
    copy = tmp_path / "copy"
    copy.write_bytes((work / "prompts.jsonl").read_bytes())
    assert settings_digest(model, PrefillPlan(6, {5}, kv=work / "prompts.jsonl"), SamplingParams(), False) == \
        settings_digest(model, PrefillPlan(6, {5}, kv=copy), SamplingParams(), False)
    lines = read_lines("prompts.jsonl")
    lines[4]["prompt"] = "something else"
    write_lines("prompts.jsonl", lines)
    assert run_generate(folder) == 2
    assert "answers.jsonl line 5: answers another prompt than prompts.jsonl line 5" in one_error(capsys)
    assert (work / "answers.jsonl").read_bytes() == whole


# --- what cannot be asked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line, message", [
    (b"{", "not valid JSON"), (b"[1]", "must hold a JSON object"), (b'"text"', "must hold a JSON object"), (b"{}", "neither"),
    (b'{"prompt": null}', "neither"), (b'{"prompt": "a", "messages": []}', "both"), (b'{"prompt": 3}', "`prompt` must be a"),
    (b'{"messages": "hi"}', "`messages` must be a list"), (b'{"messages": []}', "conversation is empty"),
    (b'{"messages": ["hi"]}', "message 0"), (b'{"messages": [{"role": "user"}]}', "`content` is missing"),
    (b'{"messages": [{"role": "robot", "content": "a"}]}', "robot"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}]}', "reads text only"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "image is missing"),
    (b'{"messages": [{"role": "user", "content": [3]}]}', "part 0"), (b'{"prompt": "a", "id": 1.5}', "`id`"),
    (b'{"prompt": "a", "id": [1]}', "`id`"),
    (b'{"prompt": "a", "prompt": "b"}', "twice"), (b'{"prompt": "\xff"}', "not UTF-8"), (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": NaN}', "NaN"), (b'{"prompt": "' + b"b" * 600 + b'"}', "600 tokens do not fit: the cache has room for 512"),
])
def test_a_bad_line_is_named_before_anything_runs(folder, work, capsys, monkeypatch, line, message):
    monkeypatch.setattr(Runner, "prefill", None)
    (work / "prompts.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\r\n\n' + line + b'\n{"prompt": "fine too"}')
    assert run_generate(folder) == 2
    error = one_error(capsys)
    assert "prompts.jsonl line 3: " in error and message in error and len(error) < 500
    assert [path.name for path in work.iterdir()] == ["prompts.jsonl"]


def test_bad_pictures_are_named_before_anything_runs(vlm, work, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "prefill", None)
    (work / "broken.png").write_bytes(b"no picture")
    for image, message in (("missing.png", "missing.png"), ("broken.png", "broken.png"), ("https://x.org/a.png", "an address"),
                           (3, "int")):
        conversation = [{"role": "user", "content": [{"type": "image", "image": image}]}]
        write_lines("prompts.jsonl", [{"prompt": "a"}, {"messages": conversation}])
        assert run_generate(vlm) == 2
        error = one_error(capsys)
        assert "prompts.jsonl line 2: " in error and message in error
    write_lines("prompts.jsonl", [{"prompt": ""}])
    assert run_generate(vlm) == 2
    assert "prompts.jsonl line 1: the prompt is empty" in one_error(capsys)


@pytest.mark.parametrize("options, message", [
    ({"input": "missing.jsonl"}, "missing.jsonl"), ({"input": "."}, "."), ({"input": "empty.jsonl"}, "there are no prompts"),
    ({"output": "."}, "not a regular file"), ({"output": "missing/answers.jsonl"}, "missing/answers.jsonl"),
    ({"output": "prompts.jsonl"}, "prompts.jsonl line 1: is no answer"), ({"batch_size": 0}, "above 0"),
    ({"max_seq_len": 513}, "512 positions"), ({"max_seq_len": 20}, "line 2: 29 tokens do not fit"), ({"top_p": 2}, "top_p"),
    ({"ratio": 2}, "between 0 and 1"), ({"ckpt": "./none"}, "none"), ({"batchsize": 3}, "--batchsize"),
])
def test_mistakes_are_one_line_and_exit_code_2(folder, work, capsys, options, message):
    (work / "empty.jsonl").write_text("\n\n")
    before = {path.name: path.read_bytes() for path in work.iterdir()}
    assert run_generate(folder, **options) == 2
    assert message in one_error(capsys)
    assert {path.name: path.read_bytes() for path in work.iterdir()} == before


# --- as people start it ---------------------------------------------------------------------------------------------------------


def test_through_pipes(folder, tmp_path):
    """In ASCII, with text that is none: the answers are UTF-8 whatever the terminal, and stdout holds nothing else."""
    lines = [{"prompt": "b", "id": "\u2603"}, {"prompt": "c", "id": 7}]
    done = subprocess.run([sys.executable, "-m", "minipop.generate", "--ckpt", folder, "--input", "-", "--output", "-",
                           "--threads", "1", "--max-new-tokens", "4"], input="\n".join(map(json.dumps, lines)).encode(),
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"},
                          capture_output=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and b"2/2" in done.stderr
    answers = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert [answer["id"] for answer in answers] == ["\u2603", 7] and not list(tmp_path.iterdir())
    assert [answer["index"] for answer in answers] == [0, 1] and all(1 <= len(answer["token_ids"]) <= 4 for answer in answers)


def test_stdin_is_named_in_errors(folder, work, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"promt": "b"}\n')))
    assert run_generate(folder, input="-") == 2
    assert "stdin line 2: needs either a `prompt` or `messages`" in one_error(capsys)
