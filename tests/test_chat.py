"""The chat: a conversation's cache, history and files, then the command line around it."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import minipop
from minipop import ModelInputs, PrefillPlan, Runner, SamplingParams
from minipop import chat
from minipop.saving import save_checkpoint
from minipop.errors import CheckpointError, ImageError, MinipopError, PlanError, PromptError, TokenizerError
from minipop.projection import KVProjection, fingerprint
from minipop.session import ChatSession, StopStrings, shared_prefix
from tests.tiny import close, tiny_model

ROOT = Path(__file__).resolve().parent.parent
SMOLLM = ROOT / "weights" / "smollm2-135m-instruct"
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, POSITIONS = 6, 32, 4, 2, 8, 48, 4096
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


# --- a tiny checkpoint: it answers in the letters a to z, one token each, though its tokenizer would write "ab" as one 


def byte_tokenizer() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def write_checkpoint(folder: Path, **files) -> Path:
    backend = byte_tokenizer()
    vocab = backend.get_vocab_size()
    config = dict(model_type="llama", vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
                  num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=POSITIONS,
                  rms_norm_eps=1e-5, tie_word_embeddings=False, eos_token_id=backend.token_to_id("<|im_end|>"), bos_token_id=None)
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": random(vocab, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    letters = [backend.token_to_id(chr(code)) for code in range(ord("a"), ord("z") + 1)]
    head = torch.zeros(vocab, HIDDEN)
    head[letters] = random(len(letters), HIDDEN)
    tensors["lm_head.weight"] = head
    for i in range(LAYERS):
        shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                  "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
        tensors |= {f"model.layers.{i}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {f"model.layers.{i}.{name}.weight": torch.ones(HIDDEN) for name in norms}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}), **files}
    save_checkpoint(folder, tensors, config, extra_files=files)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return minipop.load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return minipop.load_tokenizer(folder)


@pytest.fixture
def new_session(model, tokenizer):
    """Makes a session on the tiny model; the deepest third is skipped, and an answer has 8 tokens."""

    def make(plan=None, max_seq_len=400, processor=None, sampling=None, **kwargs):
        sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 8, **(sampling or {})})
        runner = Runner(model, plan or PrefillPlan.deepest(LAYERS), max_seq_len)
        return ChatSession(runner, tokenizer, processor, sampling=sampling, **kwargs)

    return make


def answer(session, text, images=()):
    return "".join(session.ask(text, images))


def scripted(monkeypatch, tokenizer, *answers):
    """The model 'samples' these answers: texts (one token a character), lists of ids, or both in a list."""
    ids = []
    for text in answers:
        tokens = [tokenizer.token_to_id(t) if isinstance(t, str) else t for t in text]
        assert None not in tokens
        ids.append(iter(tokens))
    left = iter(ids)

    class Script:
        def __init__(self, *_, **__):
            self.ids = next(left)

        def sample(self, logits):
            return torch.tensor([next(self.ids)])

    monkeypatch.setattr("minipop.runner.Sampler", Script)


def rows(runner):
    n = runner.cache.length
    return torch.stack((runner.cache.keys[..., :n, :], runner.cache.values[..., :n, :]))


def same_cache(a, b):
    assert a.token_ids() == b.token_ids()
    close(rows(a), rows(b))


# --- the cache over several turns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [PrefillPlan.full(LAYERS), PrefillPlan.deepest(LAYERS, 0.5), PrefillPlan(LAYERS, {1, 4})])
def test_a_second_turn_prefills_only_what_is_new_and_equals_a_replay_of_the_calls(new_session, model, tokenizer, plan):
    session = new_session(plan)
    first, second = answer(session, "Hello there"), answer(session, "And then?")
    assert len(first) == len(second) == 8  # letters, one token each
    one, two = session.log

    def ids(text):
        return tokenizer.encode_rendered(text)

    begin = ids("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n")
    reply = [tokenizer.token_to_id(letter) for letter in first]
    # the last token of the answer is not in the cache yet, so it comes first
    more = [reply[-1]] + ids("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
    assert (one.prompt_tokens, one.new_tokens) == (len(begin), len(begin))
    assert (two.prompt_tokens, two.new_tokens) == (len(begin) + 7 + len(more), len(more))

    replay = Runner(model, plan, 400)
    replay.prefill(begin)
    for token in reply[:-1]:
        replay.decode([token])
    replay.prefill(more)
    for letter in second[:-1]:
        replay.decode([tokenizer.token_to_id(letter)])
    same_cache(session.runner, replay)
    if not plan.skip:
        fresh = Runner(model, plan, 400)
        fresh.prefill(session.runner.token_ids())
        same_cache(session.runner, fresh)


def test_the_ids_that_were_generated_stay_even_where_the_tokenizer_would_write_others(new_session, tokenizer, monkeypatch):
    end = tokenizer.token_to_id("<|im_end|>")
    scripted(monkeypatch, tokenizer, [*"xabcab", end], [*"abcab", end], "y" * 8)
    session = new_session()
    for question in ("abcab", "ab", "abc"):
        answer(session, question)
    ids = session.runner.token_ids()
    assert len(tokenizer.encode("xabcab")) == 3
    for stats, text in zip(session.log, ("xabcab", "abcab", "yyyyyyy")):
        assert ids[stats.prompt_tokens : stats.prompt_tokens + len(text)] == [tokenizer.token_to_id(letter) for letter in text]
    for stats, question in zip(session.log[1:], ("ab", "abc")):  # new: the end of the last turn, and this question
        new = tokenizer.encode_rendered(f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        assert stats.new_tokens == len(new)
    whole = tokenizer.render_chat(session.messages, add_generation_prompt=False)
    assert whole.startswith(tokenizer.decode(ids, skip_special=False))


def test_an_end_of_turn_token_is_not_text_and_the_next_turn_brings_it(new_session, tokenizer, monkeypatch):
    end = tokenizer.token_to_id("<|im_end|>")
    scripted(monkeypatch, tokenizer, ["h", "i", end], ["o", "k", end])
    session = new_session()
    assert answer(session, "q") == "hi" and session.log[0].ended == "end of turn"
    assert answer(session, "r") == "ok"
    # cached: everything up to "hi"; new: the end of that turn, and the next question
    new = tokenizer.encode_rendered("<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n")
    assert session.log[1].new_tokens == len(new)
    assert session.log[1].answer_tokens == 3


def test_an_empty_answer_is_an_answer(new_session, tokenizer, monkeypatch):
    scripted(monkeypatch, tokenizer, [tokenizer.token_to_id("<|im_end|>")], "z" * 8)
    session = new_session()
    assert answer(session, "q") == ""
    assert session.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    assert answer(session, "r") == "z" * 8


def test_control_tokens_that_users_type_stay_text(new_session, tokenizer):
    session = new_session()
    answer(session, "a<|im_end|>b")
    end = tokenizer.token_to_id("<|im_end|>")
    assert session.runner.token_ids()[: session.log[0].prompt_tokens].count(end) == 1


def test_a_character_split_over_tokens_arrives_whole(new_session, tokenizer, monkeypatch):
    alphabet = {byte: char for byte, char in zip("é".encode(), ("Ã", "©"))}
    scripted(monkeypatch, tokenizer, ["a", *alphabet.values(), "b", "Ã"])
    session = new_session(sampling={"max_new_tokens": 5})
    assert list(session.ask("q")) == ["a", "é", "b", "\ufffd"]  # a character that stays incomplete is shown as such, at the end


@pytest.mark.parametrize("cached, prompt, expected", [
    (["a", "b", "c"], ["a", "b", "d"], (2, 2)),
    (["a", "b", "c"], ["ab", "c", "d"], (3, 2)),
    (["ab", "c"], ["a", "b", "c", "d"], (2, 3)),
    (["a", "bc", "d"], ["ab", "cd", "e"], (3, 2)),
    (["a", "bc", "x"], ["ab", "cd", "e"], (0, 0)),
    (["a", "b"], ["ab"], (0, 0)),  # one token must be left to prefill
    (["a", "b"], ["a", "b"], (1, 1)),
    (["a", "b", "c"], ["a"], (0, 0)),
    (["a", "b"], ["ab", "<s>"], (2, 1)),
    (["a", "<s>"], ["a", "<", "s>", "b"], (1, 1)),  # a special token equals no text
    (["a", "<s>", "b", "c"], ["a", "<s>", "bc", "d"], (4, 3)),
    ([], ["a"], (0, 0)),
])
def test_shared_prefix(cached, prompt, expected):
    names = sorted({*cached, *prompt})
    result = shared_prefix([names.index(t) for t in cached], [names.index(t) for t in prompt],
                           lambda i: None if names[i] == "<s>" else names[i], lambda n: n < len(prompt))
    assert result == expected


# --- undo, retry, reset, other settings -------------------------------------------------------------------------------


def test_undo_takes_the_last_exchange_out_of_history_and_cache(new_session):
    session, other = new_session(), new_session()
    answer(session, "one"), answer(other, "one")
    answer(session, "two")
    assert session.undo().question == "two"
    assert [m["content"] for m in session.messages] == ["one", other.exchanges[0].answer]
    assert answer(session, "three") == answer(other, "three")
    same_cache(session.runner, other.runner)
    session.undo(), session.undo()
    assert session.messages == [] and session.runner.cache.length == 0
    with pytest.raises(PromptError, match="nothing to take back"):
        session.undo()


def test_retry_repeats_at_temperature_0_and_reuses_all_but_one_token(new_session):
    session = new_session()
    answer(session, "one")
    first = answer(session, "two")
    cache = rows(session.runner).clone()
    assert "".join(session.retry()) == first
    assert session.log[-1].new_tokens == 1
    close(rows(session.runner), cache)
    assert len(session.exchanges) == 2
    session.undo()  # back to where "two" came, not to where the retry began
    assert session.runner.cache.length == session.log[0].prompt_tokens + session.log[0].answer_tokens - 1


def test_retry_draws_other_numbers_and_the_seed_decides_which(new_session):
    texts = []
    for _ in range(2):
        session = new_session(sampling={"temperature": 1.0, "seed": 3, "max_new_tokens": 20})
        texts.append([answer(session, "one"), "".join(session.retry()), "".join(session.retry()), answer(session, "two")])
    assert texts[0] == texts[1]
    assert len(set(texts[0][:3])) == 3
    other = new_session(sampling={"temperature": 1.0, "seed": 4, "max_new_tokens": 20})
    assert answer(other, "one") == texts[0][1]  # the second attempt has the next seed


@pytest.mark.parametrize("how", ["retry", "undo"])
def test_a_question_asked_again_under_another_plan_is_prefilled_again(new_session, how):
    full, pruned = PrefillPlan.full(LAYERS), PrefillPlan.deepest(LAYERS, 5 / 6)
    session, fresh = new_session(pruned), new_session(full)
    answer(session, "What is this?")
    session.set_plan(full)
    if how == "undo":
        session.undo()
    again = "".join(session.retry()) if how == "retry" else answer(session, "What is this?")
    assert again == answer(fresh, "What is this?")
    same_cache(session.runner, fresh.runner)
    assert session.log[-1].plan == full
    with pytest.raises(PlanError, match="5 layers"):
        session.set_plan(PrefillPlan.full(5))


def test_plans_may_leave_the_calibrated_rows_and_come_back(new_session, tmp_path):
    pruned = PrefillPlan.deepest(LAYERS, 1 / 2)
    session = new_session(pruned)
    model = session.runner.model
    weight = KVProjection.of(model, pruned.cut).weight
    KVProjection(weight, torch.zeros(len(weight)), pruned.cut, LAYERS, fingerprint(model, pruned.cut)).save(tmp_path / "kv")
    calibrated = PrefillPlan.deepest(LAYERS, 1 / 2, kv=tmp_path / "kv")
    with pytest.raises(PlanError, match="start the chat with --kv"):
        session.set_plan(calibrated)
    session = new_session(calibrated)
    with pytest.raises(PlanError, match="made for layers"):  # another cut: nothing changes
        session.set_plan(PrefillPlan.deepest(LAYERS, 5 / 6, kv=tmp_path / "kv"))
    assert session.runner.plan == calibrated
    session.set_plan(pruned)
    session.set_plan(calibrated)
    assert session.runner.plan == calibrated and answer(session, "What is this?")


def test_reset_begins_anew(new_session):
    session = new_session(system="s")
    first = answer(session, "one")
    answer(session, "two")
    session.reset()
    assert session.runner.cache.length == 0 and session.messages == [{"role": "system", "content": "s"}]
    assert answer(session, "one") == first


def test_another_system_message_counts_from_the_beginning(new_session, tokenizer):
    session = new_session(system="Be brief")
    answer(session, "one")
    session.set_system("Be kind")
    answer(session, "two")
    text = tokenizer.decode(session.runner.token_ids(), skip_special=False)
    assert text.startswith("<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\none<|im_end|>")
    kept = len(tokenizer.encode_rendered("<|im_start|>system\nBe "))
    assert session.log[1].new_tokens == session.log[1].prompt_tokens - kept
    session.set_system(None)
    answer(session, "three")
    assert tokenizer.decode(session.runner.token_ids(), skip_special=False).startswith("<|im_start|>user\none")


# --- how answers end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [["abcSTOPdef"], list("abcSTOPdef"), ["abcS", "TOP", "def"], ["abcST", "OPde", "f"]])
def test_stop_strings_cut_wherever_the_pieces_end(pieces):
    cutter = StopStrings(["STOP", "zzz"])
    shown = [cutter.push(piece) for piece in pieces]
    assert "".join(shown) + cutter.flush() == "abc" and cutter.found
    assert all("S" not in text for text in shown)


def test_text_that_only_looks_like_the_beginning_of_a_stop_string_comes_late_but_comes():
    cutter = StopStrings(["aab", "xyz"])
    assert [cutter.push(letter) for letter in "aaaxyaab"] == ["", "", "a", "aa", "", "xy", "", ""]
    assert cutter.found and cutter.flush() == ""
    cutter = StopStrings(["aab"])
    assert cutter.push("qaa") == "q" and cutter.flush() == "aa" and not cutter.found
    assert StopStrings([]).push("text") == "text"


def test_an_answer_ends_before_its_stop_string_and_the_conversation_goes_on(new_session, tokenizer, monkeypatch):
    scripted(monkeypatch, tokenizer, "wordENDmore", "okEN", "fine")
    session = new_session(stop=["END"], sampling={"max_new_tokens": 4})
    session.sampling = SamplingParams(temperature=0.0, max_new_tokens=11)
    pieces = list(session.ask("q"))
    assert pieces == ["w", "o", "r", "d"] and session.log[-1].ended == "stop string" and session.log[-1].answer_tokens == 7
    session.sampling = SamplingParams(temperature=0.0, max_new_tokens=4)
    assert answer(session, "r") == "okEN"  # half a stop string at the end is text
    assert session.log[-1].ended == "max_new_tokens reached"
    assert "END" not in tokenizer.decode(session.runner.token_ids())
    assert answer(session, "s") == "fine"
    with pytest.raises(PromptError, match="stop string"):
        new_session(stop=["a", ""])


def test_a_full_context_ends_the_answer_and_the_session_goes_on(new_session, tokenizer):
    room = len(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])) + 3
    session = new_session(max_seq_len=room)
    assert len(answer(session, "hi")) == 4 and session.log[-1].ended == "context full"
    assert "context full" in str(session.log[-1])
    before = session.runner.token_ids()
    with pytest.raises(PromptError, match=rf"holds {room}: .*--max-seq-len \(this model allows {POSITIONS}\)"):
        session.ask("and?")
    assert session.runner.token_ids() == before and len(session.exchanges) == 1  # nothing changed
    session.undo()
    assert len(answer(session, "ho")) == 4
    session.reset()
    with pytest.raises(PromptError, match="tokens"):
        session.ask("x" * 500)


def test_a_stopped_answer_stays_as_far_as_it_was_said(new_session):
    session, other = new_session(), new_session()
    pieces = session.ask("one")
    said = [next(pieces) for _ in range(3)]
    pieces.close()
    assert session.exchanges[-1].answer == "".join(said) and session.log[-1].ended == "interrupted"
    answer(session, "two")
    # the same as if the model had been asked for three tokens
    other.sampling = SamplingParams(temperature=0.0, max_new_tokens=3)
    assert answer(other, "one") == "".join(said)
    other.sampling = session.sampling
    answer(other, "two")
    same_cache(session.runner, other.runner)


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_an_interrupt_inside_the_model_leaves_history_and_cache_consistent(new_session, monkeypatch, step):
    session, other = new_session(), new_session()
    answer(session, "one"), answer(other, "one")
    calls = []
    original = getattr(session.runner, step)

    def interrupted(*args):
        calls.append(1)
        if len(calls) == (1 if step == "prefill" else 3):
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(session.runner, step, interrupted)
    said = []
    with pytest.raises(KeyboardInterrupt):
        for piece in session.ask("two"):
            said.append(piece)
    monkeypatch.undo()
    assert len(said) == (0 if step == "prefill" else 3)
    assert len(session.exchanges) == (1 if step == "prefill" else 2)  # nothing said: the question is taken back
    if step == "decode":
        assert session.exchanges[-1].answer == "".join(said)
        session.undo()
    assert answer(session, "three") == answer(other, "three")
    same_cache(session.runner, other.runner)


def test_an_interrupted_retry_with_nothing_said_keeps_the_old_answer(new_session, monkeypatch):
    session = new_session()
    old = answer(session, "one")
    with monkeypatch.context() as patch:
        patch.setattr(session.runner, "prefill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(session.retry())
    assert [e.answer for e in session.exchanges] == [old]
    assert "".join(session.retry()) == old


def test_what_cannot_be_asked(new_session, model, tmp_path):
    session = new_session()
    with pytest.raises(PromptError, match="empty"):
        session.ask("  ")
    with pytest.raises(PromptError, match="no pictures"):
        session.ask("look", ["cat.png"])
    with pytest.raises(PromptError, match="nothing to retry"):
        session.retry()
    base = write_checkpoint(tmp_path / "base", **{"tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'})
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatSession(Runner(model, None, 64), minipop.load_tokenizer(base))


# --- pictures ---------------------------------------------------------------------------------------------------------

IMAGE_ID, IMAGE_ROWS = 60, 4  # of tests/tiny.py


class Letters:
    """A tokenizer of one id a character, and no special tokens."""

    has_chat_template, special_ids = True, frozenset()

    def id_to_token(self, token_id):
        return chr(40 + token_id)

    def stream(self):
        return self

    push = id_to_token

    def flush(self):
        return ""


class Pictures:
    """A processor: each message is its role's letter, its pictures, its text; a picture's brightness is all the model sees."""

    def __init__(self, family):
        self.family = family

    def __call__(self, messages):
        ids, shades = [], []
        for message in messages:
            content = message["content"]
            ids.append(50 + ("user", "assistant").index(message["role"]))
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] == "image":
                    ids += [52, *[IMAGE_ID] * IMAGE_ROWS]
                    shades.append(part["image"].getpixel((0, 0))[0] / 255)
                else:
                    ids += [ord(c) - 40 for c in part["text"]]
        ids.append(51)
        if not shades:
            return ModelInputs(ids)
        noise = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
        if self.family == "gemma3":  # [images, 3, 16, 16]
            return ModelInputs(ids, torch.stack([shade * noise[:48].reshape(3, 16, 16) for shade in shades]))
        return ModelInputs(ids, torch.cat([shade * noise.T for shade in shades]), torch.tensor([[1, 4, 4]] * len(shades)))


def picture(path, shade):
    Image.new("RGB", (16, 16), (shade, shade, shade)).save(path)
    return str(path)


@pytest.fixture(params=["qwen3_vl", "gemma3"])
def look(request, tmp_path):
    """(makes a session, a dark picture, a light picture, the processor)"""
    model = tiny_model(request.param)
    processor = Pictures(request.param)

    def make(plan=None):
        runner = Runner(model, plan or PrefillPlan.deepest(6), 200)
        return ChatSession(runner, Letters(), processor, sampling=SamplingParams(temperature=0.0, max_new_tokens=5))

    return make, picture(tmp_path / "dark.png", 60), picture(tmp_path / "light.png", 220)


def test_pictures_in_the_cache_are_not_encoded_again(look):
    make, dark, light = look
    session, fresh = make(PrefillPlan.full(6)), make(PrefillPlan.full(6))
    answer(session, "@A", [dark])
    answer(session, "@B")
    answer(session, "@C", [light])
    assert [stats.new_tokens for stats in session.log] == [9, 5, 10]  # 5 a picture with its mark; an answer's last token is new
    fresh.runner.prefill(ModelInputs(*_all(fresh, session)))
    same_cache(session.runner, fresh.runner)
    answer(session, "@D")
    session.undo()
    session.undo()
    assert session.runner.cache.length == session.log[0].prompt_tokens + 4 + 5 + 4


def _all(fresh, session):
    """The ids in the session's cache with all its pictures, as one prompt."""
    inputs = session.processor(session.messages)
    return session.runner.token_ids(), inputs.pixel_values, inputs.image_grid_thw


