"""The two-phase runner against exact oracles and a literal implementation of the paper."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from minipop import ModelInputs, PlanError, PrefillPlan, PromptError, Runner, SamplingParams
from minipop.layers import rope_frequencies

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
LAYERS = 6
SKIPS = [{5}, {4, 5}, {2, 3, 4, 5}, {0}, {0, 1}, {1, 3, 5}, set(range(LAYERS))]


def dense(model, ids):
    """Logits of every position by the plain model in one pass."""
    return Runner(model, max_seq_len=128).extend(torch.tensor([ids]))[0]


# --- a literal POP, in the words of the paper: two passes, no cache object, one token and one head at a time ----------------

class LiteralPOP:
    """Llama only, float64, written from the equations: y = x + Attn(LN1(x)); x' = y + FFN(LN2(y))."""

    def __init__(self, model, skip, project_kv=True, split_boundary=True):
        self.config, self.skip, self.project_kv, self.split = model.config, skip, project_kv, split_boundary
        self.w = {name: p.double() for name, p in model.named_parameters()}
        self.keys = [[] for _ in range(LAYERS)]  # per layer: (position, [K, E]) of each token that left any
        self.values = [[] for _ in range(LAYERS)]
        self.position = 0

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.config.norm_eps) * self.w[name]

    def rotate(self, x, position):
        angle = position * rope_frequencies(self.config.rope, self.config.head_dim).double()
        half = self.config.head_dim // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def token(self, token_id, pruned):
        """One token through all layers; in the skipped ones of a pruned pass only its K/V are computed."""
        c = self.config
        x = self.w["embedding.weight"][token_id]
        for i in range(LAYERS):
            h = self.norm(x, f"layers.{i}.input_norm.weight")
            q, k, v = (self.w[f"layers.{i}.attn.qkv.weight"] @ h).split([c.queries_width, c.kv_width, c.kv_width])
            skipped = pruned and i in self.skip
            if not skipped or self.project_kv:
                self.keys[i].append(self.rotate(k.view(c.num_kv_heads, -1), self.position))
                self.values[i].append(v.view(c.num_kv_heads, -1))
            if skipped:
                continue
            q = self.rotate(q.view(c.num_heads, -1), self.position)
            keys, values = torch.stack(self.keys[i]), torch.stack(self.values[i])  # [T, K, E]
            heads = []
            for head in range(c.num_heads):
                group = head // (c.num_heads // c.num_kv_heads)
                scores = keys[:, group] @ q[head] / math.sqrt(c.head_dim)
                heads.append(scores.softmax(0) @ values[:, group])
            x = x + self.w[f"layers.{i}.attn.o.weight"] @ torch.cat(heads)
            gate, up = (self.w[f"layers.{i}.mlp.gate_up.weight"] @ self.norm(x, f"layers.{i}.mlp_norm.weight")).chunk(2)
            x = x + self.w[f"layers.{i}.mlp.down.weight"] @ (F.silu(gate) * up)
        self.position += 1
        return self.w["head.weight"] @ self.norm(x, "norm.weight")

    def prefill(self, ids):
        for token_id in ids[:-1]:
            self.token(token_id, pruned=True)
        return self.token(ids[-1], pruned=not self.split)


@pytest.mark.parametrize("skip", SKIPS, ids=str)
@pytest.mark.parametrize("project_kv", [True, False])
@pytest.mark.parametrize("split_boundary", [True, False])
def test_equals_the_literal_two_pass_pop(skip, project_kv, split_boundary):
    model = tiny_model()
    plan = PrefillPlan(LAYERS, skip, project_kv=project_kv, split_boundary=split_boundary)
    literal = LiteralPOP(model, skip, project_kv, split_boundary)
    runner = Runner(model, plan, max_seq_len=64)
    ids, more = random_ids(9), random_ids(4, seed=1)
    close(runner.prefill(ids)[0].double(), literal.prefill(ids))
    close(runner.decode([7])[0].double(), literal.token(7, pruned=False))
    close(runner.prefill(more)[0].double(), literal.prefill(more))  # a second turn continues
    close(runner.decode([3])[0].double(), literal.token(3, pruned=False))
    for i in range(LAYERS):
        if project_kv or i not in skip:
            close(runner.cache.keys[i, 0, :, :15].transpose(0, 1).double(), torch.stack(literal.keys[i]))
            close(runner.cache.values[i, 0, :, :15].transpose(0, 1).double(), torch.stack(literal.values[i]))


