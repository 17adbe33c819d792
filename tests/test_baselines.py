"""ShortGPT, SliceGPT and Wanda against literal versions of themselves, and through a checkpoint and back."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from minipop import ConfigError, MinipopError, PlanError, PrefillPlan, PromptError, Runner, SamplingParams, costs, inspect, load_model, load_tokenizer
from minipop.baselines import block_influence, save_pruned, shortgpt, slicegpt, wanda
from minipop.baselines.__main__ import main
from minipop.baselines.shortgpt import remove_layers
from minipop.baselines.slicegpt import SlicedDecoder, sliced_width
from minipop.baselines.streams import begin
from minipop.baselines.wanda import input_norms, matrices, sparsity_of, zero_lowest
from minipop.cache import FunctionalKV, Span
from minipop.errors import CheckpointError
from minipop.inputs import Batch, ModelInputs
from minipop.packing import PackedLinear, can_pack, pack
from minipop.parallel import TensorPart
from minipop.texts import text_sequences
from tests.reference import FAMILIES as PAIRS
from tests.reference import gap, random_inputs, random_pair
from tests.test_generate import tokenizer_files
from tests.test_inspect import save_tiny
from tests.test_parallel import picture_prompt
from tests.tiny import CONFIGS, close, random_ids, tiny_model

SLICEABLE = ["llama", "mistral", "qwen2", "qwen3"]
SEQUENCES = [random_ids(n, seed=n) for n in (33, 20, 1, 41)]
METHODS = {"shortgpt": lambda model: shortgpt(model, SEQUENCES, 1 / 3)[0], "slicegpt": lambda model: slicegpt(model, SEQUENCES),
           "wanda": lambda model: wanda(model, SEQUENCES)}


def sliceable(family, dtype=torch.float32):
    """A model with every bias its family can have."""
    more = {"o_bias": True, "qkv_bias": True} if family in ("llama", "qwen3") else {}
    return tiny_model(family, dtype=dtype, **more, mlp_bias=family == "llama")


def look_inside(model, ids):
    """A prompt through the plain model: logits [1, vocab], the cache's keys and values, and every tapped tensor."""
    seen = {}

    def tap(layer, name, tensor):
        seen[layer, name] = tensor.clone()
        return tensor

    runner = Runner(model, max_seq_len=64, tap=tap)
    # all tokens in one pass: the boundary would be another one
    runner.plan = PrefillPlan(model.config.num_layers, split_boundary=False)
    return runner.prefill(ids), runner.cache, seen


def through(model, ids, layers, step=lambda x: x):
    """A plain loop over `layers` of the model; `step` is applied to the stream before them. -> logits [1, n, vocab]."""
    batch = Batch.of([ModelInputs(ids)], model)
    start = torch.zeros(1, dtype=torch.long)
    x, kv = model.embed(batch).x, FunctionalKV(Span(start, batch.counts, len(ids)))
    rope = model.rope(model.positions(batch, start)[0])
    for i in layers:
        x = model.layers[i](step(x), rope[i], kv)
    return model.logits(x)


def all_logits(model, ids):
    """Logits of every token, through the runner and its cache: [n, vocab]."""
    runner = Runner(model, max_seq_len=64)
    return torch.cat((runner.prefill(ids[:1]), runner.extend(torch.tensor([ids[1:]]))[0]))


