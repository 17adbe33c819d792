import json

import pytest

from minipop import PlanError, PrefillPlan
from minipop.plan import ablations, format_layers, parse_layers, parse_ratio, ratio_sweep


@pytest.mark.parametrize("layers, ratio, skipped", [
    (30, 1 / 3, 10), (32, 1 / 3, 10), (36, 1 / 3, 12), (48, 1 / 3, 16), (9, 1 / 3, 3), (18, "1/3", 6), (30, "0.5", 15),
    (30, 0, 0), (30, 1, 30), (1, 1 / 3, 0), (30, 0.3333333333333, 10), (10, 0.3, 3), (48, "2 / 3".replace(" ", ""), 32)])
def test_deepest(layers, ratio, skipped):
    plan = PrefillPlan.deepest(layers, ratio)
    assert sorted(plan.skip) == list(range(layers - skipped, layers))
    assert plan.is_suffix and plan.cut == layers - skipped


def test_default_ratio_is_a_third():
    assert PrefillPlan.deepest(36).skip == frozenset(range(24, 36))


def test_suffix():
    assert PrefillPlan(4, {2, 3}).is_suffix and PrefillPlan.full(4).is_suffix
    assert not PrefillPlan(4, {0}).is_suffix and not PrefillPlan(4, {1, 3}).is_suffix


@pytest.mark.parametrize("arguments, message", [
    (dict(num_layers=4, skip={4}), "names layer 4; the model has layers 0 to 3"), (dict(num_layers=4, skip={-1}), "layer -1"),
    (dict(num_layers=4, skip={True}), "layer True"), (dict(num_layers=4, skip={"1"}), "layer '1'"),
    (dict(num_layers=4, skip=3), "must be a set"), (dict(num_layers=0), "positive"), (dict(num_layers="4"), "positive"),
    (dict(num_layers=4, kv=5), "kv must be"), (dict(num_layers=4, kv=""), "kv must be"), (dict(num_layers=4, kv=b"x"), "kv must be"),
    (dict(num_layers=4, project_kv=1), "project_kv"), (dict(num_layers=4, split_boundary=None), "split_boundary")])
def test_refuses(arguments, message):
    with pytest.raises(PlanError, match=message):
        PrefillPlan(**arguments)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "a third", "1/0", "", None, [], "1e999"])
def test_refuses_ratio(ratio):
    with pytest.raises(PlanError, match="num_layers"):
        PrefillPlan.deepest("30")
    with pytest.raises(PlanError, match="ratio"):
        parse_ratio(ratio)


@pytest.mark.parametrize("text, layers", [("", set()), ("3", {3}), ("20-22", {20, 21, 22}), (" 1, 3 ,5-6", {1, 3, 5, 6}), ("7-7", {7})])
def test_parse_layers(text, layers):
    assert parse_layers(text) == layers
    assert parse_layers(format_layers(layers)) == layers


@pytest.mark.parametrize("text", ["a", "3-", "-3", "5-2", "1.5", "1--2", "0-999999999", "²"])
def test_parse_layers_refuses(text):
    with pytest.raises(PlanError, match="cannot read layers"):
        parse_layers(text)


def test_save_and_load(tmp_path):
    plan = PrefillPlan(9, {1, 4}, project_kv=False, split_boundary=False, kv="a.safetensors")
    plan.save(tmp_path / "plan.json")
    assert PrefillPlan.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(PlanError, match="cannot be written"):
        plan.save(tmp_path / "nowhere" / "plan.json")


@pytest.mark.parametrize("values", [{}, {"num_layers": 4}, {"num_layers": 4, "skip": [9]}, {"num_layers": 4, "skip": "1"},
                                    {"num_layers": 4, "skip": [1], "kv": 3}, {"num_layers": 4, "skip": [1], "more": 1}, [], 3])
def test_load_refuses(tmp_path, values):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(PlanError, match="plan.json"):
        PrefillPlan.load(path)


def test_describe():
    assert PrefillPlan.deepest(30).describe() == "10 of 30 layers skipped in prefill (20-29)"
    assert PrefillPlan.full(30).describe() == "full: all 30 layers run in prefill"
    assert "no K/V" in PrefillPlan(4, {1}, project_kv=False).describe()


@pytest.mark.parametrize("ratio", [0, 0.1, 1 / 4, "1/3", 0.4, 1 / 2, 0.6, 1])
@pytest.mark.parametrize("layers", [1, 8, 18, 30, 32, 36, 48])
def test_ablations_skip_as_many_layers_as_pop(layers, ratio):
    plans = ablations(layers, ratio)
    assert plans["full"] == PrefillPlan.full(layers) and plans["POP"] == PrefillPlan.deepest(layers, ratio)
    count = len(plans["POP"].skip)
    assert {len(plan.skip) for name, plan in plans.items() if name != "full"} == {count}
    assert plans["first third"].skip == set(range(count))
    assert plans["no K/V"].skip == plans["no boundary"].skip == plans["POP"].skip
    assert [name for name, plan in plans.items() if not plan.project_kv] == ["no K/V"]
    assert [name for name, plan in plans.items() if not plan.split_boundary] == ["no boundary"]


def test_every_third_layer():
    assert sorted(ablations(30)["every third layer"].skip) == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]
    assert sorted(ablations(32)["every third layer"].skip) == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]
    assert sorted(ablations(8, 1 / 2)["every third layer"].skip) == [1, 3, 5, 7]
    assert sorted(ablations(10, 0.4)["every third layer"].skip) == [1, 4, 6, 9]


def test_ratio_sweep():
    assert [len(plan.skip) for plan in ratio_sweep(30).values()] == [0, 3, 6, 9, 12, 15, 18]
    assert ratio_sweep(8, (0.25, 0.5)) == {0.25: PrefillPlan(8, {6, 7}), 0.5: PrefillPlan(8, {4, 5, 6, 7})}
