"""Sampling: every filter against transformers' processors, exact greedy, seeds and rows, and what must be refused."""

import dataclasses
import math

import numpy
import pytest
import torch

from minipop.errors import MinipopError, PromptError
from minipop.sampling import (Sampler, SamplingParams, apply_repetition_penalty, apply_temperature, draw, keep_min_p, keep_top_k,
                              keep_top_p, log_probs, process_logits)

INF, NAN = math.inf, math.nan


def random_logits(rows=3, vocab=200, seed=0, scale=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def log_of(*probs):
    return torch.tensor([probs]).log()


def kept(logits):
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def run_sampler(params, prompts, steps, num_token_ids=None):
    """Feed the same fixed logits to every row, step by step, and collect the tokens of each row."""
    vocab = steps.shape[1]
    sampler = Sampler(params, prompts, vocab_size=vocab, num_token_ids=num_token_ids, device="cpu")
    return torch.stack([sampler.sample(step.expand(len(prompts), -1)) for step in steps], dim=1).tolist()


# ---- parameters ----


def test_defaults_and_accepted_values():
    params = SamplingParams()
    assert dataclasses.astuple(params) == (1.0, 0, 1.0, 0.0, 1.0, 256, None, ())
    params = SamplingParams(temperature=0, top_k=numpy.int64(5), top_p=numpy.float32(0.5), min_p=1, repetition_penalty=2,
                            max_new_tokens=0, seed=2**64 - 1, stop_token_ids=[1, numpy.int64(2)])
    assert params == SamplingParams(0.0, 5, 0.5, 1.0, 2.0, 0, 2**64 - 1, (1, 2))
    assert type(params.top_k) is int and type(params.temperature) is float and type(params.stop_token_ids[1]) is int
    assert hash(params) == hash(dataclasses.replace(params))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


@pytest.mark.parametrize("field, bad", [
    ("temperature", [-1.0, -1e-9, NAN, INF, 10**400, "1", True, None, [1.0], 1j]),
    ("top_k", [-1, 1.0, 50.5, "5", True, None, NAN]),
    ("top_p", [-1e-9, 1.0000001, NAN, INF, "1", True, None]),
    ("min_p", [-1e-9, 1.0000001, NAN, -INF, "0", False, None]),
    ("repetition_penalty", [0, 0.0, -1.0, NAN, INF, "1", True, None]),
    ("max_new_tokens", [-1, 2.0, INF, "8", False, None]),
    ("seed", [-1, 2**64, 1.0, "0", True]),
    ("stop_token_ids", [5, "12", None, (1, -2), (1.0,), ("1",), (True,), [[1]], {1: 2}]),
])
def test_bad_parameters_are_named_in_one_line(field, bad):
    for value in bad:
        with pytest.raises(PromptError, match=field) as error:
            SamplingParams(**{field: value})
        assert len(str(error.value).splitlines()) == 1


# ---- the steps against transformers ----


def reference(logits, params, histories):
    """The same steps by transformers' processors. They see a rectangle of ids, so each row is processed alone."""
    process = pytest.importorskip("transformers.generation.logits_process")
    steps = []
    if params.repetition_penalty != 1:
        steps.append(process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        steps.append(process.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(process.MinPLogitsWarper(params.min_p))
    steps = process.LogitsProcessorList(steps)
    return torch.cat([steps(torch.tensor([ids]), row[None]) for row, ids in zip(logits, histories, strict=True)])


@pytest.mark.parametrize("fields", [
    dict(), dict(temperature=0.7), dict(temperature=2.5), dict(top_k=1), dict(top_k=17), dict(top_k=10**6),
    dict(top_p=0.3), dict(top_p=0.95), dict(top_p=0.999), dict(min_p=0.05), dict(min_p=0.5), dict(min_p=1.0),
    dict(repetition_penalty=1.3), dict(repetition_penalty=0.6),
    dict(repetition_penalty=1.2, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    dict(repetition_penalty=1.7, temperature=1.6, top_k=100, top_p=0.97, min_p=0.01),
    dict(repetition_penalty=0.8, temperature=0.5, top_k=5, top_p=0.5, min_p=0.3),
], ids=str)
def test_distribution_equals_transformers(fields):
    params = SamplingParams(**fields)
    histories = [[2, 5, 7, 9], [11, 11, 11, 3], [0, 199, *range(100, 150)]]  # repeated ids, both ends of the vocabulary
    for seed in range(5):
        logits = random_logits(seed=seed)
        logits[1, 20:40] = -INF  # tokens the model itself rules out
        sampler = Sampler(params, histories, vocab_size=200, device="cpu")
        ours, theirs = process_logits(logits, params, sampler.seen), reference(logits, params, histories)
        assert kept(ours) == kept(theirs)
        torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


def test_steps_by_hand():
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0, -INF]])
    seen = torch.tensor([[True, True, True, False, True]])
    assert apply_repetition_penalty(logits, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 3.0, -INF]]
    assert apply_temperature(logits, 0.5).tolist() == [[-2.0, -10.0, -6.0, 0.0, -INF]]
    assert kept(keep_top_k(logits, 2)) == [[0, 3]]
    assert kept(keep_top_k(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), 2)) == [[0, 1, 2]]  # what ties with the k-th stays
    probs = log_of(0.125, 0.5, 0.125, 0.25)
    assert [kept(keep_top_p(probs, p)) for p in (0.5, 0.51, 0.75, 0.76)] == [[[1]], [[1, 3]], [[1, 3]], [[0, 1, 3]]]
    assert [kept(keep_min_p(probs, p)) for p in (0.2, 0.4, 0.6)] == [[[0, 1, 2, 3]], [[1, 3]], [[1]]]