def test_another_picture_in_the_same_place_is_another_prompt(look):
    make, dark, light = look
    session, expected = make(), make()
    first = answer(session, "@A", [dark])
    text = answer(expected, "@A", [light])
    dark_rows = rows(session.runner).clone()
    session.exchanges.clear()  # forgotten but for the cache: same ids, another picture
    assert answer(session, "@A", [light]) == text
    assert session.log[-1].new_tokens == session.log[0].new_tokens - 2  # kept: what stands before the picture
    same_cache(session.runner, expected.runner)
    assert not torch.equal(rows(session.runner)[..., :9, :], dark_rows[..., :9, :])
    assert len(first) == 5


def test_two_pictures_of_which_the_second_changes(look):
    make, dark, light = look
    session, expected = make(), make()
    one, two, three = (session.picture(path) for path in (dark, light, dark))
    answer(session, "@A", [one, two])
    session.exchanges.clear()
    answer(session, "@A", [one, three])
    assert session.log[-1].new_tokens == 1 + 1 + 4 + 2 - 1  # the second picture and what follows
    answer(expected, "@A", [one, three])
    same_cache(session.runner, expected.runner)


def test_retry_with_a_picture(look):
    make, dark, _ = look
    session = make()
    first = answer(session, "@A", [dark])
    assert "".join(session.retry()) == first and session.log[-1].new_tokens == 1
    with pytest.raises(ImageError, match="nothing.png"):
        session.ask("look", ["nothing.png"])


