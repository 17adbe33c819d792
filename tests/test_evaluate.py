"""Evaluation through lm-eval: its own Hugging Face model when nothing is skipped, one request at a time when something is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import minipop
from minipop import MinipopError, PrefillPlan, PromptError, Runner, SamplingParams, TokenizerError, evaluate
from minipop.tasks import continuation, humaneval, local, retrieval
from tests.test_inspect import save_tiny
from tests.tiny import BASE

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402

from minipop import lm_eval_model  # noqa: E402
from minipop.lm_eval_model import MinipopLM, split_window  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
POP = PrefillPlan.deepest(6, 1 / 2)
DATA = {
    "piqa.jsonl": [{"goal": f"do the {w}", "choices": [f"go {w}", "a long way home"], "label": i % 2} for i, w in enumerate("abcdef")],
    "openbookqa.jsonl": [{"stem": f"the {w} is", "choices": ["hot", "cold", w, "the best of all"], "label": i} for i, w in enumerate("abc")],
    "boolq.jsonl": [{"passage": f"{w} is a letter.", "question": f"is {w} a letter", "label": i % 2} for i, w in enumerate("abc")],
    "commonsenseqa.jsonl": [{"question": f"{w} what?", "choices": list("vwxyz"), "label": i} for i, w in enumerate("abc")],
    "hellaswag.jsonl": [{"activity": "Sport", "context": "A man runs. he", "endings": ["[step] stops.", "goes  on.", "ends", "is it"], "label": 2}],
    "gsm8k.jsonl": [{"question": f"{n} and 1?", "answer": f"It is so\n#### {n + 1}"} for n in range(3)],
    "gsm8k_examples.jsonl": [{"question": f"what is {n}?", "answer": f"It is\n#### {n}"} for n in range(5)],
    "humaneval.jsonl": [{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n",
                         "test": "def check(f):\n    assert f(1) == 1\n"}],
}


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|extra|>"]
# As many tokens as the tiny models have ids: transformers would sample ids beyond the tokenizer's, minipop never does.
VOCAB = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz.?!,:/'#+-ABEIJQSW0123456789_=\u0120\u010a"]  # the last two: a space and a new line
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% endif %}")


def tokenizer_files(template=TEMPLATE):
    """A tokenizer of a token a character."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "add_bos_token": False,
              "eos_token": "<|im_end|>", **({"chat_template": template} if template else {})}
    return {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of two families."""
    assert len(VOCAB) == BASE["vocab_size"]
    base = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama", "gemma3_text"):
        save_tiny(base / family, family, extra_files=tokenizer_files(), bos_token_id=0, eos_token_id=1, pad_token_id=1,
                  max_position_embeddings=640)
    return base


@pytest.fixture(scope="module")
def folder(folders):
    return folders / "llama"


@pytest.fixture(scope="module")
def model(folder):
    return minipop.load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return minipop.load_tokenizer(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_data")
    for name, rows in DATA.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "continuation").mkdir()
    lines = [f"line {n} of the text, it has {'some ' * (n % 7)}words in it and ends here." for n in range(99)]
    (folder / "continuation" / "text.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """torch's description of the machine, which lm-eval puts into results, takes seconds."""
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: "a machine")


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


def ask(lm, kind, arguments):
    return getattr(lm, kind)(instances(kind, arguments), disable_tqdm=True)


# --- nothing skipped: lm-eval's own model --------------------------------------------------------------------------------------

PAIRS = [("the end", " of it"), ("the end", " of"), ("the end", "!"), ("a", "bc"), ("", "hello"), ("", "h"), ("spaces  ", "end"),
         ("a context that is longer than what fits", " and an answer"), ("the end", " of it"), ("z", "y" * 20), ("What is it?", " I")]
