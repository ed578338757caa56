"""Early exit as users meet it: eval.py's part `exit` and sample.py's flags, against plain calls of the model.

    python -m pytest -q tests/test_eval_exit.py
"""
import json
import os

import pytest
import torch
import torch.nn.functional as F
from toy import DENSE, flags, make_config, make_data, refusal

import eval as evaluation
import sample
import train
from eval import fit_line, joined_labels, rules_of


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/ouro (an exit gate), out/gated, out/expert and out/dense, trained for some steps."""
    folder, here = tmp_path_factory.mktemp("exit"), os.getcwd()
    make_data(folder)
    os.chdir(folder)
    for name, changes in {"dense": DENSE, "expert": dict(router="expert", depth_sampling="fixed"), "gated": {}, "ouro": dict(update="replace", loss="every")}.items():
        make_config(folder, **{"max_iters": 8, "eval_tokens": 256, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        os.utime(f"out/{name}/ckpt.pt", (1e9, 1e9 + (name == "ouro")))
    os.chdir(here)
    return folder


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(*words, **flags) -> (lines, the record, stderr) of eval.py."""
    monkeypatch.chdir(place)

    def go(*words, **changes):
        capsys.readouterr()
        evaluation.main([*words, *flags(**{"device": "cpu", "exit_tokens": 0, "eval_tokens": 320, **changes})])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last)["parts"], err
    return go


def test_a_point_of_the_exit_table_is_what_the_model_says(go):
    lines, parts, _ = go("exit", exit_thresholds=[1e-7, 0.9])
    points = parts["exit"]["points"]
    assert [(p["rule"], p["threshold"]) for p in points] == [(None, None), ("kl", 1e-7), ("kl", 0.9), ("cdf", 1e-7), ("cdf", 0.9)]
    s = evaluation.parse(flags(eval_tokens=320))
    folder = evaluation.Path("out/ouro")
    run = evaluation.open_run(folder, evaluation.read_state(folder), s, torch.device("cpu"), torch.autocast("cpu", enabled=False))
    ids_BT, targets_BT = run.split.batch(evaluation.fixed_windows(run.split, 320))
    for p in points:
        out = run.model(ids_BT, exit=p["rule"], exit_threshold=p["threshold"])
        assert p["nats_per_token"] == pytest.approx(F.cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten()).item(), rel=1e-5)
        assert p["mean_depth"] == pytest.approx(out.depth_BT.double().mean().item())
        assert p["depth_shares"] == pytest.approx((torch.bincount(out.depth_BT.flatten(), minlength=5) / out.depth_BT.numel()).tolist(), abs=1e-6)
        assert p["flops_per_token"] == pytest.approx(run.model.cfg.flops_per_token(32, depth=p["mean_depth"], exit=p["rule"]))
        assert any(f"{p['mean_depth']:.3f}" in line and f"{p['nats_per_token']:.4f}" in line for line in lines)
    assert points[0]["mean_depth"] == 4 and [p["mean_depth"] for p in points[2:4]] == [2, 1] and min(points[1]["mean_depth"], points[4]["mean_depth"]) > 2
    assert points[0]["nats_per_token"] == pytest.approx(run.state["val_loss"], abs=0.3)


def test_times_are_of_every_exit_threshold_and_a_line_goes_through_them(go):
    lines, parts, _ = go("exit", exit_tokens=4, exit_thresholds=[0.1, 0.5, 1.0])
    timed = [p for p in parts["exit"]["points"] if p["rule"] == "cdf"]
    assert all(p["ms_per_token"] > 0 and 1 <= p["timed_depth"] <= 4 for p in timed) and timed[0]["timed_depth"] == 1
    assert set(parts["exit"]["fits"]) == {"kl", "cdf"} and any(line.startswith("out/ouro: cdf: ms per token = ") for line in lines)


def test_the_line_of_exit_times():
    line = fit_line([{"timed_depth": x, "ms_per_token": 3 + 2 * x} for x in (1, 2, 4)])
    assert line["a_ms"] == pytest.approx(3) and line["b_ms"] == pytest.approx(2) and line["r2"] == pytest.approx(1)
    bent = fit_line([{"timed_depth": x, "ms_per_token": y} for x, y in ((1, 1), (2, 5), (3, 1), (4, 5))])
    assert 0 < bent["r2"] < 0.5
    assert fit_line([{"timed_depth": 2, "ms_per_token": y} for y in (1, 2)]) is None