# --- saving and loading -----------------------------------------------------------------------------------------------


def test_a_saved_conversation_comes_back(new_session, tmp_path):
    session = new_session(system="Be brief", sampling={"temperature": 0.5, "seed": 1})
    answer(session, "one"), answer(session, "two \u2603")
    session.save(tmp_path / "chat.json")
    other = new_session(PrefillPlan.full(LAYERS))
    answer(other, "something else")
    other.load(tmp_path / "chat.json")
    assert other.messages == session.messages and other.system == "Be brief"
    assert other.runner.plan == session.runner.plan and other.sampling == session.sampling
    assert other.runner.cache.length == 0
    answer(other, "three")
    other.save(tmp_path / "chat.json")  # its own file: overwritten
    assert len(json.loads((tmp_path / "chat.json").read_text())["messages"]) == 6
    assert os.listdir(tmp_path) == ["chat.json"]


def test_pictures_are_saved_by_their_paths(look, tmp_path):
    make, dark, _ = look
    session, other = make(), make()
    answer(session, "@A", [dark])
    session.save(tmp_path / "chat.json")
    other.load(tmp_path / "chat.json")
    assert other.messages[0]["content"][0]["path"] == dark
    assert answer(other, "@B") and other.log[0].new_tokens == 9 + 5 + 4
    session.reset()
    answer(session, "@A", [Image.new("RGB", (16, 16))])
    with pytest.raises(PromptError, match="in no file"):
        session.save(tmp_path / "chat2.json")
    Path(dark).unlink()
    with pytest.raises(PromptError, match="dark.png"):
        other.load(tmp_path / "chat.json")