# --- exact oracles -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("skip", SKIPS, ids=str)
def test_fused_equals_two_passes(family, skip):
    model, plan = tiny_model(family), PrefillPlan(LAYERS, skip)
    fused, plain = Runner(model, plan, max_seq_len=64), Runner(model, plan, max_seq_len=64, fused=False)
    for ids in (random_ids(12), random_ids(1, 1), random_ids(7, 2)):
        close(fused.prefill(ids), plain.prefill(ids))
    close(fused.cache.keys, plain.cache.keys)
    close(fused.cache.values, plain.cache.values)
    assert list(fused.generate([5], GREEDY)) == list(plain.generate([5], GREEDY))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_skipping_nothing_is_the_plain_model(family):
    model, ids = tiny_model(family), random_ids(14)
    close(Runner(model, PrefillPlan.full(LAYERS), max_seq_len=64).prefill(ids), dense(model, ids)[-1:])


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_one_token_prompt_is_the_plain_model(family):
    model = tiny_model(family)
    close(Runner(model, PrefillPlan.deepest(LAYERS, 1 / 2), max_seq_len=64).prefill([9]), dense(model, [9]))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("fused", [True, False])
def test_skipping_only_the_last_layer_is_lossless(family, fused):
    model, ids = tiny_model(family), random_ids(11)
    full = Runner(model, max_seq_len=64)
    pop = Runner(model, PrefillPlan(LAYERS, {LAYERS - 1}), max_seq_len=64, fused=fused)
    close(pop.prefill(ids), full.prefill(ids))
    close(pop.cache.keys, full.cache.keys)
    close(pop.decode([3]), full.decode([3]))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_cache_rows_below_and_above_the_cut(family):
    """Below the cut: the plain model's rows. Above: the layer's own projection of the stream at the cut."""
    model, ids, cut = tiny_model(family), random_ids(11), 4
    streams = {}
    full = Runner(model, max_seq_len=64, tap=lambda layer, name, x: streams.setdefault((layer, name), x))
    full.prefill(ids)
    pop = Runner(model, PrefillPlan(LAYERS, {4, 5}), max_seq_len=64)
    pop.prefill(ids)
    close(pop.cache.keys[:cut], full.cache.keys[:cut])
    close(pop.cache.values[:cut], full.cache.values[:cut])
    x = streams[(cut - 1, "resid")]
    for i in (4, 5):
        rows = {}
        layer = model.layers[i]
        layer.project_kv(x, model.rope(torch.arange(11)[None])[i], _Recorder(rows), lambda *a: a[2])
        close(pop.cache.keys[i, :, :, :10], rows["k"][:, :, :10])
        close(pop.cache.values[i, :, :, :10], rows["v"][:, :, :10])
        assert not torch.allclose(pop.cache.values[i, :, :, 10], rows["v"][:, :, 10], rtol=1e-3) or i == cut
    assert not torch.allclose(pop.cache.values[5, :, :, :10], full.cache.values[5, :, :, :10], rtol=1e-2)


class _Recorder:
    def __init__(self, rows):
        self.rows = rows

    def write(self, layer, k, v):
        self.rows.update(k=k, v=v)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("skip", [{4, 5}, {1, 3}, {0}], ids=str)
def test_closed_prefill_gates_give_the_same_cache(family, skip):
    """g = 0 on both branches of the skipped layers, for tokens 1..N-1, is Prefill-Only Pruning."""
    model, ids = tiny_model(family), random_ids(10)

    def gate(layer, name, x):
        if layer in skip and name in ("attn_out", "mlp_out"):
            x = x.clone()
            x[:, :-1] = 0
        return x

    gated, pop = Runner(model, max_seq_len=64, tap=gate), Runner(model, PrefillPlan(LAYERS, skip), max_seq_len=64)
    close(pop.prefill(ids), gated.prefill(ids))
    close(pop.cache.keys, gated.cache.keys)
    close(pop.cache.values, gated.cache.values)


def test_pruning_changes_something():
    """Guards the oracles above: a plan that were ignored would pass them."""
    model, ids = tiny_model(), random_ids(10)
    full = Runner(model, max_seq_len=64).prefill(ids)
    for plan in (PrefillPlan(LAYERS, {4, 5}), PrefillPlan(LAYERS, {4, 5}, project_kv=False),
                 PrefillPlan(LAYERS, {4, 5}, split_boundary=False)):
        assert (Runner(model, plan, max_seq_len=64).prefill(ids) - full).abs().max() > 1e-2 * full.abs().max()


