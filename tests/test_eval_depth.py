"""eval.py's part depth: loss, KL, agreement and accuracy of every depth, a gate that is held, and what the papers say of depth.

    python -m pytest -q tests/test_eval_depth.py
"""
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import loud, some_ids, tiny
from toy import DENSE, flags, train_runs

import eval as evaluation
import train
from eval import against_full, depth_claims, depth_sums, exit_depths, features_at, features_held, features_of, gains, gate_held, row_nats
from model import GPT

LOOP = dict(n_prelude=1, n_recur=3, n_coda=1)
RUNS = {"gated": {}, "dense": DENSE | dict(n_core=3), "expert": dict(router="expert", update="replace", depth_sampling="fixed"),
        "token": dict(router="token", update="replace", depth_sampling="fixed")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run of each of RUNS, trained for some steps."""
    return train_runs(tmp_path_factory.mktemp("depth"), RUNS)


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(name, part, **flags) -> (lines, the record of the part); no picture."""
    monkeypatch.chdir(place)
    for draw in ("draw", "draw_exit", "draw_router"):
        monkeypatch.setattr(evaluation, draw, lambda measured: None)

    def go(name, part="depth", **changes):
        capsys.readouterr()
        evaluation.main([part, *flags(**{"out_dir": f"out/{name}", "device": "cpu", "eval_tokens": 160, **changes})])
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)["parts"][part]
    return go


def open_run(name):
    folder = Path("out", name)
    return evaluation.open_run(folder, evaluation.read_state(folder), evaluation.parse([]), torch.device("cpu"), torch.autocast("cpu", enabled=False))


def measures_by_hand(logits, full_logits, targets):
    """nats, KL(full || this), same guess, right guess, summed over the targets of a row that count: plain loops over lists of numbers."""
    sums = [0.0] * 4
    for z, full_z, target in zip(logits, full_logits, targets):
        if target == -100:
            continue
        log_sum, full_log_sum = (math.log(sum(math.exp(x) for x in row)) for row in (z, full_z))
        log_p, full_log_p = [x - log_sum for x in z], [x - full_log_sum for x in full_z]
        sums[0] -= log_p[target]
        sums[1] += sum(math.exp(f) * (f - own) for f, own in zip(full_log_p, log_p))
        sums[2] += z.index(max(z)) == full_z.index(max(full_z))
        sums[3] += z.index(max(z)) == target
    return sums


def logits_at(model, ids_BT, depth):
    """As lists, by a forward pass of its own."""
    with torch.no_grad():
        return model(ids_BT, depth=depth).logits.double().tolist()


# ---- what is measured at a depth


@pytest.mark.parametrize("changes", [dict(update="gate"), dict(router="expert"), dict(router="token"), dict(n_core=1, n_coda=0, state_init="random", update="inject")])
def test_the_measures_of_every_depth_are_those_of_plain_loops(changes, monkeypatch):
    model, ids_BT, targets_BT = loud(tiny(**LOOP | changes)), some_ids(2, 32), some_ids(2, 32, seed=2)
    targets_BT[0, 20:] = -100
    R, depths = 3, exit_depths(model.cfg)
    full = logits_at(model, ids_BT, R)
    wanted = torch.tensor([[measures_by_hand(z, f, t) for z, f, t in zip(logits_at(model, ids_BT, depth), full, targets_BT.tolist())] for depth in depths])
    for logits in (2**24, 2 * 61 * 7):                                    # all at once; 7 tokens at a time, across rows
        monkeypatch.setattr(evaluation, "LOGITS", logits)
        with torch.no_grad():
            features = list(features_at(model, ids_BT, depths))
            found = against_full(model, features, depths.index(R), targets_BT)
        assert found.dtype == torch.float64 and torch.allclose(found.permute(1, 2, 0), wanted.double(), atol=1e-3, rtol=1e-4)
        assert found[1, depths.index(R)].abs().max() == 0 and found[2, depths.index(R)].tolist() == [20, 32]
    assert torch.allclose(found[0, 1], row_nats(model, features[1], targets_BT)[0], atol=1e-4)
    assert len({round(x, 3) for x in wanted[:, 0, 1].tolist()}) == len(depths)              # every depth has a KL of its own


