"""The fast form for one token a row against the plain one."""

import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from minipop import PrefillPlan, Runner, SamplingParams
from minipop import runner as runner_module
from minipop.decoding import GraphedStep, bucket, fits, static_step
from minipop.layers import DecoderLayer, GemmaRMSNorm, RMSNorm

from .tiny import TEXT_FAMILIES, close, random_ids, tiny_model

LAYERS = 6
FAMILIES = [*TEXT_FAMILIES, "gemma3", "qwen3_vl"]


def pair(model, plan=None, **options):
    """Two runners: with the fast forms, and without."""
    return [Runner(model, plan, max_seq_len=64, fused=fused, **options) for fused in (True, False)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_plain_ones(family):
    """Through sliding windows of 5 and far beyond them."""
    fast, plain = pair(tiny_model(family), PrefillPlan(LAYERS, {4, 5}))
    params = SamplingParams(temperature=0.0, max_new_tokens=12)
    assert list(fast.generate(random_ids(9), params)) == list(plain.generate(random_ids(9), params))
    assert fast._one_token is not None and plain._one_token is None
    close(fast.cache.keys, plain.cache.keys)
    close(fast.cache.values, plain.cache.values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(7, 7, 7), (2, 12, 1)], ids=["uniform", "ragged"])
def test_batches(family, lengths):
    fast, plain = pair(tiny_model(family), PrefillPlan(LAYERS, {4, 5}), batch_size=3)
    prompts = [random_ids(n, seed=n) for n in lengths]
    close(fast.prefill(prompts), plain.prefill(prompts))
    for step in range(7):
        ids = random_ids(3, seed=step)
        close(fast.decode(ids), plain.decode(ids))
    close(fast.cache.keys, plain.cache.keys)


def test_up_to_the_last_column():
    model = tiny_model()
    fast, plain = (Runner(model, max_seq_len=12, batch_size=2, fused=fused) for fused in (True, False))
    for runner in (fast, plain):
        runner.prefill([random_ids(11), random_ids(4)])
    close(fast.decode([5, 6]), plain.decode([5, 6]))
    close(fast.cache.values, plain.cache.values)


def test_only_the_plain_form_shows_taps_and_hidden_rows():
    model = tiny_model()
    seen = []
    tapped = Runner(model, max_seq_len=64, tap=lambda layer, name, x: (seen.append(name), x)[1])
    tapped.prefill(random_ids(5))
    seen.clear()
    tapped.decode([1])
    assert seen.count("attn_out") == LAYERS and tapped._one_token is None
    fast, plain = pair(model, PrefillPlan(LAYERS, {4, 5}, project_kv=False))
    close(fast.prefill(random_ids(5)), plain.prefill(random_ids(5)))
    close(fast.decode([1]), plain.decode([1]))


def test_unknown_layers_take_the_plain_form():
    class Loud(DecoderLayer):
        def forward(self, *args):
            return 2 * super().forward(*args)

    model, other = tiny_model(), tiny_model()
    other.layers[3].__class__ = Loud
    assert fits(model) and not fits(other)
    runner = Runner(other, max_seq_len=64)
    runner.prefill(random_ids(5))
    assert not torch.allclose(runner.decode([1]), Runner(model, max_seq_len=64).prefill([*random_ids(5), 1]), rtol=1e-2)
    assert runner._one_token is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_round_where_the_reference_does(dtype):
    """Llama: x / rms(x) to the dtype, then times w. Gemma: all in float32, rounded at the end. To the last bit."""
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in ((50, 64), (64,)))
    exact = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-3)
    for norm, expected in ((RMSNorm(64, 1e-3), w * exact.to(dtype)), (GemmaRMSNorm(64, 1e-3), (exact * (1.0 + w.float())).to(dtype))):
        norm.weight.data = w
        assert torch.equal(norm(x), expected)


# --- the step of constant shapes, which CUDA graphs replay ---------------------------------------------------------------------

class Replayed:
    """What a CUDA graph does, without a GPU: the operations of the first step, run again on other inputs."""

    fits = staticmethod(lambda model: True)

    def __init__(self, model, one_token, cache):
        self.step = lambda *inputs: static_step(model, one_token, cache, 32, *inputs)
        self.trace = None

    def __call__(self, *inputs):
        if self.trace is None:
            self.trace = make_fx(self.step)(*inputs)
        return self.trace(*inputs)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_vl"])
def test_a_step_recorded_once_serves_every_column(family, monkeypatch):
    model = tiny_model(family)
    plain = Runner(model, PrefillPlan(LAYERS, {4, 5}), max_seq_len=64, batch_size=2, fused=False)
    monkeypatch.setattr(runner_module, "GraphedStep", Replayed)
    graphed = Runner(model, PrefillPlan(LAYERS, {4, 5}), max_seq_len=64, batch_size=2)
    prompts = [random_ids(4), random_ids(9, 1)]
    graphed.prefill(prompts), plain.prefill(prompts)
    for ids in ([3, 5], [8, 1], [2, 2]):
        close(graphed.decode(ids), plain.decode(ids))
    assert graphed._graphs.trace is not None
    close(graphed.cache.keys, plain.cache.keys)
    close(graphed.cache.values, plain.cache.values)


def test_buckets():
    assert [bucket(n, 1000) for n in (1, 128, 129, 500, 513, 1000)] == [128, 128, 256, 512, 1000, 1000]


def test_a_failed_recording_is_reported_once(monkeypatch):
    """No GPU needed: there is none to record on, and that is the failure."""
    def fail(self, *args):
        raise RuntimeError("no graphs")

    monkeypatch.setattr(GraphedStep, "fits", staticmethod(lambda model: True))
    monkeypatch.setattr(GraphedStep, "__init__", fail)
    model = tiny_model()
    runner, plain = Runner(model, max_seq_len=64), Runner(model, max_seq_len=64, fused=False)
    runner.prefill([1, 2]), plain.prefill([1, 2])
    with pytest.warns(RuntimeWarning, match="decoding without CUDA graphs: .*no graphs"):
        close(runner.decode([3]), plain.decode([3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(runner.decode([4]), plain.decode([4]))


def test_graphs_need_a_gpu():
    assert not GraphedStep.fits(tiny_model())