# --- decode, extend, batches ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_prefill_and_decode_equal_one_pass(family):
    model, ids = tiny_model(family), random_ids(20)
    expected = dense(model, ids)
    runner = Runner(model, max_seq_len=64)
    close(runner.prefill(ids[:6])[0], expected[5])
    for n in range(6, 20):
        close(runner.decode(torch.tensor([ids[n]]))[0], expected[n])
    assert runner.cache.length == 20 and runner.token_ids() == ids


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_extend_equals_decode_steps(family):
    model, plan = tiny_model(family), PrefillPlan.deepest(LAYERS, 1 / 3)
    one, many = (Runner(model, plan, max_seq_len=64) for _ in range(2))
    one.prefill(random_ids(9)), many.prefill(random_ids(9))
    tokens = random_ids(7, seed=3)
    steps = torch.stack([one.decode([t]) for t in tokens], dim=1)
    close(many.extend(torch.tensor([tokens])), steps)
    close(many.cache.keys, one.cache.keys)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("plan", [PrefillPlan.full(LAYERS), PrefillPlan(LAYERS, {4, 5}), PrefillPlan(LAYERS, {1, 4}),
                                  PrefillPlan(LAYERS, {4, 5}, project_kv=False),
                                  PrefillPlan(LAYERS, {4, 5}, split_boundary=False)], ids=lambda p: p.describe())
def test_ragged_rows_equal_their_solo_runs(family, plan):
    model = tiny_model(family)
    prompts = [random_ids(n, seed=n) for n in (2, 7, 1, 12)]
    batch = Runner(model, plan, max_seq_len=64, batch_size=4)
    solos = [Runner(model, plan, max_seq_len=64) for _ in prompts]
    close(batch.prefill(prompts), torch.cat([solo.prefill(p) for solo, p in zip(solos, prompts)]))
    assert batch.cache.lengths.tolist() == [2, 7, 1, 12]
    for step in range(8):
        tokens = random_ids(4, seed=100 + step)
        close(batch.decode(tokens), torch.cat([solo.decode([t]) for solo, t in zip(solos, tokens)]))
    more = [random_ids(n, seed=50 + n) for n in (5, 1, 3, 2)]
    close(batch.prefill(more), torch.cat([solo.prefill(p) for solo, p in zip(solos, more)]))
    tokens = torch.tensor([random_ids(3, seed=9)] * 4)
    close(batch.extend(tokens), torch.cat([solo.extend(tokens[:1]) for solo in solos]))


def test_ragged_batch_that_ends_at_the_brim():
    """Padding of a short row may point past the end of the cache; it must not be written there."""
    model = tiny_model()
    batch = Runner(model, PrefillPlan(LAYERS, {4, 5}), max_seq_len=12, batch_size=2)
    batch.prefill([random_ids(11), random_ids(2)])
    solo = Runner(model, PrefillPlan(LAYERS, {4, 5}), max_seq_len=12)
    solo.prefill(random_ids(11))
    close(batch.prefill([[5], random_ids(9, 1)])[:1], solo.prefill([5]))


def test_generate_batch_equals_generate():
    model = tiny_model()
    model.config = dataclasses.replace(model.config, eos_token_ids=(3, 17, 20, 33))  # so that rows stop at different times
    plan = PrefillPlan(LAYERS, {4, 5})
    prompts = [random_ids(n, seed=n) for n in (4, 9, 1, 6, 3, 7, 2)]
    for params in (SamplingParams(temperature=0.0, max_new_tokens=12), SamplingParams(seed=5, max_new_tokens=9, repetition_penalty=1.3)):
        solo = [list(Runner(model, plan, max_seq_len=64).generate(p, params)) for p in prompts]
        assert len({len(s) for s in solo}) > 1
        runner = Runner(model, plan, max_seq_len=64, batch_size=3)
        assert runner.generate_batch(prompts, params) == solo
        assert runner.cache.length == 0


def test_finished_rows_stop_costing():
    model = tiny_model()
    model.config = dataclasses.replace(model.config, eos_token_ids=(3, 17, 20, 33))
    widths = []
    runner = Runner(model, max_seq_len=64, batch_size=3, tap=lambda i, name, x: (widths.append(len(x)) if name == "resid" else None, x)[1])
    answers = runner.generate_batch([random_ids(n, seed=n) for n in (4, 9, 1)], SamplingParams(temperature=0.0, max_new_tokens=12))
    passes = widths[:: LAYERS + 1]
    assert sum(passes) == 3 + sum(len(a) - 1 for a in answers)