def test_the_depth_of_a_token_choice_model_is_the_most_steps_that_a_token_takes():
    model, ids_BT = loud(tiny(**LOOP, router="token")), some_ids(3, 32)
    assert exit_depths(model.cfg) == [0, 1, 2, 3]
    with torch.no_grad():
        for depth, x_BTD in zip(range(4), features_at(model, ids_BT, range(4))):
            out = model(ids_BT, depth=depth)
            assert torch.equal(model.head(x_BTD), out.logits) and out.depth_BT.max() == depth


def test_a_model_whose_steps_have_weights_of_their_own_goes_no_deeper_than_trained():
    model, ids_BT = loud(tiny(**LOOP, lora_rank=2)), some_ids(2, 32)
    assert exit_depths(model.cfg) == [0, 1, 2, 3] and exit_depths(tiny(**LOOP)) == list(range(7))
    with torch.no_grad():
        for depth, x_BTD in zip(range(4), features_at(model, ids_BT, range(4))):
            assert torch.allclose(model.head(x_BTD), model(ids_BT, depth=depth).logits, atol=1e-5)
    claims = by_name(depth_claims(model.cfg, *sums_of(5, 4, 3, 2.9), 3))
    assert len(claims) == 3 and not any("beyond" in words for _, words in claims)


# ---- a gate that is held


@pytest.mark.parametrize("changes", [{}, dict(router="expert"), dict(n_coda=0), dict(gate_temperature=2.0, block="llama")])
def test_a_gate_held_at_1_is_depth_0(changes):
    model, ids_BT = loud(tiny(**LOOP | dict(update="gate") | changes)), some_ids(2, 32)
    with torch.no_grad():
        at_0, at_1 = features_held(model, ids_BT)
        assert torch.equal(at_1, features_of(model, ids_BT, 0)) and not torch.allclose(at_0, at_1, atol=0.1)


def test_a_gate_held_at_0_leaves_the_model_that_has_none():
    cfg, ids_BT = tiny(**LOOP, update="gate"), some_ids(2, 32)
    model, bare = loud(cfg), GPT(replace(cfg, update="inject")).eval()
    bare.load_state_dict({name: w for name, w in model.state_dict().items() if ".gate." not in name})
    with torch.no_grad():
        at_0, _ = features_held(model, ids_BT)
        assert torch.allclose(model.head(at_0), bare(ids_BT).logits, atol=1e-5)
        assert list(features_held(bare, ids_BT)) == []


def test_a_gate_is_held_no_longer_than_asked():
    model, ids_BT = loud(tiny(**LOOP, update="gate")), some_ids(2, 32)
    with torch.no_grad():
        before = model(ids_BT).logits
        with pytest.raises(KeyError), gate_held(model, 1):
            assert not torch.allclose(model(ids_BT).logits, before, atol=0.1)
            raise KeyError
        assert torch.equal(model(ids_BT).logits, before) and "forward" not in vars(model.recursion.update.gate)


# ---- the record and the table