def same(first, second):
    """Equal parameters, to the last bit."""
    ours, theirs = dict(first.named_parameters()), dict(second.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- ShortGPT -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_block_influence_token_by_token(family):
    model = tiny_model(family)
    cosines = [[] for _ in range(6)]
    for ids in SEQUENCES:
        seen = look_inside(model, ids)[2]
        for layer in range(6):
            for before, after in zip(seen[layer - 1, "resid"][0].double(), seen[layer, "resid"][0].double()):
                cosines[layer].append(float(before @ after) / math.sqrt(float(before @ before) * float(after @ after)))
    expected = torch.tensor([1 - sum(column) / len(column) for column in cosines], dtype=torch.float64)
    assert len(cosines[0]) == sum(map(len, SEQUENCES))
    influence = block_influence(model, SEQUENCES)
    assert influence.shape == (6,) and (influence - expected).abs().max() < 1e-6
    assert block_influence(model, SEQUENCES[::-1]).sub(influence).abs().max() < 1e-12  # a mean over tokens, in whatever order


def test_influence_is_of_directions_not_of_lengths():
    """A layer whose branches are zero has none; one that turns the stream around has two."""
    model = tiny_model()
    for matrix in (model.layers[2].attn.o, model.layers[2].mlp.down, model.layers[4].attn.o, model.layers[4].mlp.down):
        matrix.weight.zero_()
    back = model.layers[4].forward
    model.layers[4].forward = lambda *arguments: -3 * back(*arguments)
    influence = block_influence(model, SEQUENCES)
    assert abs(influence[2]) < 1e-12 and abs(influence[4] - 2) < 1e-12


@pytest.mark.parametrize("family", CONFIGS)
def test_shortgpt_is_the_model_without_its_least_influential_layers(family):
    model = tiny_model(family)
    influence = block_influence(model, SEQUENCES).tolist()
    short, removed = shortgpt(model, SEQUENCES, 1 / 3)
    first = model.deepstack_layers
    assert removed == tuple(sorted(sorted(range(first, 6), key=lambda i: influence[i])[:2]))
    ids = random_ids(40, seed=5)
    kept = [i for i in range(6) if i not in removed]
    close(all_logits(short, ids), through(model, ids, kept)[0], 1e-4)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("removed", [(0,), (1, 2), (2, 3, 5)])
def test_layers_keep_their_sight_and_get_new_numbers(family, removed):
    """Gemma-3's third and sixth layer see everything, with a rotary table of their own, wherever they come to stand."""
    model = tiny_model(family)
    short, _ = remove_layers(model, removed)
    kept = [i for i in range(6) if i not in removed]
    assert short.config.num_layers == len(short.layers) == len(kept)
    assert [layer.index for layer in short.layers] == [layer.attn.index for layer in short.layers] == list(range(len(kept)))
    assert [layer.attn.window for layer in short.layers] == list(short.config.layer_windows)
    assert list(short.config.layer_windows) == [model.config.layer_windows[i] for i in kept]
    assert [layer.index for layer in model.layers] == list(range(6)) and model.config.num_layers == 6
    ids = random_ids(40, seed=6)
    close(all_logits(short, ids), through(model, ids, kept)[0], 1e-4)
    # POP on the shorter model: the fused forms against the plain ones
    plan = PrefillPlan.deepest(len(kept), 1 / 3)
    fast, plain = Runner(short, plan, 64), Runner(short, plan, 64, fused=False)
    close(fast.prefill(ids), plain.prefill(ids), 1e-4)
    assert fast.cache.keys.shape[0] == len(kept)


@pytest.mark.parametrize("family", CONFIGS)
def test_removing_nothing_is_the_model(family):
    model = tiny_model(family)
    short, removed = shortgpt(model, SEQUENCES, 0.1)  # less than one layer
    assert removed == () and short is not model and same(short, model) and short.config == model.config
    assert torch.equal(all_logits(short, random_ids(20)), all_logits(model, random_ids(20)))


def test_deepstack_layers_stay():
    """Qwen3-VL adds image rows after its first two layers here: they stay, however little they do."""
    model = tiny_model("qwen3_vl")
    for layer in model.layers[:2]:
        layer.attn.o.weight.zero_(), layer.mlp.down.weight.zero_()
    influence = block_influence(model, SEQUENCES)
    assert influence[:2].abs().max() < 1e-12 < influence[2:].min()
    short, removed = shortgpt(model, SEQUENCES, 0.67)
    assert removed == (2, 3, 4, 5) and len(short.layers) == 2
    with pytest.raises(MinipopError, match="ratio 0.9 would remove 5 of 6 layers, but DeepStack adds image rows after the first 2"):
        shortgpt(model, SEQUENCES, 0.9)


def test_ratio_counts_layers():
    model = tiny_model()
    assert [len(shortgpt(model, SEQUENCES[:1], ratio)[1]) for ratio in (0, 0.25, 1 / 3, 0.333333333333, 0.5, 0.99)] == [0, 1, 2, 2, 3, 5]


# --- Wanda --------------------------------------------------------------------------------------------------------------------


def literal_wanda(model, sequences, sparsity):
    """The method in the order its paper tells it, on a copy: capture inputs, score, zero, next layer."""
    pruned = wanda(model, sequences, 0.0)  # a copy; that it is one is tested below
    for layer in pruned.layers:
        inputs = {matrix: [] for matrix in (layer.attn.qkv, layer.attn.o, layer.mlp.gate_up, layer.mlp.down)}
        hooks = [matrix.register_forward_hook(lambda m, x, out: inputs[m].append(x[0][0].double())) for matrix in inputs]
        for ids in sequences:
            look_inside(pruned, ids)  # the layers below are pruned by now
        for hook in hooks:
            hook.remove()
        for matrix, parts in inputs.items():
            x = torch.cat(parts)  # [tokens, in]
            weight = matrix.weight.clone()
            for row in weight:
                scores = row.double().abs() * x.norm(dim=0)
                row[scores.argsort()[: int(sparsity * len(scores))]] = 0.0
            matrix.weight = torch.nn.Parameter(weight, requires_grad=False)
    return pruned


@pytest.mark.parametrize("family", CONFIGS)
def test_wanda_word_for_word(family):
    model = tiny_model(family)
    assert same(wanda(model, SEQUENCES, 0.3), literal_wanda(model, SEQUENCES, 0.3))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.75])