# --- generate ------------------------------------------------------------------------------------------------------------

def test_generate_yields_the_eos_and_spends_no_forward_on_it():
    model = tiny_model()
    free = list(Runner(model, max_seq_len=64).generate(random_ids(5), GREEDY))
    model.config = dataclasses.replace(model.config, eos_token_ids=(free[3],))
    runner = Runner(model, max_seq_len=64)
    assert list(runner.generate(random_ids(5), GREEDY)) == free[: free.index(free[3]) + 1]
    assert runner.cache.length == 5 + free.index(free[3])
    stopped = list(Runner(model, max_seq_len=64).generate(random_ids(5), dataclasses.replace(GREEDY, stop_token_ids=(free[0],))))
    assert stopped == free[:1]


def test_generate_stops_when_the_cache_is_full():
    runner = Runner(tiny_model(), max_seq_len=8)
    assert len(list(runner.generate(random_ids(6), SamplingParams(temperature=0.0, max_new_tokens=99)))) == 3
    assert runner.cache.length == 8


def test_max_new_tokens_zero_does_nothing():
    runner = Runner(tiny_model(), max_seq_len=8)
    assert list(runner.generate([1, 2], SamplingParams(max_new_tokens=0))) == [] and runner.cache.length == 0


def test_penalty_sees_the_whole_history_each_id_once(monkeypatch):
    import minipop.runner as module
    seen = []
    real = module.Sampler

    def spy(params, prompts, **kw):
        seen.append([list(p) for p in prompts])
        return real(params, prompts, **kw)

    monkeypatch.setattr(module, "Sampler", spy)
    runner = Runner(tiny_model(), PrefillPlan(LAYERS, {4, 5}), max_seq_len=64)
    reply = list(runner.generate([2, 5, 7, 9], GREEDY))
    list(runner.generate([reply[-1], 11], GREEDY))
    assert seen == [[[2, 5, 7, 9]], [[2, 5, 7, 9, *reply, 11]]]
    Runner(tiny_model(), max_seq_len=64, batch_size=2).generate_batch([[4, 4, 1], [8]], GREEDY)
    assert seen[2] == [[4, 4, 1], [8]]


# --- a session: continue, rewind, replay -------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_full_plan_turns_equal_one_fresh_prefill(family):
    model, ids = tiny_model(family), random_ids(17)
    runner = Runner(model, max_seq_len=64)
    runner.prefill(ids[:6]), runner.decode([ids[6]])
    close(runner.prefill(ids[7:]), Runner(model, max_seq_len=64).prefill(ids))


def test_turns_under_pop_equal_a_replay_and_differ_from_a_fresh_prefill():
    model, plan = tiny_model(), PrefillPlan(LAYERS, {4, 5})

    def talk():
        runner = Runner(model, plan, max_seq_len=64)
        runner.prefill(random_ids(8)), runner.extend(torch.tensor([random_ids(4, 1)]))
        return runner, runner.prefill(random_ids(6, 2))

    (one, a), (two, b) = talk(), talk()
    assert torch.equal(a, b) and torch.equal(one.cache.keys, two.cache.keys)
    fresh = Runner(model, plan, max_seq_len=64).prefill(random_ids(8) + random_ids(4, 1) + random_ids(6, 2))
    assert (fresh - a).abs().max() > 1e-3


@pytest.mark.parametrize("plan", [PrefillPlan(LAYERS, {4, 5}), PrefillPlan(LAYERS, {4, 5}, project_kv=False)],
                         ids=lambda p: p.describe())
def test_rewind_takes_back(plan):
    model = tiny_model()
    runner, other = Runner(model, plan, max_seq_len=64), Runner(model, plan, max_seq_len=64)
    runner.prefill(random_ids(8)), other.prefill(random_ids(8))
    runner.prefill(random_ids(9, 4)), runner.decode([3])
    runner.rewind(8)
    assert runner.cache.length == 8 and runner.token_ids() == random_ids(8)
    close(runner.prefill(random_ids(5, 6)), other.prefill(random_ids(5, 6)))
    close(runner.decode([2]), other.decode([2]))
    runner.rewind(0)
    close(runner.prefill([4, 5]), Runner(model, plan, max_seq_len=64).prefill([4, 5]))
    for n in (-1, 3, 1.0, None):
        with pytest.raises(PromptError, match="cannot rewind"):
            runner.rewind(n)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("project_kv", [True, False])