@pytest.mark.parametrize("name", ["gated", "expert", "token"])
def test_the_record_of_depth_is_what_the_model_says(go, name):
    lines, part = go(name)
    run = open_run(name)
    ids_BT, targets_BT = run.split.batch(train.fixed_windows(run.split, 160))
    full, n, top = logits_at(run.model, ids_BT, 4), targets_BT.numel(), 9 if name == "gated" else 5
    assert [p["depth"] for p in part["points"]] == part["used"]["depth"] == list(range(top)) and part["windows"] == 5
    sums = np.array([[measures_by_hand(*row) for row in zip(logits_at(run.model, ids_BT, p["depth"]), full, targets_BT.tolist())] for p in part["points"]])
    for p, (nats, kl, same, right) in zip(part["points"], sums.sum(1) / n):
        assert [p[key] for key in ("nats_per_token", "kl", "agreement", "accuracy")] == pytest.approx([nats, kl, same, right], abs=1e-5)
        assert p["minus_full"]["value"] == pytest.approx(nats - sums[4, :, 0].sum() / n, abs=1e-5)
        row = next(line.split() for line in lines if line.split()[:2] == [f"out/{name}", str(p["depth"])])
        shown = [f"{p['nats_per_token']:.4f}", f"{p['kl']:.4f}", f"{p['agreement']:.1%}", f"{p['accuracy']:.1%}", f"{p['minus_full']['value']:+.4f}"]
        assert [row[3], *row[5:9]] == shown
    assert part["points"][4]["minus_full"] == {"value": 0, "interval": [0, 0]} and part["points"][4]["agreement"] == 1
    low, high = part["points"][0]["minus_full"]["interval"]
    assert low < part["points"][0]["minus_full"]["value"] < high
    nats, right = sums[..., 0].sum(1), sums[..., 3].sum(1)
    falls = nats[0] > nats[4]                                             # so short a training may have made it rise
    assert part["share_of_first_two"]["value"] == (pytest.approx((nats[0] - nats[2]) / (nats[0] - nats[4]), abs=1e-3) if falls else "NaN")
    said = f"the first two of 4 steps bring {part['share_of_first_two']['value']:.1%}" if falls else "the loss after 4 steps is no lower than before them"
    assert any(line.startswith(f"out/{name}: {said}") for line in lines)
    assert part["accuracy_kept"]["value"] == pytest.approx(right[2] / right[4], abs=1e-6) and (part["accuracy_kept"]["after"], part["accuracy_kept"]["of"]) == (2, 4)
    assert any(line.startswith(f"out/{name}: after 2 of 4 steps {part['accuracy_kept']['value']:.1%} of the accuracy") for line in lines)


def test_the_depth_record_has_the_loss_with_the_gate_held(go):
    lines, part = go("gated")
    run = open_run("gated")
    ids_BT, targets_BT = run.split.batch(train.fixed_windows(run.split, 160))
    for p, g in zip(part["held"], (0, 1)):
        with torch.no_grad(), gate_held(run.model, g):
            loss = run.model(ids_BT, targets_BT).losses["ce"].item()
        assert p["gate"] == g and p["nats_per_token"] == pytest.approx(loss, abs=1e-5) and p["flops_per_token"] == part["points"][4]["flops_per_token"]
        assert any(line.split()[:2] == ["out/gated", f"gate={g}"] and f"{loss:.4f}" in line and "held at every step" in line for line in lines)
    same = ("nats_per_token", "kl", "agreement", "accuracy")
    assert [part["held"][1][key] for key in same] == [part["points"][0][key] for key in same]
    assert go("dense")[1]["held"] == go("expert")[1]["held"] == []


def test_the_record_says_which_depth_routing_exit_and_threshold_were_used(go):
    plain = {"depth": 4, "routing": None, "threshold": None, "exit": None, "exit_threshold": None}
    routed = plain | {"routing": "causal", "threshold": 0.5}
    assert go("gated", "loss")[1]["used"] == plain and go("token", "loss")[1]["used"] == routed | {"threshold": None}
    assert go("expert", "loss")[1]["used"] == routed | {"routing": ["causal", "topk"]}
    assert go("expert")[1]["used"] == routed | {"depth": [0, 1, 2, 3, 4]}
    assert go("expert", "router", thresholds=[0.25])[1]["used"] == routed | {"routing": ["causal", "topk", "lot"], "threshold": [0.25, 0.5]}
    assert go("gated", "exit", exit_thresholds=[0.1, 1], exit_tokens=0)[1]["used"] == plain | {"exit": [None, "kl"], "exit_threshold": [None, 0.1, 1]}


def test_a_dense_model_keeps_an_accuracy_at_half_its_blocks_and_has_no_first_steps(go):
    lines, part = go("dense")
    assert "share_of_first_two" not in part and part["claims"] == [] and not any("claims" in line for line in lines)
    assert (part["accuracy_kept"]["after"], part["accuracy_kept"]["of"]) == (2, 3)
    assert part["accuracy_kept"]["value"] == pytest.approx(part["points"][2]["accuracy"] / part["points"][3]["accuracy"])
    assert any(line.startswith("out/dense: after 2 of 3 core blocks") for line in lines)


@pytest.mark.slow
def test_depth_is_measured_the_same_at_any_batch_size(place, monkeypatch):
    monkeypatch.chdir(place)
    run, depths = open_run("gated"), list(range(9))
    starts = train.fixed_windows(run.split, 160)
    (one, counts), (four, _) = (depth_sums(run._replace(batch_size=size), starts, depths) for size in (1, 4))
    assert counts.tolist() == [32] * 5
    for name in evaluation.MEASURES:
        assert one[name].shape == (11, 5) and one[name] == pytest.approx(four[name], abs=1e-3)