def test_sparsity_is_exact_in_every_row(family, sparsity):
    model = tiny_model(family)
    pruned = wanda(model, SEQUENCES, sparsity)
    touched = set()
    for old, new in zip(model.layers, pruned.layers):
        for before, after in zip(matrices(old), matrices(new)):
            gone = after.weight == 0
            assert (gone.sum(1) == math.floor(sparsity * before.in_features)).all()
            assert torch.equal(after.weight, before.weight.masked_fill(gone, 0.0))
            touched.add(id(after.weight))
    names = {name for name, p in pruned.named_parameters() if id(p) in touched}
    assert names == {f"layers.{i}.{m}.weight" for i in range(6) for m in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
    rest = dict(model.named_parameters())  # embedding, head, norms, biases, vision tower
    assert all(torch.equal(p, rest[name]) for name, p in pruned.named_parameters() if name not in names)
    kept = [1 - math.floor(sparsity * m.in_features) / m.in_features for m in matrices(model.layers[0])]
    sizes = [m.weight.numel() for m in matrices(model.layers[0])]
    assert sparsity_of(pruned) == pytest.approx(1 - sum(map(float.__mul__, kept, map(float, sizes))) / sum(sizes))


def test_inputs_are_measured_behind_pruned_layers():
    """The last layer is pruned otherwise when the ones below it stay whole."""
    model = tiny_model()
    pruned, whole = wanda(model, SEQUENCES, 0.5), wanda(model, SEQUENCES, 0.0)
    seen = {}
    model.layers[5].mlp.gate_up.register_forward_pre_hook(lambda m, x: seen.setdefault("x", []).append(x[0][0].double()))
    for ids in SEQUENCES:
        look_inside(model, ids)
    norms = torch.cat(seen["x"]).norm(dim=0)
    careless = zero_lowest(whole.layers[5].mlp.gate_up.weight, norms, 0.5)
    assert not torch.equal(careless, pruned.layers[5].mlp.gate_up.weight)
    assert torch.equal(zero_lowest(whole.layers[0].attn.qkv.weight, torch.ones(32), 0.0), model.layers[0].attn.qkv.weight)


def test_zero_lowest_by_hand():
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [5.0, 0.1, -0.1, 0.0], [1.0, 1.0, 1.0, 1.0]])
    norms = torch.tensor([4.0, 1.0, 1.0, 0.5], dtype=torch.float64)  # scores 4 2 3 2, 20 .1 .1 0, 4 1 1 .5
    assert zero_lowest(weight, norms, 0.5).tolist() == [[1, 0, 3, 0], pytest.approx([5, 0, -0.1, 0]), [1, 0, 1, 0]]
    assert (zero_lowest(torch.ones(2, 100), torch.ones(100), 0.29) == 0).sum().item() == 58  # though 0.29 * 100 < 29 in binary
    assert torch.equal(zero_lowest(weight, norms, 0.24), weight)