def test_the_order_of_the_steps_matters():
    probs = log_of(0.4, 0.3, 0.2, 0.1)
    # Temperature before top-p: squaring gives 16/30, 9/30, 4/30, 1/30, of which two reach 0.8; unsquared three are needed.
    assert kept(process_logits(probs, SamplingParams(temperature=0.5, top_p=0.8))) == [[0, 1]]
    # Top-k before top-p: 4/7 of what top-k left reaches 0.5, while 0.4 of everything does not.
    assert kept(process_logits(probs, SamplingParams(top_k=2, top_p=0.5))) == [[0]]
    # Penalty before top-k: token 0 falls to the second place (its log is negative, so it is multiplied).
    seen = torch.tensor([[True, False, False, False]])
    assert kept(process_logits(probs, SamplingParams(top_k=1, repetition_penalty=1.5), seen)) == [[1]]


def test_steps_leave_their_input_alone():
    logits = random_logits()
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.5, seed=0)
    Sampler(params, [[1], [2], [3]], vocab_size=200, device="cpu").sample(logits)
    assert torch.equal(logits, before)


# ---- greedy and its neighbours ----


def test_greedy_is_the_first_argmax():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [-3.0, -INF, -1.0, -1.0]])
    params = SamplingParams(temperature=0.0, top_k=3, min_p=0.2)
    ids = Sampler(params, [[0], [0]], vocab_size=4, device="cpu").sample(logits)
    assert ids.dtype == torch.long and ids.tolist() == [1, 2]
    assert kept(process_logits(logits, params)) == [[1], [2]]


def test_the_penalty_is_computed_in_float32():
    logits = torch.tensor([[2.984375, 3.0]], dtype=torch.bfloat16)  # neighbours: in bfloat16, 3 / 1.004 would be the first
    params = SamplingParams(temperature=0.0, repetition_penalty=1.004)
    assert Sampler(params, [[1]], vocab_size=2, device="cpu").sample(logits).item() == 1