TEXTS = ["a", "ab", "hello there, this is a text that takes some windows to score", "twenty-four characters!!", "it", ""]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def both(request, folders):
    """Our model and lm-eval's of the same checkpoint, 24 tokens at most."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folders / request.param
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    theirs = HFLM(pretrained=reference, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=3, max_length=24)
    return MinipopLM(minipop.load_model(folder), minipop.load_tokenizer(folder), batch_size=3, max_seq_len=24), theirs


def test_loglikelihood_equals_lm_evals_own_model(both):
    ours, theirs = both
    pairs = [*PAIRS, *((context, text) for context, text in zip(("the end", "a", "What"), ask(theirs, "generate_until", [
        (context, {"max_gen_toks": 5}) for context in ("the end", "a", "What")])))]  # what the model itself would write
    mine, others = ask(ours, "loglikelihood", pairs), ask(theirs, "loglikelihood", pairs)
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in others], rel=2e-5)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in others]
    assert {greedy for _, greedy in mine} == {True, False}


def test_rolling_loglikelihood_equals_lm_evals_own_model(both):
    ours, theirs = both
    args = [(text,) for text in TEXTS]
    assert ask(ours, "loglikelihood_rolling", args) == pytest.approx(ask(theirs, "loglikelihood_rolling", args), rel=2e-5)


def test_generated_answers_equal_lm_evals_own_model(both):
    ours, theirs = both
    contexts = ["the end", "a", "What is it?", "a context that is longer than what fits", "the end", "cc"]
    free = ask(theirs, "generate_until", [(context, {"max_gen_toks": 12, "do_sample": False}) for context in contexts])
    stops = [text[3:5] for text in free if len(text) > 5]
    assert len(set(free)) > 2 and stops
    for options in ({"max_gen_toks": 12, "do_sample": False}, {"until": stops, "max_gen_toks": 12}, {"until": "e", "max_gen_toks": 1},
                    {"until": [*stops, "<|im_start|>"], "max_gen_toks": 9, "temperature": 0.0}):
        args = [(context, options) for context in contexts]
        assert ask(ours, "generate_until", args) == ask(theirs, "generate_until", args)


# --- something skipped: the runner, one request at a time -----------------------------------------------------------------------


def alone(model, plan, context, continuation):
    """(log-likelihood, is greedy) of one continuation by two calls to a runner that holds nothing else."""
    runner = Runner(model, plan, max_seq_len=200)
    logits = [runner.prefill([context])]  # [1, vocab]
    if len(continuation) > 1:
        logits.append(runner.extend([continuation[:-1]])[0])
    table, targets = torch.cat(logits).log_softmax(-1), torch.tensor(continuation)
    return float(table[range(len(continuation)), targets].sum()), bool((table.argmax(-1) == targets).all())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_loglikelihood_under_a_plan_is_prefill_then_extend(folders, family, batch_size, monkeypatch):
    model, tokenizer = minipop.load_model(folders / family), minipop.load_tokenizer(folders / family)
    monkeypatch.setattr(lm_eval_model, "LOGITS", 3 * model.config.vocab_size * batch_size)  # a few positions at a time
    lm = MinipopLM(model, tokenizer, POP, batch_size, max_seq_len=200)
    scores = ask(lm, "loglikelihood", PAIRS)
    expected = []
    for context, answer in PAIRS:
        stripped = context.rstrip()
        ids = tokenizer.encode(stripped + context[len(stripped):] + answer)
        cut = len(tokenizer.encode(stripped))
        expected.append(alone(model, POP, ids[:cut] or [0], ids[cut:]))
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    full = ask(MinipopLM(model, tokenizer, None, batch_size, max_seq_len=200), "loglikelihood", PAIRS)
    assert max(abs(a - b) for (a, _), (b, _) in zip(scores, full)) > 0.01


def test_a_context_loses_its_beginning(model, tokenizer):
    lm = MinipopLM(model, tokenizer, POP, max_seq_len=10)
    long, answer = tokenizer.encode("a context that is too long"), tokenizer.encode(" for it")
    [(score, _)] = ask(lm, "loglikelihood", [("a context that is too long", " for it")])
    assert score == pytest.approx(alone(model, POP, long[-4:], answer)[0], rel=1e-5)  # 10 tokens are read, the 11th is asked for
    with pytest.raises(PromptError, match="continuation of 11 tokens is longer than max_seq_len 10"):
        ask(lm, "loglikelihood", [("a", "b" * 11)])


def test_the_longest_context_that_the_model_takes(model, tokenizer):
    pairs = [("ab" * 400, "c" * n) for n in (1, 3)]
    scores = ask(MinipopLM(model, tokenizer, POP, max_seq_len=640), "loglikelihood", pairs)
    for (context, answer), (score, _) in zip(pairs, scores):
        ids = tokenizer.encode(context)[-(641 - len(answer)):]
        runner = Runner(model, POP, 640)
        logits = [runner.prefill([ids])] + ([runner.extend([tokenizer.encode(answer)[:-1]])[0]] if len(answer) > 1 else [])
        assert score == pytest.approx(float(torch.cat(logits).log_softmax(-1)[:, tokenizer.encode("c")[0]].sum()), rel=1e-5)


def test_contexts_are_prefilled_once(model, tokenizer, monkeypatch):
    prefilled = []
    prefill = Runner.prefill
    monkeypatch.setattr(Runner, "prefill", lambda self, ids: prefilled.extend(map(tuple, ids)) or prefill(self, ids))
    ask(MinipopLM(model, tokenizer, POP), "loglikelihood", [(c, f" {w}") for w in ("one", "two", "x") for c in ("What", "the end", "a")])
    assert len(prefilled) == len(set(prefilled)) == 3


def test_rolling_loglikelihood_prunes_the_first_half_of_each_window(model, tokenizer):
    lm = MinipopLM(model, tokenizer, POP, max_seq_len=16)
    text = "the quick fox is here"  # 21 tokens: a window of 16 and one of 5 with 12 before it
    ids = [0, *tokenizer.encode(text)]
    parts = [(ids[:1], ids[1:8]), (ids[:8], ids[8:17]), (ids[5:17], ids[17:])]
    assert ask(lm, "loglikelihood_rolling", [(text,)]) == pytest.approx([sum(alone(model, POP, *part)[0] for part in parts)], rel=1e-5)


@pytest.mark.parametrize("context, predicted", [(1, 1), (1, 2), (1, 15), (2, 2), (8, 8), (12, 4), (1, 100)])
def test_a_window_is_split_without_loss(context, predicted):
    ids = list(range(context + predicted))
    parts = split_window(ids[:context], ids[context:])
    assert [token for _, part in parts for token in part] == ids[context:]
    assert all(before == ids[: part[0]] for before, part in parts)
    assert len(parts) == 1 or len(parts[1][0]) == (context + predicted) // 2


def test_generated_answers_under_a_plan_are_the_runners(model, tokenizer):
    lm = MinipopLM(model, tokenizer, POP, batch_size=2)
    contexts = ["the end", "a", "What is it?", "cc", ""]
    answers = ask(lm, "generate_until", [(context, {"until": ["e"], "max_gen_toks": 20}) for context in contexts])
    for context, answer in zip(contexts, answers):
        ids = list(Runner(model, POP, 100).generate(tokenizer.encode(context) or [0], SamplingParams(temperature=0.0, max_new_tokens=20)))
        assert answer == tokenizer.decode(ids).partition("e")[0]


def test_sampled_answers_follow_from_the_seed(model, tokenizer):
    def sample(seed, **options):
        args = [(c, {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12, **options}) for c in ("abc", "the end", "abc")]
        return ask(MinipopLM(model, tokenizer, POP, batch_size=4, seed=seed), "generate_until", args)

    first, second, third = sample(3)
    assert sample(3) == [first, second, third] and sample(4) != [first, second, third]
    assert first != third  # the same prompt again is another sample
    assert sample(3, top_k=1) == ask(MinipopLM(model, tokenizer, POP), "generate_until", [
        (c, {"max_gen_toks": 12}) for c in ("abc", "the end", "abc")])


def test_what_it_cannot_do_is_refused(model, tokenizer):
    lm = MinipopLM(model, tokenizer, POP, max_seq_len=20)
    with pytest.raises(PromptError, match="num_beams"):
        ask(lm, "generate_until", [("a", {"num_beams": 2, "max_gen_toks": 2})])
    with pytest.raises(PromptError, match="leave no room"):
        ask(lm, "generate_until", [("a", {"max_gen_toks": 20})])
    with pytest.raises(PromptError, match="max_seq_len"):
        MinipopLM(model, tokenizer, POP, max_seq_len=641)


# --- chats ----------------------------------------------------------------------------------------------------------------------


def test_a_chat_is_encoded_as_the_template_means_it(model, tokenizer):
    lm, messages = MinipopLM(model, tokenizer), [{"role": "user", "content": "say <|im_end|> to me"}]
    text = lm.apply_chat_template(messages)
    assert lm.tok_encode(text) == tokenizer.apply_chat_template(messages)
    assert lm.tok_encode(text).count(1) == 1  # the template's own; the user's stays text
    context, continuation = lm._encode_pair(text, "yes")
    assert context == tokenizer.apply_chat_template(messages) and continuation == tokenizer.encode("yes")
    opened = lm.apply_chat_template([*messages, {"role": "assistant", "content": "It is "}], add_generation_prompt=False)
    assert lm.tok_encode(opened)[-5:] == tokenizer.encode("It is")
    assert lm.chat_template(True) == TEMPLATE and lm.tokenizer_name


def test_chat_results_equal_lm_evals_own_model(both):
    ours, theirs = both
    chats = [[{"role": "user", "content": text}] for text in ("hello", "What is it?")]
    mine, others = [[lm.apply_chat_template(chat) for chat in chats] for lm in (ours, theirs)]
    assert mine == others
    pairs = [(text, answer) for text in mine for answer in ("yes", "no")]
    assert [s for s, _ in ask(ours, "loglikelihood", pairs)] == pytest.approx([s for s, _ in ask(theirs, "loglikelihood", pairs)], rel=2e-5)


# --- tasks ----------------------------------------------------------------------------------------------------------------------

LIKELIHOOD = ["minipop_piqa", "minipop_openbookqa", "minipop_boolq", "minipop_commonsenseqa", "minipop_commonsenseqa_letters", "minipop_hellaswag"]


@pytest.fixture(scope="module")
def results(model, tokenizer, data):
    tasks = [*LIKELIHOOD, "minipop_gsm8k", "minipop_continuation"]
    return {plan: evaluate.evaluate(model, tokenizer, plan, tasks, limit=3, batch_size=4, seed=1, max_seq_len=512, data=data)
            for plan in (None, POP)}


def test_tasks_give_lm_evals_results(results):
    for result in results.values():
        for name in LIKELIHOOD:
            assert 0 <= result["results"][name]["acc,none"] <= 1
        for filter_name in ("strict-match", "flexible-extract"):
            assert f"exact_match,{filter_name}" in result["results"]["minipop_gsm8k"]
        samples = result["samples"]["minipop_piqa"]
        assert [sample["doc"]["goal"] for sample in samples] == ["do the a", "do the b", "do the c"]  # in order: paired differences
        assert result["results"]["minipop_piqa"]["acc,none"] == pytest.approx(sum(sample["acc"] for sample in samples) / 3)
    assert results[POP]["config"]["prefill_plan"] == POP.describe()
    assert results[None]["samples"]["minipop_boolq"] != results[POP]["samples"]["minipop_boolq"]


def test_prompts_are_those_of_the_standard_tasks(results):
    def arguments(name, item=0):
        return results[None]["samples"][name][item]["arguments"]

    assert arguments("minipop_piqa") == [("Question: do the a\nAnswer:", " go a"), ("Question: do the a\nAnswer:", " a long way home")]
    assert arguments("minipop_openbookqa")[3] == ("the a is", " the best of all")
    assert arguments("minipop_boolq") == [("a is a letter.\nQuestion: is a a letter?\nAnswer:", f" {word}") for word in ("no", "yes")]
    assert arguments("minipop_commonsenseqa")[4] == ("Question: a what?\nAnswer:", " z")
    assert arguments("minipop_commonsenseqa_letters")[1] == ("Question: a what?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:", " B")
    assert arguments("minipop_hellaswag")[:2] == [("Sport: A man runs. He", "  stops."), ("Sport: A man runs. He", " goes on.")]
    examples = "".join(f"Question: what is {n}?\nAnswer: It is\n#### {n}\n\n" for n in range(5))
    assert arguments("minipop_gsm8k", 1)[0][0] == f"{examples}Question: 1 and 1?\nAnswer:"


def test_continuation_is_the_nll_of_64_tokens_after_384(results, model, tokenizer):
    for plan, result in results.items():
        samples = result["samples"]["minipop_continuation"]
        for sample in samples:
            doc = sample["doc"]
            ids = tokenizer.encode(doc["prompt"] + doc["continuation"])
            assert len(tokenizer.encode(doc["prompt"])) == 384 and len(ids) == 384 + 64
            runner = Runner(model, plan, max_seq_len=512)
            logits = torch.cat((runner.prefill(ids[:384]), runner.extend([ids[384:-1]])[0])).log_softmax(-1)
            assert sample["nll"] == pytest.approx(-float(logits[range(64), ids[384:]].mean()), rel=1e-5)
        mean = sum(sample["nll"] for sample in samples) / len(samples)
        summary = result["results"]["minipop_continuation"]
        assert summary["nll,none"] == pytest.approx(mean) and summary["perplexity,none"] == pytest.approx(2.718281828459045**mean)
        assert summary["nll_stderr,none"] > 0


def test_few_shot_examples_come_before(model, tokenizer, data):
    result = evaluate.evaluate(model, tokenizer, POP, ["minipop_piqa"], limit=2, num_fewshot=2, data=data, max_seq_len=512)
    prompts = [sample["arguments"][0][0] for sample in result["samples"]["minipop_piqa"]]
    assert all(prompt.count("Question:") == 3 for prompt in prompts) and prompts[0].endswith("do the a\nAnswer:")
    assert "do the a" not in prompts[0][: prompts[0].rindex("Question")]


@pytest.mark.parametrize("options, words", [
    ({"num_fewshot": 9}, "--num-fewshot 9 is more than a task has examples for"), ({"limit": 0}, "limit must be 1 or more, not 0"),
    ({"batch_size": 0}, "batch_size must be 1 or more"), ({"num_fewshot": -1}, "num_fewshot must be 0 or more")])
def test_counts_that_make_no_sense(model, tokenizer, data, options, words):
    with pytest.raises(MinipopError, match=words):
        evaluate.evaluate(model, tokenizer, POP, ["minipop_gsm8k"], data=data, **{"limit": 1, **options})


def test_only_a_lack_of_examples_is_called_one(model, tokenizer, data, monkeypatch):
    options = {"limit": 1, "num_fewshot": 999, "data": data}
    with pytest.raises(MinipopError, match="--num-fewshot 999 is more than a task has examples for: .*Sample larger than population"):
        evaluate.evaluate(model, tokenizer, POP, ["minipop_piqa"], **options)
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **options: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        evaluate.evaluate(model, tokenizer, POP, ["minipop_piqa"], **options)


def test_data_of_another_form(model, tokenizer, data, tmp_path):
    (tmp_path / "piqa.jsonl").write_text('{"question": "who?", "choices": ["a", "b"], "label": 0}\n')
    with pytest.raises(MinipopError, match="cannot load the task minipop_piqa: .*goal"):
        evaluate.evaluate(model, tokenizer, POP, ["minipop_piqa"], data=tmp_path)


def test_retrieval_items_have_one_right_answer():
    docs = retrieval.load(7)["test"]
    assert docs.to_list() == retrieval.load(7)["test"].to_list() != retrieval.load(8)["test"].to_list()
    assert [doc["length"] for doc in docs.select(range(4))] == [256, 512, 1024, 256] and len(docs) == 300
    for doc in docs.select(range(30)):
        *lines, question = doc["prompt"].split("\n")
        table = dict(line.split(": ") for line in lines)
        assert len(table) == len(lines) == retrieval.LINES[doc["length"]] == len(set(table.values()))
        assert table[question.removesuffix(":")] == doc["choices"][doc["label"]]
        assert len(set(doc["choices"])) == 4 and set(doc["choices"]) <= set(table.values())
        assert lines[round(doc["depth"] * (len(lines) - 1))].startswith(question)
    assert {doc["label"] for doc in docs} == {0, 1, 2, 3}


def test_retrieval_metrics():
    doc = {"label": 2, "length": 512}
    assert retrieval.process_results(doc, [(-4.0, False), (-3.0, True), (-1.0, True), (-2.0, False)]) == {
        "acc": 1.0, "exact_match": 1.0, "acc_512": 1.0}
    assert retrieval.process_results(doc, [(-1.0, False), (-3.0, False), (-2.0, False), (-2.0, False)])["acc"] == 0.0


def test_continuation_pieces_do_not_overlap(tokenizer, data):
    text = (data / "continuation" / "text.txt").read_text()
    pieces = continuation.load(tokenizer, data, 3)["test"].to_list()
    assert pieces == continuation.load(tokenizer, data, 3)["test"].to_list() != continuation.load(tokenizer, data, 4)["test"].to_list()
    places = sorted((text.index(whole), len(whole)) for whole in (piece["prompt"] + piece["continuation"] for piece in pieces))
    assert len(places) > 2 and all(start == 0 or text[start - 1] == "\n" for start, _ in places)
    assert all(start + length <= following for (start, length), (following, _) in zip(places, places[1:]))


def test_continuation_falls_back_to_pythons_own_sources(tokenizer, tmp_path):
    texts = continuation.texts(tmp_path / "continuation")
    assert len(texts) > 5 and all("def " in text for text in texts)
    (tmp_path / "continuation").mkdir()
    (tmp_path / "continuation" / "a.txt").write_text("short")
    with pytest.raises(MinipopError, match="no piece of 448 tokens"):
        continuation.load(tokenizer, tmp_path)
    with pytest.raises(MinipopError, match="tokenizer"):
        continuation.load()


def test_hellaswag_texts():
    doc = {"activity": "Cooking", "context": "She cuts it [substeps] twice. then she", "endings": ["[step] eats", "sings"]}
    assert local.hellaswag_query(doc) == "Cooking: She cuts it twice. Then she"
    assert local.hellaswag_query({"activity": "Home", "context": "Clean it. [title] Start. Go on."}) == "Home: Clean it.. Start. Go on."
    assert local.hellaswag_choices(doc) == [" eats", "sings"]


# --- generated code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program, verdict", [
    ("assert 1 + 1 == 2", "passed"), ("assert 1 + 1 == 3", "failed: AssertionError"), ("print('passed')\n1 / 0", "failed: ZeroDivisionError"),
    ("import sys; sys.exit(0)", "failed: SystemExit"), ("import os; os._exit(0)", "failed: ended with code 0"), ("def f(:", "failed: SyntaxError"),
    ("x = bytearray(3 << 30)", "failed: MemoryError"), ("open('big', 'wb').write(bytes(4 << 20))", "failed: "),
    ("raise ValueError('\\udc80')", "failed: ValueError"),
    ("import os; assert os.listdir('.') == [] and 'SECRET' not in os.environ", "passed")])
def test_a_program_runs_within_limits(program, verdict, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert humaneval.run_program(program).startswith(verdict)


def runs(pid):
    """Whether a process is there and not only waiting to be forgotten."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_program_that_does_not_end_is_stopped_with_all_it_started(tmp_path):
    note = tmp_path / "pid"
    program = f"import os\ntry:\n    if os.fork() == 0: open({str(note)!r}, 'w').write(str(os.getpid()))\nexcept OSError: pass\nwhile True: pass"
    assert humaneval.run_program(program, seconds=3) == "timed out"
    deadline = time.monotonic() + 20
    while note.exists() and runs(int(note.read_text())):  # it was allowed to start one (root is)
        assert time.monotonic() < deadline, "the process that the program started is still there"