# ---- what the papers say


def by_name(claims):
    """{(paper, first words): holds}"""
    return {(c["source"], " ".join(c["claim"].split()[:4])): c["holds"] for c in claims}


def sums_of(*nats, kl=None, noise=0.1, n=50):
    """As depth_sums gives them: rows with these means per token, in 50 windows of 10 tokens, with noise of their own."""
    rng = np.random.default_rng(0)
    rows = lambda means: 10 * (np.array(means)[:, None] + rng.normal(0, noise, (len(means), n)))  # noqa: E731
    return {"nats": rows(nats), "kl": rows(kl or nats), "accuracy": rows(1 / np.array(nats))}, np.full(n, 10.0)


def test_the_claims_of_depth_follow_the_losses():
    cfg, R = tiny(**LOOP | dict(n_recur=4)), 4
    steps, nearer, early, beyond, little = [("GRT", words) for words in ("every step up to", "every step brings the", "most of the loss", "beyond n_recur the loss",
                                                                            "beyond n_recur it rises")]
    holds = lambda sums, cfg=cfg: by_name(depth_claims(cfg, *sums, R))  # noqa: E731
    good = holds(sums_of(5, 4, 3, 2.8, 2.6, 2.65, 2.65, 2.7, 2.7))
    assert good == dict.fromkeys((steps, nearer, early, beyond, little), True)
    bad = holds(sums_of(5, 4.8, 4.6, 4.8, 2.6, 2.5, 2.4, 2.3, 2.2, kl=[4, 1, 2, 1, 0, 0, 0, 0, 0]))
    assert bad == {steps: False, nearer: False, early: False, beyond: False, little: True}
    assert holds(sums_of(5, 4, 3, 2.8, 2.6, 3, 3, 3.4, 3.4))[little] is False              # it rises by a third of what was gained
    assert holds(sums_of(5, 4, 3, 2.61, 2.6, 3, 3, 3, 3))[steps] is None                   # the last step makes no difference that shows
    early_claim = [c for c in depth_claims(cfg, *sums_of(5, 4, 3, 2.8, 2.6, 2.6, 2.6, 2.6, 2.6), R) if "most of" in c["claim"]][0]
    assert early_claim["value"] == pytest.approx(2 / 2.4, abs=0.05) and early_claim["above"] == 0.5


def test_the_claims_about_a_held_gate_and_about_routers():
    gated, routed = tiny(**LOOP, update="gate"), tiny(**LOOP, router="expert")
    held = ("GRT", "a gate held at")
    assert by_name(depth_claims(gated, *sums_of(5, 4, 3, 2.8, 2.8, 2.8, 2.9, 12, 5), 3))[held] is True
    assert by_name(depth_claims(gated, *sums_of(5, 4, 3, 2.8, 2.8, 2.8, 2.9, 4, 5), 3))[held] is False
    assert held not in by_name(depth_claims(tiny(**LOOP), *sums_of(5, 4, 3, 2.8, 2.8, 2.8, 2.9), 3))
    larger = ("MoR", "a larger maximum depth")
    assert by_name(depth_claims(routed, *sums_of(2, 4, 3, 2.8), 3)) == {larger: True}        # depth 0 is no maximum that MoR speaks of
    assert by_name(depth_claims(routed, *sums_of(9, 4, 4.5, 2.8), 3)) == {larger: False}
    assert depth_claims(tiny(n_core=3), *sums_of(5, 4, 3, 2.8), 3) == [] and depth_claims(tiny(n_recur=2, sharing="sequence"), *sums_of(5), 0) == []


def test_shallow_loops_have_no_first_two_steps_to_speak_of():
    two = tiny(n_recur=2)
    assert "share_of_first_two" not in gains(two, *sums_of(5, 4, 3, 3, 3), 2)
    assert not any("first two" in c["claim"] for c in depth_claims(two, *sums_of(5, 4, 3, 3, 3), 2))
    assert gains(two, *sums_of(5, 4, 3, 3, 3), 2)["accuracy_kept"]["after"] == 1 and gains(tiny(n_recur=1, update="gate"), *sums_of(5, 4, 4), 1) == {}