# --- SliceGPT -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SLICEABLE)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
def test_a_rotated_model_is_the_model(family, dtype, tolerance):
    """No column deleted: the same keys, values and stream in the end, and in between the same stream, turned."""
    model = sliceable(family, dtype)
    turned = slicegpt(model, SEQUENCES, 0.0)
    assert turned.config.sliced_width == 32
    ids = random_ids(40, seed=7)
    logits, cache, seen = look_inside(model, ids)
    logits_turned, cache_turned, seen_turned = look_inside(turned, ids)
    close(cache_turned.keys, cache.keys, tolerance)
    close(cache_turned.values, cache.values, tolerance)
    close(seen_turned[5, "resid"], seen[5, "resid"], tolerance)
    close(logits_turned, logits, 1e-5)  # logits are float32
    for layer in range(-1, 5):
        ours, theirs = seen_turned[layer, "resid"][0], seen[layer, "resid"][0]
        close(ours @ ours.T, theirs @ theirs.T, tolerance)
        assert gap(ours, theirs) > 0.1
    close(all_logits(turned, ids), all_logits(model, ids), 1e-5)


def projector(streams, width):
    """Q Q^T of the `width` principal axes of the streams' rows, found by a singular value decomposition: [D, D]."""
    _, _, axes = torch.linalg.svd(torch.cat(streams), full_matrices=True)
    return axes[:width].T @ axes[:width]


@pytest.mark.parametrize("family", SLICEABLE)
@pytest.mark.parametrize("ratio, width", [(0.25, 24), (0.6, 8)])
def test_slicing_is_projecting(family, ratio, width):
    """To delete coordinates is to project the stream onto the axes that are kept, in the original model, at full width."""
    model = sliceable(family, torch.float64)
    sliced = slicegpt(model, SEQUENCES, ratio)
    assert sliced.config.sliced_width == sliced.embedding.weight.shape[1] == width
    batches = [Batch.of([ModelInputs(ids)], model) for ids in [*SEQUENCES, random_ids(40, seed=8)]]  # the last one is not calibration
    streams = [model.embed(batch).x[0] for batch in batches]
    passes = [(model.rope(model.positions(b, torch.zeros(1, dtype=torch.long))[0]), FunctionalKV(
        Span(torch.zeros(1, dtype=torch.long), b.counts, int(b.counts)))) for b in batches]

    def cut():
        projection = projector(streams[:-1], width)
        streams[:] = [x @ projection for x in streams]

    cut()
    for i, layer in enumerate(model.layers):
        streams = [x + layer.attn(layer.input_norm(x[None]), rope[i], kv, lambda layer, name, x: x)[0]
                   for x, (rope, kv) in zip(streams, passes)]
        cut()
        streams = [x + layer.mlp(layer.mlp_norm(x)) for x in streams]
        if i < 5:
            cut()
    logits, cache, seen = look_inside(sliced, random_ids(40, seed=8))
    close(seen[5, "resid"][0], streams[-1], 1e-9)
    assert gap(streams[-1], look_inside(model, random_ids(40, seed=8))[2][5, "resid"][0]) > 1e-3


def test_widths_are_multiples_of_8():
    assert [sliced_width(576, ratio) for ratio in (0, 0.25, 0.2, 1 / 3, 0.01, 0.98)] == [576, 432, 456, 384, 568, 8]
    assert sliced_width(20, 0) == 20
    with pytest.raises(MinipopError, match="ratio 0.9 leaves fewer than 8 of 32 columns"):
        slicegpt(tiny_model(), SEQUENCES, 0.9)


def test_an_untied_head():
    """The head is no longer the embedding, which is narrower now; both keep what they know."""
    model = tiny_model(tie_word_embeddings=True)
    model.head.weight = model.embedding.weight
    sliced = slicegpt(model, SEQUENCES)
    assert not sliced.config.tie_word_embeddings and torch.equal(sliced.head.weight, model.head.weight)
    assert sliced.embedding.weight.shape == (61, 24) and model.head.weight is model.embedding.weight


@pytest.mark.parametrize("family, reason", [("gemma3_text", "a norm with weights of its own lies between every block and the residual"),
                                            ("gemma3", "a norm with weights of its own"), ("qwen3_vl", "a vision tower hands over image rows")])
def test_what_cannot_be_sliced(family, reason):
    with pytest.raises(ConfigError, match=reason):
        slicegpt(tiny_model(family), SEQUENCES)