def test_pass_at_1_is_that_the_tests_pass():
    doc = DATA["humaneval.jsonl"][0]
    assert humaneval.process_results(doc, [doc["canonical_solution"]]) == {"pass@1": 1.0}
    assert humaneval.process_results(doc, ["    return x + 1\n"]) == {"pass@1": 0.0}


def test_generated_code_needs_permission(model, tokenizer, data, monkeypatch):
    monkeypatch.setattr(Runner, "prefill", lambda *args: pytest.fail("something was generated"))
    with pytest.raises(MinipopError, match="minipop_humaneval runs code that the model writes: add --allow-code-execution"):
        evaluate.evaluate(model, tokenizer, POP, ["minipop_humaneval"], data=data)
    monkeypatch.undo()
    monkeypatch.setattr("minipop.lm_eval_model.MinipopLM._answer", lambda self, runner, prompts, params, until: ["    return x\n"])
    result = evaluate.evaluate(model, tokenizer, POP, ["minipop_humaneval"], data=data, allow_code_execution=True)
    assert result["results"]["minipop_humaneval"]["pass@1,none"] == 1.0


# --- mistakes, and the command --------------------------------------------------------------------------------------------------


def run_evaluate(folder, *arguments):
    return evaluate.main(["--ckpt", str(folder), *map(str, arguments)])