def test_of_a_loss_that_does_not_fall_nothing_is_a_share():
    cfg, worse = tiny(**LOOP | dict(n_recur=4)), sums_of(2.6, 3, 4, 4.5, 5, 5, 5, 5, 5)          # (2.6 - 4) / (2.6 - 5) is more than half, too
    shares = [c for c in depth_claims(cfg, *worse, 4) if "most of" in c["claim"] or "rises little" in c["claim"]]
    assert len(shares) == 2 and all(math.isnan(c["value"]) and c["interval"] is None and c["holds"] is None for c in shares)
    assert math.isnan(gains(cfg, *worse, 4)["share_of_first_two"]["value"]) and gains(cfg, *worse, 4)["accuracy_kept"]["interval"]
    unclear = gains(cfg, *sums_of(3, 3, 3, 3, 3, noise=1.0), 4)["share_of_first_two"]             # some draws fall, some do not
    assert unclear["interval"] is None


@torch.no_grad()
def test_a_run_with_one_depth_has_a_picture_though_no_kl_has_a_place_on_it():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    run, points = SimpleNamespace(model=SimpleNamespace(cfg=tiny(n_recur=2, sharing="sequence"))), [{"depth": 2, "flops_per_token": 1e6, "kl": 0.0}]
    for axes, kl, scale in zip(figure.subplots(1, 3), (0.0, math.nan, 0.5), ("linear", "linear", "log")):
        evaluation.draw_kl(axes, [(run, {"points": [points[0] | {"kl": kl}]})])
        assert axes.get_yscale() == scale
    figure.savefig(io.BytesIO(), format="png")


def test_who_really_went_on_is_counted_without_logits(place, monkeypatch):
    monkeypatch.chdir(place)
    run = open_run("expert")
    starts = train.fixed_windows(run.split, 160)
    depth_BT = run.model(run.split.batch(starts)[0]).depth_BT
    monkeypatch.setattr(GPT, "head", None)
    flops = evaluation.flops_of(run, starts)
    assert [flops(k) for k in range(5)] == [evaluation.flops_at(run.model.cfg, [(depth_BT > r).double().mean().item() for r in range(4)], k) for k in range(5)]


def test_the_claims_are_printed_in_one_table_and_stand_in_the_record(go):
    lines, part = go("gated")
    title = next(i for i, line in enumerate(lines) if "claims on out/gated" in line)
    rows = lines[title + 2 :]
    assert len(part["claims"]) == len(rows) == 6 and title > max(i for i, line in enumerate(lines) if line.startswith("out/gated"))
    for row, c in zip(rows, part["claims"]):
        assert row.startswith(c["claim"]) and ("-" if c["value"] == "NaN" else f"{c['value']:.4g}") in row and row.endswith(evaluation.VERDICTS[c["holds"]] if c["interval"] else "no interval")
    assert [c["source"] for c in go("token")[1]["claims"]] == ["MoR"]


@pytest.mark.slow
def test_the_depth_picture_shows_the_kl_of_every_depth_but_the_full_one(place, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.chdir(place)
    runs, drawn, savefig = [open_run("gated"), open_run("dense")], [], figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kw: drawn.append(self) or savefig(self, *args, **kw))
    measured = [(run, evaluation.measure_depth(run, 160)) for run in runs]
    assert evaluation.draw(measured) == str(Path("out/gated/depth.png")) and Path("out/gated/depth.png").read_bytes()[:4] == b"\x89PNG"
    losses, kls = drawn[0].axes
    for (run, n), line in zip(measured, kls.get_lines()):
        assert list(line.get_xdata()) == [p["flops_per_token"] for p in n["points"]]
        assert [None if math.isnan(kl) else kl for kl in line.get_ydata()] == [None if p["depth"] == run.model.cfg.n_recur else p["kl"] for p in n["points"]]
    assert (kls.get_xscale(), kls.get_yscale(), losses.get_yscale()) == ("log", "log", "linear") and "KL" in kls.get_ylabel()
    assert [text.get_text() for text in kls.texts] == ["0", "1", "2", "3", "5", "6", "7", "8"]