def test_greedy_uses_penalised_logits_and_remembers():
    logits = torch.tensor([[4.0, 3.0, 2.5, -1.0]])
    sampler = Sampler(SamplingParams(temperature=0.0, repetition_penalty=1.5), [[3, 3]], vocab_size=4, device="cpu")
    # Token 0 falls to 4 / 1.5 = 2.67, below token 1; then token 1 to 2. Sampled twice, token 0 stays at 2.67: an id counts once.
    assert [sampler.sample(logits).item() for _ in range(4)] == [0, 1, 0, 0]
    sampler.extend_history(0, [2])
    assert kept(torch.where(sampler.seen, 0.0, -INF)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("fields", [dict(top_p=0.0), dict(top_p=1e-8), dict(top_p=1e-300), dict(min_p=1.0), dict(top_k=1),
                                    dict(temperature=1e-6), dict(temperature=1e-300), dict(temperature=5e-324)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_narrowest_setting_is_the_argmax(fields, dtype):
    logits = random_logits(4, 5000).to(dtype)
    logits[torch.arange(4), torch.tensor([4999, 0, 17, 2500])] = 40.0
    logits[:, 100:200] = -INF
    processed = process_logits(logits, SamplingParams(**fields))
    assert not processed.isnan().any() and not (processed == INF).any()
    sampler = Sampler(SamplingParams(seed=1, **fields), [[0]] * 4, vocab_size=5000, device="cpu")
    assert sampler.sample(logits).tolist() == [4999, 0, 17, 2500]


@pytest.mark.parametrize("top_p", [0.0, 1e-8])
def test_tiny_top_p_keeps_one_token_even_of_a_flat_distribution(top_p):
    assert kept(process_logits(torch.zeros(2, 100_000), SamplingParams(top_p=top_p))) == [[0], [0]]


@pytest.mark.parametrize("fields", [dict(temperature=1e300), dict(repetition_penalty=1e300), dict(repetition_penalty=1e-300),
                                    dict(temperature=1e-300, repetition_penalty=1e-300)], ids=str)
def test_extreme_settings_never_make_nan(fields):
    logits = torch.tensor([[3.0, 0.0, -2.0, -INF, 1.0, 1e20, -1e20]])
    seen = torch.tensor([[True, True, True, True, False, True, True]])
    processed = process_logits(logits, SamplingParams(**fields), seen)
    assert not processed.softmax(-1).isnan().any()
    assert processed[0, 3] == -INF


# ---- drawing ----


def test_draw_follows_the_distribution():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 20_000
    ids = draw(probs.log().expand(count, -1), [torch.Generator().manual_seed(7)] * count)  # one generator, used count times
    frequency = ids.bincount(minlength=5) / count
    assert frequency[1] == 0
    assert (frequency - probs).abs().max() < 4 * 0.5 / count**0.5  # four standard deviations


def test_draw_reaches_both_ends_and_skips_filtered_tokens(monkeypatch):
    logits = torch.tensor([[-INF, 1.0, -INF, 0.0, -INF]])
    for number, token in [(0.0, 1), (0.7310, 1), (0.7311, 3), (1 - 2**-53, 3)]:  # sigmoid(1) = 0.73106
        monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(number, dtype=torch.float64))
        assert draw(logits, [None]).item() == token


def test_rare_tokens_keep_their_probability(monkeypatch):
    # One token has all but 1e-9 of the mass: a float32 sum would be exactly 1 after it, and the rest could never be drawn.
    logits = torch.tensor([[0.0, math.log(1e-9), -INF]])
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: torch.tensor(1 - 0.5e-9, dtype=torch.float64))
    assert draw(logits, [None]).item() == 1


def test_same_seed_same_tokens_and_different_seed_different_tokens():
    steps = random_logits(40, 200, scale=1.0)
    first, again, other = (run_sampler(SamplingParams(seed=s), [[1]], steps) for s in (5, 5, 6))
    assert first == again != other
    unseeded = [run_sampler(SamplingParams(), [[1]], steps) for _ in range(2)]
    assert unseeded[0] != unseeded[1]  # 200 tokens, 40 steps: equal by chance about once in 10**80


def test_each_row_equals_its_solo_run():
    params = SamplingParams(seed=3, temperature=0.9, top_p=0.95, repetition_penalty=1.3)
    steps = random_logits(12, 50, scale=1.0)
    prompts = [[1, 2, 3], [7], [4, 4, 9, 30]]
    batch = run_sampler(params, prompts, steps)
    assert batch == [run_sampler(params, [prompt], steps)[0] for prompt in prompts]
    assert batch[0] != batch[2]  # the prompts do matter, through the penalty


def test_rows_that_leave_do_not_change_the_others():
    params = SamplingParams(seed=11, repetition_penalty=10.0)
    prompts = [[1], [2], [3], [4]]
    steps = random_logits(6, 30, seed=4, scale=1.0)
    whole = run_sampler(params, prompts, steps)
    sampler = Sampler(params, [torch.tensor(p) for p in prompts], vocab_size=30, device="cpu")
    kept_then = [([0, 1, 2, 3], [0, 1, 2, 3]), ([0, 2, 3], [0, 2, 3]), ((0, 1, 2), [0, 2, 3]),  # argument of keep, rows left
                 (torch.tensor([2, 1]), [3, 2]), (torch.tensor([True, False]), [3]), ([], [])]
    for i, (step, (kept_rows, rows)) in enumerate(zip(steps, kept_then, strict=True)):
        sampler.keep(kept_rows)
        assert sampler.rows == rows
        assert sampler.sample(step.expand(len(rows), -1)).tolist() == [whole[row][i] for row in rows]
    unseeded = Sampler(SamplingParams(), [[1], [2], [3]], vocab_size=30, device="cpu")
    generators = unseeded.generators
    assert len({g.initial_seed() for g in generators}) == 3
    unseeded.keep([2, 0])
    assert unseeded.generators == [generators[2], generators[0]]


def test_padding_ids_are_never_sampled_and_change_nothing():
    steps = random_logits(30, 40, scale=1.0)
    padded = torch.cat([steps, torch.full((30, 24), 50.0)], dim=1)  # padding that would win every draw
    padded[3, 50] = NAN  # and what it holds does not matter
    for fields in (dict(temperature=0.0), dict(seed=2), dict(seed=2, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.4)):
        params = SamplingParams(**fields)
        prompts = [[3, 39], [8]]
        assert run_sampler(params, [[3, 39, 45], [8]], padded, num_token_ids=40) == run_sampler(params, prompts, steps)
    assert Sampler(SamplingParams(), [[0]], vocab_size=40, num_token_ids=99).num_ids == 40  # a tokenizer with spare ids


# ---- the history ----


def test_history_is_the_whole_prompt_and_every_sampled_id():
    params = SamplingParams(temperature=0.0, repetition_penalty=1.1)
    sampler = Sampler(params, [[2, 5, 7, 9], torch.tensor([[1, 1]])], vocab_size=12, device="cpu")
    history = lambda: [row.nonzero().flatten().tolist() for row in sampler.seen]
    assert history() == [[2, 5, 7, 9], [1]]
    sampler.sample(torch.eye(12)[[3, 11]])
    assert history() == [[2, 3, 5, 7, 9], [1, 11]]
    sampler.extend_history(1, torch.tensor([0, 4]))
    assert history() == [[2, 3, 5, 7, 9], [0, 1, 4, 11]]
    with pytest.raises(PromptError, match=r"prompt 1: token id 12 .* vocabulary of 12"):
        sampler.extend_history(1, [6, 12])
    with pytest.raises(PromptError, match="token id -1"):
        Sampler(params, [[-1]], vocab_size=12, device="cpu")
    assert history() == [[2, 3, 5, 7, 9], [0, 1, 4, 11]]  # a refused call changes nothing


def test_inference_mode_may_come_and_go():
    params = SamplingParams(seed=0, repetition_penalty=1.1)
    with torch.inference_mode():
        sampler = Sampler(params, [[1]], vocab_size=200, device="cpu")
        sampler.sample(random_logits(1))
    sampler.sample(random_logits(1))
    with torch.inference_mode():
        sampler.sample(random_logits(1))
    sampler.extend_history(0, [5])
    ids = sampler.sample(random_logits(1).requires_grad_())
    table = torch.nn.Embedding(200, 2)
    table(ids).sum().backward()  # ids sampled outside inference mode can index a table that is being trained
    assert table.weight.grad[ids].tolist() == [[1.0, 1.0]]


# ---- broken logits ----


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("where, value", [(7, NAN), (7, INF), (slice(None), -INF), (slice(None), NAN)], ids=str)
def test_non_finite_logits_are_an_error_that_names_the_row(temperature, penalty, where, value):
    logits = random_logits()
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=0)
    sampler = Sampler(params, [[1], [2], [3]], vocab_size=200, device="cpu")
    sampler.keep([0, 2])  # the message counts rows as the caller's batch did
    state = sampler.generators[0].get_state()
    bad = logits[[0, 2]].clone()
    bad[1, where] = value
    with pytest.raises(MinipopError, match=rf"row 2 \(largest value: {value}\).*float32 or bfloat16"):
        sampler.sample(bad)
    assert torch.equal(sampler.generators[0].get_state(), state)
    assert sampler.sample(logits[[0, 2]]).shape == (2,)  # the sampler goes on as if that call had not been