def test_the_command_writes_lm_evals_files(folder, data, tmp_path, capsys):
    assert run_evaluate(folder, "--tasks", "minipop_piqa,minipop_boolq", "--limit", 2, "--skip-layers", "4,5", "--data", data, "--output",
                        tmp_path / "out", "--log-samples", "--seed", 5, "--batch-size", 2) == 0
    printed = capsys.readouterr().out
    assert "minipop_piqa" in printed and "2 of 6 layers skipped in prefill (4-5)" in printed
    [results] = (tmp_path / "out").rglob("results_*.json")
    values = json.loads(results.read_text())
    assert values["config"]["prefill_plan"] == "2 of 6 layers skipped in prefill (4-5)" and values["config"]["random_seed"] == 5
    assert str(results) in printed and results.parent.name == "llama"
    samples = sorted(path.name.split("_2")[0] for path in (tmp_path / "out").rglob("samples_*.jsonl"))
    assert samples == ["samples_minipop_boolq", "samples_minipop_piqa"]
    assert len(next((tmp_path / "out").rglob("samples_minipop_piqa*")).read_text().splitlines()) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["llama"]  # nothing temporary is left


def test_the_command_applies_the_chat_template(folder, data, tmp_path):
    assert run_evaluate(folder, "--tasks", "minipop_piqa", "--limit", 1, "--full", "--data", data, "--output", tmp_path, "--log-samples",
                        "--apply-chat-template", "--num-fewshot", 1) == 0
    [line] = next(tmp_path.rglob("samples_*.jsonl")).read_text().splitlines()
    prompt = json.loads(line)["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("<|im_start|>user:Question:") and prompt.count("<|im_end|>") == 3 and prompt.endswith("<|im_end|><|im_start|>")


@pytest.mark.parametrize("arguments, message", [
    (["--tasks", "minipop_pika", "--data", "DATA"], "there is no task 'minipop_pika'; did you mean minipop_piqa"),
    (["--tasks", ","], "no tasks given"),
    (["--tasks", "minipop_piqa", "--data", "nowhere"], "nowhere/piqa.jsonl: no such file; python scripts/fetch_eval_data.py"),
    (["--tasks", "minipop_piqa", "--log-samples"], "--log-samples needs --output"),
    (["--tasks", "minipop_humaneval", "--data", "DATA"], "minipop_humaneval runs code"),
    (["--tasks", "minipop_piqa", "--num-fewshot", "-1"], "must be a whole number"),
    (["--tasks", "minipop_piqa", "--data", "DATA", "--max-seq-len", "1000"], "max_seq_len must lie between 2 and the 640 positions"),
    (["--tasks", "minipop_piqa", "--output", "DATA/piqa.jsonl"], "piqa.jsonl"),
])
def test_mistakes_are_one_line(folder, data, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(evaluate, "_default_manager", lambda: evaluate._manager(local=True))  # lm-eval's own index takes seconds to read
    assert run_evaluate(folder, *(argument.replace("DATA", str(data)) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1] and "Traceback" not in error


def test_a_task_that_cannot_be_loaded_is_one_line(model, tokenizer, monkeypatch, tmp_path):
    """As without a network: the data set's loader raises whatever it likes."""
    (tmp_path / "far.yaml").write_text("task: far\ndataset_path: org/far\noutput_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\n")
    from lm_eval.tasks import TaskManager

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'org/far' on the Hub\nand a second line")

    monkeypatch.setattr("datasets.load_dataset", offline)
    monkeypatch.setattr(evaluate, "_default_manager", lambda: TaskManager(include_path=str(tmp_path), include_defaults=False))
    with pytest.raises(MinipopError, match="lm-eval cannot load the task far: ConnectionError: Couldn't reach 'org/far' on the Hub$"):
        evaluate.evaluate(model, tokenizer, POP, ["far"])


def test_damaged_data_are_named(model, tokenizer, tmp_path):
    for text, message in (("", "is empty"), ('{"goal": 1', "line 1: not valid JSON"), ('{"a": 1}\n{"b": 1}\n', "differ in their keys")):
        (tmp_path / "piqa.jsonl").write_text(text)
        with pytest.raises(MinipopError, match=message):
            evaluate.evaluate(model, tokenizer, POP, ["minipop_piqa"], data=tmp_path)


def test_without_lm_eval_it_says_what_to_install(monkeypatch, folder, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run_evaluate(folder, "--tasks", "minipop_piqa") == 2
    assert "install the eval extra" in capsys.readouterr().err


def test_lm_eval_finds_the_model_by_its_name(folder, data):
    result = lm_eval.simple_evaluate("minipop", f"ckpt={folder},plan=1/2,max_seq_len=200", batch_size=2, limit=2, bootstrap_iters=0,
                                     tasks=evaluate.load_tasks(["minipop_piqa"], data=data), task_manager=evaluate._manager(local=True))
    assert result["config"]["prefill_plan"] == POP.describe() and result["config"]["max_length"] == 200
    assert result["config"]["calibrated_kv"] is None
    ours = evaluate.evaluate(minipop.load_model(folder), minipop.load_tokenizer(folder), POP, ["minipop_piqa"], limit=2, data=data)
    assert [s["resps"] for s in result["samples"]["minipop_piqa"]] == [s["resps"] for s in ours["samples"]["minipop_piqa"]]


@pytest.mark.parametrize("arguments, message", [("plan=1/2", "needs ckpt=FOLDER"), ("ckpt=x,paln=1/2", "no argument 'paln'")])
def test_wrong_arguments_from_lm_eval(arguments, message):
    with pytest.raises(MinipopError, match=message):
        MinipopLM.create_from_arg_string(arguments)


def test_no_chat_template_is_one_line(tmp_path, data):
    save_tiny(tmp_path / "plain", "llama", extra_files=tokenizer_files(template=None), bos_token_id=0, eos_token_id=1)
    with pytest.raises(TokenizerError, match="no chat template"):
        evaluate.evaluate(minipop.load_model(tmp_path / "plain"), minipop.load_tokenizer(tmp_path / "plain"), POP, ["minipop_piqa"],
                          data=data, limit=1, apply_chat_template=True)


def test_list_shows_the_tasks(capsys):
    assert evaluate.main(["--tasks", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == sorted([*LIKELIHOOD, "minipop_gsm8k", "minipop_humaneval", "minipop_retrieval", "minipop_continuation"])


def test_as_a_command_and_what_it_imports_before_it_must():
    command = [sys.executable, "-X", "importtime", "-m", "minipop.evaluate", "--tasks", "minipop_piqa"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: --ckpt is missing")
    assert "torch" in imported and not imported & {"lm_eval", "datasets", "transformers", "pandas"}