def test_rewind_takes_rows_back_to_lengths_of_their_own(family, project_kv):
    """Padded continuations of a ragged batch, taken back row by row: each row is what it is alone."""
    model, plan = tiny_model(family), PrefillPlan(LAYERS, {4, 5}, project_kv=project_kv)
    prompts, answers = [random_ids(n, n) for n in (9, 3, 6)], [random_ids(n, 40 + n) for n in (2, 5, 1)]
    runner = Runner(model, plan, max_seq_len=64, batch_size=3)
    runner.prefill(prompts)
    lengths = torch.tensor([9, 3, 6])
    for _ in range(2):  # the second time over what the first one left
        logits = runner.extend([answer + [0] * (5 - len(answer)) for answer in answers])
        for row, (prompt, answer) in enumerate(zip(prompts, answers)):
            alone = Runner(model, plan, max_seq_len=64)
            alone.prefill(prompt)
            close(logits[row, : len(answer)], alone.extend([answer])[0])
        runner.rewind(lengths)
        assert runner.cache.lengths.tolist() == [9, 3, 6] and runner.token_ids(1) == prompts[1]
    for wrong in (torch.tensor([9, 4, 6]), torch.tensor([9, -1, 6]), torch.tensor([9, 3]), torch.tensor([9.0, 3.0, 6.0]), [9, 3, 6]):
        with pytest.raises(PromptError, match="cannot rewind"):
            runner.rewind(wrong)
    assert runner.cache.lengths.tolist() == [9, 3, 6]
    runner.rewind(torch.tensor([0, 0, 0]))
    close(runner.prefill([4, 5]), Runner(model, plan, max_seq_len=64).prefill([4, 5]))


def test_plan_may_change_between_turns():
    model = tiny_model()
    runner = Runner(model, PrefillPlan(LAYERS, {4, 5}, project_kv=False), max_seq_len=64)
    runner.prefill(random_ids(6))
    runner.plan = PrefillPlan.full(LAYERS)
    a = runner.prefill(random_ids(4, 1))
    literal = LiteralPOP(model, {4, 5}, project_kv=False)
    literal.prefill(random_ids(6))
    literal.skip = set()
    close(a[0].double(), literal.prefill(random_ids(4, 1)))


# --- what prefill accepts, and what it refuses ---------------------------------------------------------------------------------

def test_every_way_to_hand_over_a_prompt():
    model, ids = tiny_model(), random_ids(6)
    expected = Runner(model, max_seq_len=16).prefill(ids)
    for prompt in (torch.tensor(ids), torch.tensor([ids]), [ids], (ids,), ModelInputs(ids), [ModelInputs(torch.tensor([ids]))],
                   ModelInputs.from_reference({"input_ids": torch.tensor([[0, *ids]]), "attention_mask": torch.tensor([[0] + [1] * 6])}),
                   [torch.tensor(ids)], torch.tensor(ids, dtype=torch.int32)):
        assert torch.equal(Runner(model, max_seq_len=16).prefill(prompt), expected)


def test_empty_prompt_stands_for_the_bos():
    model = tiny_model()
    assert torch.equal(Runner(model, max_seq_len=8).prefill([]), Runner(model, max_seq_len=8).prefill([1]))
    with pytest.raises(PromptError, match="empty.*no BOS"):
        Runner(tiny_model("qwen3"), max_seq_len=8).prefill([])
    runner = Runner(model, max_seq_len=8)
    runner.prefill([4])
    with pytest.raises(PromptError, match="empty"):
        runner.prefill([])