def test_a_few_minus_infinities_are_fine():
    logits = torch.full((1, 6), -INF)
    logits[0, 4] = -1e30
    for temperature in (0.0, 1e-6, 1.0, 100.0):
        assert Sampler(SamplingParams(temperature=temperature), [[0]], vocab_size=6, device="cpu").sample(logits).item() == 4


def test_wrong_shape_of_logits():
    sampler = Sampler(SamplingParams(), [[0], [1]], vocab_size=6, device="cpu")
    for shape in [(1, 6), (2, 5), (6,), (2, 1, 6)]:
        with pytest.raises(MinipopError, match=r"expects logits \[2, 6\]"):
            sampler.sample(torch.zeros(shape))


# ---- scoring ----


def test_log_probs():
    logits = random_logits(6, 50).reshape(2, 3, 50)
    ids = torch.tensor([[0, 49, 7], [3, 3, 20]])
    expected = -torch.nn.functional.cross_entropy(logits.double().reshape(6, 50), ids.reshape(6), reduction="none")
    torch.testing.assert_close(log_probs(logits, ids).double(), expected.reshape(2, 3), rtol=1e-6, atol=1e-6)
    half = log_probs(logits.bfloat16(), ids)
    assert half.dtype == torch.float32
    assert torch.equal(half, log_probs(logits.bfloat16().float(), ids))  # computed in float32, not in bfloat16
    assert log_probs(torch.tensor([1e4, 1e4 - 1]), torch.tensor(1)).item() == pytest.approx(-math.log1p(math.e), abs=1e-6)
    with pytest.raises(MinipopError, match="one id per row"):
        log_probs(logits, ids[0])