def test_a_sliced_model_skips_nothing():
    sliced = slicegpt(tiny_model(), SEQUENCES)
    with pytest.raises(PlanError, match="a sliced model .* cannot skip layers in prefill"):
        Runner(sliced, PrefillPlan.deepest(6))
    runner = Runner(sliced, PrefillPlan.full(6), max_seq_len=64)
    with pytest.raises(PlanError, match="cannot skip layers"):
        runner.plan = PrefillPlan(6, {2}, project_kv=False)
    assert not runner.plan.skip and len(list(runner.generate(random_ids(9), SamplingParams(temperature=0, max_new_tokens=5)))) == 5
    with pytest.raises(ConfigError, match="sliced already"):
        slicegpt(sliced, SEQUENCES)
    for refused in (block_influence, shortgpt):
        with pytest.raises(MinipopError, match="hands the stream on in another basis"):
            refused(sliced, SEQUENCES)
    assert sparsity_of(wanda(sliced, SEQUENCES, 0.5)) == 0.5  # rows of 24, 64, 24 and 40


def test_batches_of_a_sliced_model_are_its_single_prompts():
    sliced, prompts = slicegpt(tiny_model("qwen3"), SEQUENCES), [random_ids(n, seed=n) for n in (3, 17, 8)]
    together = Runner(sliced, max_seq_len=64, batch_size=3).prefill(prompts)
    close(together, torch.cat([Runner(sliced, max_seq_len=64).prefill(prompt) for prompt in prompts]), 1e-5)


def test_a_packed_sliced_model():
    sliced = slicegpt(tiny_model(dtype=torch.bfloat16), SEQUENCES)
    expected = all_logits(sliced, random_ids(20))
    if not can_pack(sliced.head.weight):
        pytest.skip("this CPU has no packed bfloat16")
    assert isinstance(pack(sliced).layers[0].mlp_shortcut, PackedLinear)
    close(all_logits(sliced, random_ids(20)), expected, 1e-2)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.6])
def test_operations_and_sizes_of_a_sliced_model(ratio, monkeypatch):
    sliced = slicegpt(tiny_model("qwen2"), SEQUENCES, ratio)
    layers = sliced.layers
    found = {"embedding": [sliced.embedding], "head": [sliced.head], "attention": [m for x in layers for m in (x.attn.qkv, x.attn.o)],
             "mlp": [m for x in layers for m in (x.mlp.gate_up, x.mlp.down)],
             "shortcuts": [m for x in layers for m in (x.attn_shortcut, x.mlp_shortcut)]}
    sizes = {part: sum(m.weight.numel() for m in some) for part, some in found.items()}
    assert costs.decoder_parameters(sliced.config) == sizes
    assert costs.decode_bytes(sliced.config, 0, 1, 4) == 4 * (sum(sizes.values()) - sizes["embedding"])
    with FlopCounterMode(display=False) as counter:
        Runner(sliced, max_seq_len=32).prefill(random_ids(9))
    ran = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in ran.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    monkeypatch.setattr(costs, "attended_rows", lambda *_: 0)
    assert costs.prefill_flops(sliced.config, 9, PrefillPlan.full(6)) == products


# --- what holds for all -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_given_model_stays_as_it_is(method):
    model = tiny_model("qwen2")
    before, config = {name: p.clone() for name, p in model.named_parameters()}, model.config
    pruned = METHODS[method](model)
    pruned.to(torch.bfloat16)  # converting what shares its numbers converts the one only
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], p) and after[name].dtype == p.dtype for name, p in before.items())
    assert model.config is config and not any(layer._forward_pre_hooks for layer in model.layers)
    assert not any(p.requires_grad or p.is_meta for p in pruned.parameters()) and not pruned.training


@pytest.mark.parametrize("method", METHODS)
def test_the_same_twice(method):
    model = tiny_model("mistral")
    assert same(METHODS[method](model), METHODS[method](model))


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_comes_out_as_it_goes_in(method):
    pruned = METHODS[method](tiny_model("qwen3", dtype=torch.bfloat16))
    assert {p.dtype for p in pruned.parameters()} == {torch.bfloat16}
    assert all_logits(pruned, random_ids(20)).isfinite().all()