def test_other_files_are_not_overwritten(new_session, tmp_path):
    session = new_session()
    for name, content in (("notes.txt", "dear diary"), ("other.json", '{"a": 1}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(PromptError, match="choose another name"):
            session.save(tmp_path / name)
        assert (tmp_path / name).read_text() == content
    with pytest.raises(PromptError, match="not the name of a file"):
        session.save("a\0b")
    with pytest.raises(MinipopError, match="cannot be written"):
        session.save(tmp_path / "missing" / "chat.json")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "other.json"]


def _changed(**changes):
    good = {"minipop_chat": 1, "system": None, "plan": {"num_layers": LAYERS, "skip": [4, 5]}, "sampling": {"temperature": 0.0},
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    return json.dumps({key: value for key, value in {**good, **changes}.items() if value != "gone"})


def _asking(content):
    return _changed(messages=[{"role": "user", "content": content}, {"role": "assistant", "content": ""}])


@pytest.mark.parametrize("content, message", [
    ("", "JSON"), ("[]", "object"), ("{}", "not a chat"), (_changed(minipop_chat=2), "not a chat"),
    (_changed(system="gone"), "not a chat"),
    (_changed(extra=1), "not a chat"), (_changed(system=5), "system must be text"),
    (_changed(plan={"num_layers": 7, "skip": []}), "7 layers"),
    (_changed(plan=[1]), "plan|mapping"), (_changed(plan={"num_layers": LAYERS, "skip": [9]}), "layer 9"),
    (_changed(plan={}), "num_layers"),
    (_changed(plan={"num_layers": LAYERS, "skip": [5], "kv": "x.safetensors"}), "--kv"),
    (_changed(sampling={"temperature": -1}), "temperature"),
    (_changed(sampling={"heat": 1}), "heat"), (_changed(messages={}), "messages"), (_changed(messages=[{"role": "user",
    "content": "q"}]), "messages"),
    (_changed(messages=[{"role": "user", "content": "q"}] * 2), "message 1"), (_changed(messages=[5, 6]), "message 0"),
    (_asking([{"type": "image", "path": "x.png"}]), "no pictures"), (_asking([{"type": "sound"}]), "neither text nor"),
    (_asking("\ud800"), "surrogate|UTF|JSON"),
])
def test_a_file_that_is_no_saved_chat_changes_nothing(new_session, tmp_path, content, message):
    session = new_session()
    said = answer(session, "one")
    length = session.runner.cache.length
    (tmp_path / "chat.json").write_text(content)
    with pytest.raises(MinipopError, match=message) as problem:
        session.load(tmp_path / "chat.json")
    assert "\n" not in str(problem.value)
    assert [e.answer for e in session.exchanges] == [said] and session.runner.cache.length == length
    with pytest.raises(MinipopError, match="missing.json"):
        session.load(tmp_path / "missing.json")


# --- the command line, in this process --------------------------------------------------------------------------------


class NotATerminal(io.TextIOWrapper):
    def __init__(self, data=b""):
        super().__init__(io.BytesIO(data), encoding="ascii", errors="strict")


def run_chat(*arguments):
    return chat.main([str(argument) for argument in arguments])


def test_one_answer_goes_to_stdout_alone(folder, capsys, monkeypatch, tmp_path):
    assert run_chat("--ckpt", folder, "--prompt", "hi", "--max-new-tokens", 6) == 0
    first = capsys.readouterr()
    assert re.fullmatch("[a-z]{6}\n", first.out)
    assert re.fullmatch(r"\d+ prompt tokens, 2 of 6 layers skipped, first token \d+\.\d\d s, 6 answer tokens at "
                        r"\d+\.\d tokens/s, max_new_tokens reached\n", first.err)
    PrefillPlan(LAYERS, {5}).save(tmp_path / "plan.json")
    for plan, skipped in ((["--full"], 0), (["--ratio", "1/2"], 3), (["--skip-layers", "1,3-5"], 4),
                          (["--plan", tmp_path / "plan.json"], 1)):
        assert run_chat("--ckpt", folder, "--prompt", "hi", "--max-new-tokens", 3, *plan) == 0
        assert f"{skipped} of 6 layers skipped" in capsys.readouterr().err
    sampled = []
    for seed in (1, 1, 2):
        monkeypatch.setattr(sys, "stdin", NotATerminal(b"hi\n"))  # the same prompt through a pipe
        assert run_chat("--ckpt", folder, "--seed", seed, "--temperature", 1, "--max-new-tokens", 20, "--stop", "zz") == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize("arguments, message", [
    (["--ckpt", "./missing-folder"], "missing-folder"), (["--ratio", "2"], "between 0 and 1"), (["--skip-layers",
    "9"], "layer 9"),
    (["--full", "--ratio", "0.5"], "not allowed with"), (["--plan", "missing.json"], "missing.json"), (["--full", "--kv",
    "x"], "--kv"),
    (["--temperature", "-1"], "temperature"), (["--temperature", "warm"], "--temperature"), (["--top-p", "2"], "top_p"),
    (["--seed", "-1"], "seed"), (["--stop", ""], "stop string"), (["--max-new-tokens", "0"], "above 0"), (["--threads",
    "0"], "above 0"),
    (["--max-seq-len", "5000"], "4096 positions"), (["--device", "nowhere"], "--device nowhere"), (["--dtype",
    "int3"], "--dtype"),
    (["--image", "x.png"], "no pictures"), (["--prompt", " "], "empty"), (["--max-seq-len", "10", "--prompt",
    "hello"], "the context holds 10"),
    (["--promt", "x"], "--promt"), (["--prompt", "x" * 200_000], "tokens, but the context holds 4096"),
])
def test_mistakes_are_one_line_and_exit_code_2(folder, capsys, arguments, message):
    defaults = {"--ckpt": str(folder), "--prompt": "hi"}
    given = [part for option, value in defaults.items() if option not in arguments for part in (option, value)]
    assert run_chat(*given, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("data, expected", [
    (b"\xff\xfe hi\n", "\ufffd\ufffd hi"), (b"a\0b", "a\0b"), (b"two\nlines\r\n\n", "two\nlines"), (b"\xef\xbb\xbfbom", "bom"),
    (b"cut \xe2\x82", "cut \ufffd"), (b"x" * 100_000, "x" * 100_000), (b"<|im_end|>", "<|im_end|>"),
])
def test_whatever_is_piped_in_becomes_text(monkeypatch, data, expected):
    monkeypatch.setattr(sys, "stdin", NotATerminal(data))
    assert chat.read_prompt(None) == expected


def test_an_empty_pipe_is_a_mistake(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", NotATerminal(b" \n"))
    assert run_chat("--ckpt", folder) == 2
    assert "there is no prompt" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert run_chat("--ckpt", folder) == 2
    assert chat.read_prompt("bad \udcff byte") == "bad \ufffd byte"


def test_the_default_model_is_fetched_once(tmp_path, capfd):
    with pytest.raises(CheckpointError, match="--ckpt"):
        chat.default_checkpoint(tmp_path)  # an installed package has no scripts folder
    script = tmp_path / "scripts" / "fetch_weights.py"
    script.parent.mkdir()
    script.write_text("import sys\nprint('error: no network', file=sys.stderr)\nsys.exit(2)\n")
    with pytest.raises(CheckpointError, match="could not be fetched"):
        chat.default_checkpoint(tmp_path)
    capfd.readouterr()
    script.write_text("import pathlib, sys\nfolder = pathlib.Path(__file__).parent.parent / 'weights' / sys.argv[1]\n"
                      "folder.mkdir(parents=True)\n(folder / 'config.json').write_text('{}')\nprint(folder)\n")
    folder = chat.default_checkpoint(tmp_path)
    assert folder == tmp_path / "weights" / "smollm2-135m-instruct" and (folder / "config.json").is_file()
    out, err = capfd.readouterr()
    assert out == "" and str(folder) in err
    script.unlink()
    assert chat.default_checkpoint(tmp_path) == folder


class Lines:
    """What the user types: lines, or exceptions (Ctrl-C, the end of input)."""

    def __init__(self, *lines):
        self.lines = iter(lines)

    def __call__(self, _):
        line = next(self.lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def terminal(new_session, monkeypatch, capsys, tmp_path):
    """Runs a chat of the given lines -> (exit code, session, stdout, stderr)."""
    monkeypatch.setattr(chat, "HISTORY_FILE", tmp_path / "history")

    def talk(*lines, **kwargs):
        monkeypatch.setattr(chat, "read_line", Lines(*lines))
        session = kwargs.pop("session", None) or new_session(**kwargs)
        code = chat.Terminal(session, "tiny", []).run()
        return code, session, *capsys.readouterr()

    return talk


def test_the_commands(terminal, tmp_path):
    saved = tmp_path / "a chat.json"
    code, session, out, err = terminal(
        "/help", "", "  ", "/plan", "/plan full", "hello", "/plan 1/2", "/plan 20-29", "/retry", "/plan 4-5", "/plan 0.5",
        "/undo", "/undo",
        "/system Be brief", "/system", "//not a command", f"/save {saved}", "/reset", "/system -", f"/load {saved}", "/stats",
        "/nonsense",
        "/image cat.png", "/image", "/save", "/load", "/load nothing.json", "/__init__", "/quit", "never read")
    assert code == 0
    assert session.messages[0] == {"role": "system", "content": "Be brief"}
    assert session.messages[1]["content"] == "/not a command" and len(session.messages) == 3
    assert len(re.findall("^[a-z]{8}$", out, re.M)) == 3 and out.count("\n") == 3  # hello, its retry, //not a command
    for expected in (chat.HELP, "2 of 6 layers skipped in prefill (4-5)", "full: all 6 layers", "0 of 6 layers skipped",
                     "error: skip names layer 20",
                     "3 of 6 layers skipped, first token", "taken back: hello", "error: there is nothing to take back",
                     "system message: Be brief",
                     "saved 1 questions", "a new conversation", "no system message", "loaded 1 questions",
                     " of 400 rows used", "temperature 0.0",
                     "no command /nonsense", "error: this model takes no pictures", "error: /image needs",
                     "error: /save needs", "error: /load needs",
                     "error: nothing.json", "no command /__init__"):
        assert expected in err, expected
    assert "Traceback" not in err and "never read" not in err


def test_ctrl_c_at_the_prompt_warns_first_and_the_end_of_input_leaves(terminal):
    code, session, out, err = terminal(KeyboardInterrupt(), "hi", KeyboardInterrupt(), KeyboardInterrupt(), "never read")
    assert code == 130 and len(session.exchanges) == 1 and err.count("Ctrl-C again leaves") == 2
    assert terminal("hi")[0] == 0


def test_ctrl_c_stops_the_answer_and_the_session_goes_on(terminal, new_session, monkeypatch):
    session = new_session()
    original, calls = session.runner.decode, []

    def decode(ids):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(ids)

    monkeypatch.setattr(session.runner, "decode", decode)
    code, session, out, err = terminal("one", "two", session=session)
    assert code == 0 and [len(e.answer) for e in session.exchanges] == [2, 8]
    assert "interrupted" in err and re.fullmatch("[a-z]{2}\n[a-z]{8}\n", out)
    monkeypatch.setattr(session.runner, "prefill", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    code, session, out, err = terminal("three", session=session)
    assert code == 0 and len(session.exchanges) == 2 and "stopped before the answer began" in err


def test_what_does_not_fit_is_said_and_the_session_goes_on(terminal):
    code, session, out, err = terminal("x" * 500, "hi", "again", max_seq_len=60)
    assert code == 0 and len(session.exchanges) == 2 and "error: with this message the conversation has" in err
    assert session.log[-1].ended == "context full" and "context full" in err


def test_the_history_file_outlives_the_session(tmp_path, monkeypatch):
    readline = pytest.importorskip("readline")
    monkeypatch.setattr(chat, "HISTORY_FILE", tmp_path / "history")
    readline.clear_history()
    with chat.line_editing():
        readline.add_history("a line to remember")
    readline.clear_history()
    with chat.line_editing():
        assert readline.get_history_item(1) == "a line to remember"
    readline.clear_history()
    for unusable in (tmp_path, tmp_path / "missing" / "history", Path(os.devnull)):
        monkeypatch.setattr(chat, "HISTORY_FILE", unusable)
        with chat.line_editing():  # no history, no complaint
            assert readline.get_current_history_length() == 0


def test_a_terminal_gets_no_control_characters(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Screen())
    chat.show_answer(piece for piece in ["a\x1b[2J", "\x9b1m\tb\nc\r\x7f"])
    assert sys.stdout.getvalue() == "a\ufffd[2J\ufffd1m\tb\nc\ufffd\ufffd\n"


# --- the command line, as people start it -----------------------------------------------------------------------------


def command(folder, *arguments):
    return [sys.executable, "-m", "minipop.chat", "--ckpt", str(folder), "--threads", "1", *map(str, arguments)]


def environment(home, **more):
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "OMP_NUM_THREADS": "1", "TERM": "dumb", **more}


def test_odd_bytes_in_ascii_out(folder, tmp_path):
    done = subprocess.run(command(folder, "--max-new-tokens", 5, "--system", "\u2603"), input=b"\xff\xfe \xe2\x98\x83\0 hi",
                          timeout=120, capture_output=True, env=environment(tmp_path, PYTHONIOENCODING="ascii"))
    assert done.returncode == 0 and re.fullmatch(rb"[a-z]{5}\n", done.stdout)
    assert done.stderr.count(b"\n") == 1 and b"5 answer tokens" in done.stderr


@pytest.mark.parametrize("end", ["closed pipe", "SIGTERM"])
def test_a_long_answer_cut_from_outside_ends_quietly(folder, tmp_path, end):
    process = subprocess.Popen(command(folder, "--prompt", "hi"), env=environment(tmp_path), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    try:
        assert process.stdout.read(1).isalpha()
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            process.stdout.close()
            process.stdout = None
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (143 if end == "SIGTERM" else 0, b"")
    finally:
        process.kill()
        process.wait()


def test_a_session_in_a_terminal(folder, tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        arguments = command(folder)
        os.execve(arguments[0], arguments, environment(tmp_path))
    seen = ""

    def wait_for(pattern, press=None):
        """Read until the pattern appears, and forget everything up to its end. `press`: a key to hit again while nothing comes.

        Python loses a Ctrl-C that arrives just before readline waits for input; it takes effect with the next key.
        """
        nonlocal seen
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, seen)):
            patience = max(0, deadline - time.monotonic())
            ready, _, _ = select.select([terminal], [], [], patience if press is None else min(3, patience))
            if ready:
                seen += os.read(terminal, 4096).decode(errors="replace")
            elif press is not None and patience:
                type_in(press)
            else:
                pytest.fail(f"waited in vain for {pattern!r}, saw {seen[-2000:]!r}")
        seen = seen[found.end():]
        return found

    def type_in(text):
        os.write(terminal, text.encode())

    try:
        wait_for(r"tiny: float32 on cpu, 2 of 6 layers skipped in prefill \(4-5\), context 4096 tokens")
        wait_for("> ")
        type_in("hello\n")
        wait_for(r"hello\r?\n[^a-z]*[a-z]{5}")  # the answer arrives while it is being made: 4,000 tokens are to come
        type_in("\x03")
        wait_for("answer tokens at .* tokens/s, interrupted")
        wait_for("> ")
        type_in("/undo\n")
        wait_for("taken back: hello")
        wait_for("> ")
        type_in("\x03")
        wait_for("Ctrl-C again leaves", press="\x03")
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            type_in("\x03")
            wait_for("never said", press="\x03")
        _, status = os.waitpid(pid, 0)
        pid = None
        # A press that comes while Python shuts down ends it by the signal itself; to a shell both are 130.
        assert os.waitstatus_to_exitcode(status) in (130, -signal.SIGINT)
        assert (tmp_path / ".minipop_history").read_text().split() == ["hello", "/undo"]
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


@pytest.mark.real
@pytest.mark.skipif(not (SMOLLM / "model.safetensors").is_file(), reason="needs scripts/fetch_weights.py smollm2-135m-instruct")
def test_the_capital_of_france(capsys):
    for plan in ([], ["--full"]):
        assert run_chat("--ckpt", SMOLLM, "--prompt", "What is the capital of France?", "--temperature", 0, *plan) == 0
        out, err = capsys.readouterr()
        assert "Paris" in out and f"{0 if plan else 10} of 30 layers skipped" in err