BAD_PROMPTS = {
    "too long": (list(range(20)), "do not fit"), "negative": ([1, -1], "outside the vocabulary"),
    "beyond": ([1, 61], "outside the vocabulary"), "float": ([1.5], "whole numbers|integer"), "text": ("abc", "cannot read"),
    "none": (None, "cannot read"), "too many rows": ([[1], [2], [3]], "batch_size"),
    "half ragged": ([1, [2]], "."), "cube": (torch.zeros(1, 1, 1, dtype=torch.long), r"\[N\] or \[B, N\]"),
    "bool": (torch.tensor([True]), "whole numbers"), "words": (["a"], "whole numbers"),
    "image for a text model": (ModelInputs([1], pixel_values=torch.zeros(1, 3, 4, 4)), "text only"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_refused_prompt_leaves_the_cache_as_it_was(name):
    prompt, message = BAD_PROMPTS[name]
    runner = Runner(tiny_model(), PrefillPlan(LAYERS, {4, 5}), max_seq_len=16)
    runner.prefill([3, 4])
    keys = runner.cache.keys.clone()
    if name != "too many rows":
        with pytest.raises(PromptError, match=message):
            runner.prefill(prompt)
    with pytest.raises(PromptError):
        runner.extend([[60], [60]])
    with pytest.raises(PromptError):
        runner.decode([99])
    with pytest.raises(PromptError):
        runner.extend(torch.zeros(1, 15, dtype=torch.long))
    assert torch.equal(runner.cache.keys, keys) and runner.token_ids() == [3, 4]
    untouched = Runner(runner.model, runner.plan, max_seq_len=16)
    untouched.prefill([3, 4])
    close(runner.decode([5]), untouched.decode([5]))
    fresh = Runner(tiny_model(), max_seq_len=16, batch_size=2)
    with pytest.raises(PromptError, match=message):
        fresh.prefill(prompt)
    assert fresh.cache.length == 0 and fresh.cache.active == 2


def test_runner_refuses_what_does_not_fit():
    model = tiny_model()
    with pytest.raises(PlanError, match="for 8 layers, the model has 6"):
        Runner(model, PrefillPlan.deepest(8), max_seq_len=16)
    with pytest.raises(PromptError, match="513 exceeds the 512"):
        Runner(model, max_seq_len=513)
    for bad in (0, -1, 2.0, True, None):
        with pytest.raises(PromptError, match="max_seq_len"):
            Runner(model, max_seq_len=bad)
        with pytest.raises(PromptError, match="batch_size"):
            Runner(model, max_seq_len=16, batch_size=bad)
    runner = Runner(model, max_seq_len=16, batch_size=2)
    runner.prefill([[1], [2]])
    with pytest.raises(PromptError, match="continue"):
        runner.prefill([1])
    with pytest.raises(PromptError, match="batch"):
        runner.generate([1])
    with pytest.raises(PromptError, match="reset"):
        runner.generate_batch([[1]])
    assert Runner(model, max_seq_len=16).generate_batch([]) == []


def test_an_interrupted_prefill_leaves_no_trace():
    model = tiny_model()
    for plan in (PrefillPlan(LAYERS, {4, 5}), PrefillPlan(LAYERS, {1, 3}, project_kv=False)):
        runner = Runner(model, plan, max_seq_len=32)
        runner.prefill(random_ids(5))

        def interrupt(layer, name, x):
            if layer == 5:
                raise KeyboardInterrupt
            return x

        runner.tap = interrupt
        with pytest.raises(KeyboardInterrupt):
            runner.prefill(random_ids(7, 2))
        runner.tap = lambda layer, name, x: x
        other = Runner(model, plan, max_seq_len=32)
        other.prefill(random_ids(5))
        close(runner.prefill(random_ids(3, 3)), other.prefill(random_ids(3, 3)))
        close(runner.decode([1]), other.decode([1]))


# --- long prompts in chunks ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("plan", [PrefillPlan.full(LAYERS), PrefillPlan(LAYERS, {4, 5}), PrefillPlan(LAYERS, {1, 3}),
                                  PrefillPlan(LAYERS, {4, 5}, project_kv=False),
                                  PrefillPlan(LAYERS, {4, 5}, split_boundary=False)], ids=lambda p: p.describe())
def test_chunks_equal_one_shot(family, plan):
    model = tiny_model(family)
    prompts = [random_ids(n, seed=n) for n in (23, 4, 9, 8)]
    whole = Runner(model, plan, max_seq_len=64, batch_size=4)
    expected, again = whole.prefill(prompts), whole.prefill([random_ids(13, 5)] * 4)
    after = whole.decode([1, 2, 3, 4])
    for size in (1, 4, 5, 22):
        runner = Runner(model, plan, max_seq_len=64, batch_size=4, chunk_size=size)
        close(runner.prefill(prompts), expected)
        close(runner.prefill([random_ids(13, 5)] * 4), again)
        close(runner.decode([1, 2, 3, 4]), after)
        close(runner.cache.keys, whole.cache.keys)


def test_no_pass_is_wider_than_the_chunk():
    widths = []
    runner = Runner(tiny_model(), PrefillPlan(LAYERS, {4, 5}), max_seq_len=64, chunk_size=8,
                    tap=lambda layer, name, x: (widths.append(x.shape[1]) if name == "resid" else None, x)[1])
    runner.prefill(random_ids(50))
    assert max(widths) == 8 and sum(w for w in widths[:: LAYERS + 1]) >= 50