@pytest.mark.parametrize("method", [block_influence, shortgpt, slicegpt, wanda])
@pytest.mark.parametrize("sequences, reason", [([], "no calibration sequences"), ([[1, 2], []], "sequence 1 has 0 tokens"),
                                               ([[1] * 513], "sequence 0 has 513 tokens; the model takes 1 to 512"),
                                               ([[1, 61]], "token id 61 at position 1 is outside the vocabulary")])
def test_sequences_that_cannot_be_used(method, sequences, reason):
    with pytest.raises(PromptError, match=reason):
        method(tiny_model(), sequences)


@pytest.mark.parametrize("method", [shortgpt, slicegpt, wanda])
@pytest.mark.parametrize("share", [-0.1, 1.0, 2, math.nan])
def test_shares_that_cannot_be_pruned(method, share):
    with pytest.raises(MinipopError, match="must be at least 0 and below 1"):
        method(tiny_model(), SEQUENCES, share)


@pytest.mark.parametrize("method", [block_influence, shortgpt, slicegpt, wanda])
def test_packed_and_broken_models(method):
    broken = tiny_model()
    broken.layers[1].attn.qkv.weight[:] = math.nan
    with pytest.raises(MinipopError, match="the activations in layer 1 are not finite"):
        method(broken, SEQUENCES)
    packed = tiny_model(dtype=torch.bfloat16)
    packed.layers[3].attn.o = PackedLinear.__new__(PackedLinear)
    with pytest.raises(MinipopError, match="packed weights cannot be pruned"):
        method(packed, SEQUENCES)


# --- through a checkpoint and back --------------------------------------------------------------------------------------------


def load_reference(folder, family):
    auto = transformers.AutoModelForImageTextToText if family.endswith("_vl") else transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("method", ["shortgpt", "wanda"])
def test_transformers_reads_what_is_saved(tmp_path, family, method):
    model, _ = random_pair(family, 0, tmp_path / "source")
    # layers 2 and 5 see everything in Gemma-3, 0 to 2 in Qwen2: with 1 and 3 gone, they stand elsewhere
    pruned = remove_layers(model, (3, 4) if family == "qwen3_vl" else (1, 3))[0] if method == "shortgpt" else wanda(model, SEQUENCES, 0.4)
    save_pruned(pruned, tmp_path / "source", tmp_path / "pruned")
    loaded = load_model(tmp_path / "pruned")
    assert same(loaded, pruned) and loaded.config == pruned.config
    inputs = random_inputs(model.config, tokens=40)
    runner = Runner(loaded, PrefillPlan(loaded.config.num_layers, split_boundary=False), max_seq_len=64)
    prompt = {"input_ids": inputs.token_ids[None]}
    if inputs.pixel_values is not None:
        kinds = "mm_token_type_ids" if inputs.image_grid_thw is not None else "token_type_ids"
        prompt |= {"pixel_values": inputs.pixel_values, kinds: (inputs.token_ids[None] == model.config.image_token_id).long()}
    if inputs.image_grid_thw is not None:
        prompt["image_grid_thw"] = inputs.image_grid_thw
    with torch.no_grad():
        reference = load_reference(tmp_path / "pruned", family)(**prompt).logits[:, -1]
    close(runner.prefill(inputs), reference, 1e-4)