@pytest.mark.slow
def test_exit_is_for_models_that_can_be_left_and_by_default_for_unrouted_ones(go):
    assert "one step" in refusal(evaluation.main, ["exit", "--out_dir=out/dense"])
    _, parts, _ = go(out_dir="out/expert")
    assert "exit" not in parts and "router" in parts
    lines, parts, _ = go("exit", out_dir="out/expert", compare="out/dense", exit_thresholds=[0.5])
    assert any("out/dense: no early exit" in line and "one step" in line for line in lines)
    assert [p["flops_per_token"] for p in parts["exit"]["points"]] == [None, None]           # of routed models: not counted
    _, parts, _ = go(out_dir="out/gated")
    assert {"loss", "depth", "exit"} <= set(parts) and {p["rule"] for p in parts["exit"]["points"]} == {None, "kl"}
    assert "exit_thresholds=[-1.0]: -1.0 is out of range" in refusal(evaluation.main, ["exit", "--exit_thresholds=-1"])


def test_the_exit_picture_is_drawn(go, place):
    pytest.importorskip("matplotlib")
    (place / "out/ouro/exit.png").unlink(missing_ok=True)
    _, parts, _ = go("exit", compare="out/gated", exit_thresholds=[0.1, 0.5])
    assert parts["exit"]["picture"] == "out/ouro/exit.png" and (place / "out/ouro/exit.png").stat().st_size > 5000


def test_points_of_the_exit_picture_that_would_lie_on_each_other_have_one_label():
    points = [(1.0, 3.0, 0.1), (2.0, 2.0, 1.0), (2.0, 2.0, 0.1), (2.01, 2.001, 0.01), (2.02, 2.5, 0.001), (3.0, 2.5, 0.5), (3.1, 2.5, 0.4), (4.0, 2.5, 0.9)]
    assert joined_labels(points, (3.0, 1.0)) == [("0.1", (1.0, 3.0)), ("0.01 ... 1", (2.0, 2.0)), ("0.001", (2.02, 2.5)), ("0.4, 0.5", (3.0, 2.5)),
                                                 ("0.9", (4.0, 2.5))]
    assert joined_labels([(2.0, 2.0, 0.1), (2.0, 2.0, 1.0)], (0, 0)) == [("0.1, 1", (2.0, 2.0))]


def test_the_exit_rules_that_a_model_knows(place, monkeypatch):
    monkeypatch.chdir(place)
    known = {name: rules_of(sample.load_run(f"out/{name}", "cpu")[0])[0] for name in ("dense", "expert", "gated", "ouro")}
    assert known == {"dense": [], "expert": ["kl"], "gated": ["kl"], "ouro": ["kl", "cdf"]}


def test_sample_leaves_by_exit_and_says_how_early(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    say = lambda **changes: (sample.main(flags(**{"max_new_tokens": 12, "temperature": 0, **changes})), capsys.readouterr())[1]  # noqa: E731
    late, early = say(exit="cdf", exit_threshold=1.0), say(exit="cdf", exit_threshold=0.1)
    assert "mean depth 4.00 of 4" in late.err and "mean depth 1.00 of 4" in early.err
    assert late.out == say().out and early.out == say(recursions=1).out                       # all leave after one step: the model at depth 1
    assert say(exit="kl", exit_threshold=0.5, use_cache=False).out == say(exit="kl", exit_threshold=0.5).out
    size = lambda **changes: float(say(num_samples=60, **changes).err.split("cache full: ")[1].split(" MiB")[0])  # noqa: E731
    assert size(exit="kl") == pytest.approx(size() * 9 / 6, abs=0.011) and size() > 0.1       # the coda has four slots in place of one
    assert "belongs to an exit rule" in refusal(sample.main, ["--exit_threshold=0.5"])
    assert "no exit gate" in refusal(sample.main, ["--exit=cdf", "--out_dir=out/gated"])
    assert "one step" in refusal(sample.main, ["--exit=kl", "--out_dir=out/dense"])
    assert "--trace" in refusal(sample.main, ["--exit=kl", "--trace=def"])