@pytest.mark.parametrize("family", SLICEABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sliced_model_through_a_checkpoint(tmp_path, family, dtype):
    random_pair(family, 0, tmp_path / "source")
    model = load_model(tmp_path / "source", dtype)
    sliced = slicegpt(model, SEQUENCES)
    save_pruned(sliced, tmp_path / "source", tmp_path / "sliced")
    loaded = load_model(tmp_path / "sliced")
    assert type(loaded) is SlicedDecoder and same(loaded, sliced) and loaded.config.sliced_width == 24
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert torch.equal(all_logits(loaded, random_ids(20)), all_logits(sliced, random_ids(20)))
    report = inspect.inspect_checkpoint(tmp_path / "sliced")
    assert report["parameters"]["total"]["parameters"] == sum(p.numel() for p in sliced.parameters())
    shortcuts = [m.weight.numel() for layer in sliced.layers for m in (layer.attn_shortcut, layer.mlp_shortcut)]
    assert report["parameters"]["shortcuts"]["parameters"] == sum(shortcuts) and not report["unused"]
    assert {row["plan"] for row in report["prefill"]} == {"full"} and not report["prefill_node"]  # nothing that would be refused
    assert "40 wide (sliced to 24 between the layers)" in inspect.to_text(report)
    save_pruned(loaded, tmp_path / "sliced", tmp_path / "again")  # a sliced checkpoint can be the source itself
    assert same(load_model(tmp_path / "again"), sliced)
    with pytest.raises(ConfigError, match="a sliced model .* runs in one process only"):
        load_model(tmp_path / "sliced", part=TensorPart(0, 2))


@pytest.mark.parametrize("changes, reason", [({"minipop_sliced": {"width": 40}}, "a width of at most hidden_size 32"),
                                             ({"minipop_sliced": {}}, "width is missing"), ({"minipop_sliced": 24}, "must be an object"),
                                             ({"minipop_sliced": {"width": 24}, "tie_word_embeddings": True}, "a head of its own")])
def test_marks_that_make_no_sense(tmp_path, changes, reason):
    save_tiny(tmp_path, "llama", **changes)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path)
    save_tiny(tmp_path, "gemma3_text", minipop_sliced={"width": 24})
    with pytest.raises(ConfigError, match="is for text models of Llama, Mistral and Qwen"):
        load_model(tmp_path)
    save_tiny(tmp_path, "llama", minipop_sliced={"width": 24})  # the mark alone does not slice the weights
    with pytest.raises(CheckpointError, match="weights and model do not fit"):
        load_model(tmp_path)


def test_the_files_beside_the_weights_come_along(tmp_path):
    source = tmp_path / "source"
    extra = {**tokenizer_files(), "generation_config.json": '{"eos_token_id": [3, 5]}', "LICENSE": "yours", "README.md": "about another model",
             "chat_template.jinja": "{{ messages }}", "notes.bin": "no"}
    model = save_tiny(source, "llama", extra_files=extra)
    save_pruned(wanda(model, SEQUENCES), source, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE", "chat_template.jinja", "config.json", "model.safetensors"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert load_model(tmp_path / "out").config.eos_token_ids == load_model(source).config.eos_token_ids
    for taken in (source, tmp_path / "out", source / "LICENSE"):
        with pytest.raises(CheckpointError, match="is there already"):
            save_pruned(model, source, taken)
    for nowhere in (source / "LICENSE" / "sub", "/proc/x"):
        with pytest.raises(CheckpointError, match="cannot be made in"):
            save_pruned(model, source, nowhere)


# --- pictures -----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_pictures_are_seen_as_the_runner_sees_them(family):
    """Image rows, their positions and masks, DeepStack: influence and weights' norms from a pass of the runner's."""
    model, prompt = tiny_model(family), picture_prompt(family)
    streams = {}
    Runner(model, max_seq_len=20, fused=False, tap=lambda layer, name, x: streams.setdefault((layer, name), []).append(x) or x).prefill(prompt)

    def seen(layer: int, name: str) -> torch.Tensor:
        return torch.cat(streams[layer, name], 1)[0].double()

    expected = [1 - torch.nn.functional.cosine_similarity(seen(i - 1, "resid"), seen(i, "resid"), dim=-1).mean() for i in range(6)]
    close(block_influence(model, [prompt]), torch.stack(expected))
    pruned = wanda(model, [prompt], 0.5)
    norms = seen(0, "attn_in").square().sum(0).sqrt()
    qkv = model.layers[0].attn.qkv.weight
    close(pruned.layers[0].attn.qkv.weight, zero_lowest(qkv, norms, 0.5))
    again = input_norms(model.layers[5], before_layer(model, prompt, 5))[model.layers[5].attn.qkv]
    close(again, seen(5, "attn_in").square().sum(0).sqrt())


def before_layer(model, prompt, layer):
    """The stream of a prompt before a layer, as input_norms takes it."""
    streams = list(begin(model, [prompt]))
    for stream in streams:
        for i in range(layer):
            stream.x = model.after_layer(i, model.layers[i](stream.x, stream.rope[i], stream.kv), stream.deepstack)
    return streams


# --- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_tiny(folder, "llama", dtype=torch.bfloat16, extra_files=tokenizer_files(), torch_dtype="bfloat16")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over a lazy dog. " * 30)
    return path


def arguments(method, folder, out, *more):
    return [str(x) for x in (method, "--ckpt", folder, "--out", out, *more)]


@pytest.mark.parametrize("method", METHODS)
def test_the_command_does_what_the_functions_do(method, folder, text, tmp_path, capsys):
    share = ("--sparsity", "0.4") if method == "wanda" else ("--ratio", "1/3")
    assert main(arguments(method, folder, tmp_path / "out", "--text", text, "--samples", 5, "--length", 64, "--seed", 3, *share)) == 0
    shown, errors = capsys.readouterr()
    assert not errors and f"--ckpt {tmp_path / 'out'} --full" in shown and "5 sequences of 64 tokens" in shown
    model = load_model(folder, "float32")
    sequences = text_sequences(load_tokenizer(folder), [text.read_text()], 5, 64, 3)
    assert len(sequences) == 5 and {len(ids) for ids in sequences} == {64}
    function = {"shortgpt": lambda: shortgpt(model, sequences, 1 / 3)[0], "slicegpt": lambda: slicegpt(model, sequences, 1 / 3),
                "wanda": lambda: wanda(model, sequences, 0.4)}[method]
    expected, loaded = function().to(torch.bfloat16), load_model(tmp_path / "out")
    assert same(loaded, expected)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, loaded))
    assert f"parameters: {before:,} -> {after:,} ({after / before:.1%})" in shown
    if method == "shortgpt":
        influence, (_, removed) = block_influence(model, sequences).tolist(), shortgpt(model, sequences, 1 / 3)
        assert all(f"{layer:>4}  {value:.4f}" + "  removed" * (layer in removed) in shown for layer, value in enumerate(influence))
        assert f"removed layers: {', '.join(map(str, removed))} (2 of 6)" in shown
    elif method == "slicegpt":
        assert "width of the stream: 32 -> 16" in shown
    else:
        assert f"-> {sparsity_of(expected):.2%}" in shown


def test_the_command_as_a_process(folder, text, tmp_path):
    command = [sys.executable, "-m", "minipop.baselines", *arguments("shortgpt", folder, tmp_path / "out", "--text", text, "--length", 64)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and "removed layers:" in done.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 5
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "is there already" in done.stderr


def test_mistakes_are_one_line(folder, text, tmp_path, capsys):
    binary, short, gemma = tmp_path / "binary", tmp_path / "short", tmp_path / "gemma"
    binary.write_bytes(b"\xff\xfe\x00")
    short.write_text("abc")
    save_tiny(gemma, "gemma3_text", extra_files=tokenizer_files())
    for method, more, reason in (
            ("shortgpt", ["--ratio", "1"], "--ratio: must be a number or a fraction like 1/4, at least 0 and below 1, not '1'"),
            ("slicegpt", ["--ratio", "-0.5"], "at least 0 and below 1"), ("wanda", ["--sparsity", "x"], "at least 0 and below 1"),
            ("wanda", ["--ratio", "0.3"], "unrecognized arguments: --ratio"), ("shortgpt", ["--samples", "0"], "a whole number above 0"),
            ("wanda", ["--text", str(tmp_path / "none")], "no such file"), ("wanda", ["--text", str(tmp_path)], "not a regular file"),
            ("wanda", ["--text", str(binary)], "not UTF-8 text"),
            ("wanda", ["--text", str(short)], "the text has 3 tokens, too few for one sequence of 512"),
            ("wanda", ["--length", "513"], "--length 513 exceeds the 512 positions"), ("slicegpt", ["--ckpt", str(gemma)], "cannot slice Gemma-3"),
            ("slicegpt", ["--ratio", "0.9", "--text", str(text), "--length", "64"], "leaves fewer than 8 of 32 columns"),
            ("shortgpt", ["--ckpt", str(tmp_path / "none")], "none"), ("magic", [], "invalid choice: 'magic'")):
        assert main(arguments(method, folder, tmp_path / "out", *more)) == 2, (method, more)
        shown, error = capsys.readouterr()
        assert error.startswith("error: ") and error.count("\n") == 1 and reason in error, error
        assert not (tmp_path / "out").exists()
