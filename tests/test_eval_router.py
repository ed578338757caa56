"""eval.py's part router: who goes on by each choice, counted again by hand on models whose decisions are known.

    python -m pytest -q tests/test_eval_router.py
"""
import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from tiny import loud, some_ids, tiny
from toy import flags, make_config, make_data, refusal

import eval as evaluation
import prepare
import train
from eval import AFTER, CLASSES, CLOSING, CONTINUATION, OPENING, OTHER, START, WHITESPACE, Lot, TokenClasses, agreement, by_class, flops_at, routed_pass
from model import GPT, causal, topk

pytestmark = pytest.mark.slow

ROUTED = dict(update="replace", depth_sampling="fixed", state_noise=0.0, gate_noise=0.0, n_recur=3)
DRAW = evaluation.draw_router


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/expert, out/token and, without a router, out/none, trained for some steps."""
    folder, here = tmp_path_factory.mktemp("router"), os.getcwd()
    make_data(folder)
    os.chdir(folder)
    for name, changes in {"none": {}, "token": dict(router="token"), "expert": dict(router="expert")}.items():
        make_config(folder, **{**ROUTED, "max_iters": 4, "eval_tokens": 64, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        os.utime(f"out/{name}/ckpt.pt", (1e9, 1e9 + (name == "expert")))
    os.chdir(here)
    return folder


@pytest.fixture
def go(place, tmp_path, monkeypatch, capsys):
    """go(*words, **flags) -> (stdout's lines without the last, the record in the last, stderr), in a copy of `place`; no picture."""
    shutil.copytree(place, tmp_path / "eval")
    monkeypatch.chdir(tmp_path / "eval")
    for name in ("draw", "draw_router"):
        monkeypatch.setattr(evaluation, name, lambda measured: None)

    def go(*words, **changes):
        capsys.readouterr()
        evaluation.main([*words, *flags(**{"device": "cpu", "eval_tokens": 256, **changes})])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last), err
    return go


def open_run(folder, **changes):
    s = evaluation.parse(flags(**changes))
    return evaluation.open_run(Path(folder), evaluation.read_state(Path(folder)), s, torch.device("cpu"), torch.autocast("cpu", enabled=False)), s


def transparent(model, seed=0):
    """Make every block pass its input through, so that a router sees a token's embedding and nothing else: numbers from
    -1 to 1 in the first features of each token's row. Returns them, (V, 3)."""
    number_V3 = torch.rand(model.cfg.vocab_size, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    with torch.no_grad():
        for block in model.blocks():
            block.attention.output.weight.zero_()
            block.mlp.down.weight.zero_()
        model.positions.table.weight.zero_()
        model.embed.weight[:, :3] = number_V3
        for step, unit in enumerate(getattr(model.recursion.router, "units", ())):
            unit.layers[0].weight.zero_()
            if step:                                                     # step 0 has no choice, and a score of sigmoid(0)
                unit.layers[0].weight[0, step - 1] = 3.0
    return number_V3.double().tolist()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def logits_by_hand(number, id):
    """What steps 1 and 2 ask about this token: each step multiplies the state by 1 + 0.1 sigmoid(logit)."""
    first = 3.0 * number[id][0] * 1.05
    return [None, first, 3.0 * number[id][1] * 1.05 * (1 + 0.1 * sigmoid(first))]


def windows_of(run, s):
    return [run.split.read(int(start), run.split.width)[:-1].tolist() for start in train.fixed_windows(run.split, s.eval_tokens)]


def top(positions, logit, k):
    return sorted(sorted(positions, key=lambda t: -logit[t])[:k])


# ---- expert-choice, against decisions that are known


def test_causal_depths_are_those_of_tokens_that_decide_by_themselves(place, monkeypatch):
    monkeypatch.chdir(place)
    run, s = open_run("out/expert", eval_tokens=512)
    number = transparent(run.model)
    n = evaluation.measure_router(run, s)
    for point in n["thresholds"]:
        depths = []
        for id in (id for row in windows_of(run, s) for id in row):
            goes_on = [sigmoid(logit) >= point["threshold"] for logit in logits_by_hand(number, id)[1:]]
            depths.append(1 + goes_on[0] + (goes_on[0] and goes_on[1]))
        assert point["depth_shares"] == pytest.approx([depths.count(depth) / len(depths) for depth in range(4)])
        assert point["mean_depth"] == pytest.approx(sum(depths) / len(depths)) and point["own"] == (point["threshold"] == 0.5)
        if point["own"]:
            assert all(n[key] == point[key] for key in ("depth_shares", "mean_depth", "nats_per_token"))
    assert [p["threshold"] for p in n["thresholds"]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]
    assert len({tuple(p["depth_shares"]) for p in n["thresholds"]}) > 8


def test_accuracy_scores_and_dead_tokens_are_those_of_a_plain_count(place, monkeypatch):
    monkeypatch.chdir(place)
    run, s = open_run("out/expert", eval_tokens=64)
    number, T, run.model.cfg = transparent(run.model), 32, replace(run.model.cfg, threshold=0.3)
    n = evaluation.measure_router(run, s)
    right, scores, alive = {1: [[], []], 2: [[], []]}, {step: {"left": [0] * 20, "chosen": [0] * 20} for step in (1, 2)}, set()
    for row in windows_of(run, s):
        logits, members = [logits_by_hand(number, id) for id in row], list(range(T))
        for step, k in ((1, 21), (2, 10)):                               # int(2/3 x 32), int(1/3 x 32)
            chosen = top(members, [logit[step] for logit in logits], k)
            for t in members:
                right[step][t in chosen].append((sigmoid(logits[t][step]) >= 0.3) == (t in chosen))
                scores[step]["chosen" if t in chosen else "left"][int(sigmoid(logits[t][step]) * 20)] += 1
            members = chosen
        alive |= set(members)
    assert n["dead"] == {"ratio": 1 - len(alive) / T, "positions": T, "windows": 2} and n["dead"]["ratio"] > 0.3
    assert n["scores"] == scores and list(n["accuracy"]["steps"]) == [1, 2]
    everyone = [right[1][kind] + right[2][kind] for kind in (0, 1)]
    for a, (left, chosen) in ((n["accuracy"]["steps"][1], right[1]), (n["accuracy"]["steps"][2], right[2]), (n["accuracy"]["pooled"], everyone)):
        assert (a["asked"], a["chosen"]) == (len(left) + len(chosen), len(chosen))
        rates = [sum(kind) / len(kind) for kind in (left, chosen)]
        assert [a["true_negative"], a["true_positive"]] == pytest.approx(rates) and a["balanced"] == pytest.approx(sum(rates) / 2)
        assert a["accuracy"] == pytest.approx(sum(left + chosen) / len(left + chosen)) and 0.5 < a["accuracy"] < 1
    assert n["topk"]["depth_shares"] == pytest.approx([0, 11 / 32, 11 / 32, 10 / 32])


def test_agreement_by_hand_and_where_there_is_nobody_to_judge_by():
    a = agreement(np.array([[8, 2], [3, 27]]))
    assert (a["asked"], a["chosen"], a["accuracy"], a["balanced"]) == (40, 30, 35 / 40, (8 / 10 + 27 / 30) / 2)
    assert agreement(np.array([[0, 0], [3, 9]]))["balanced"] is None and agreement(np.array([[0, 0], [3, 9]]))["accuracy"] == 0.75


def test_both_losses_are_the_models_own(place, monkeypatch):
    monkeypatch.chdir(place)
    run, s = open_run("out/expert", eval_tokens=256)
    run.model.load_state_dict(loud(run.model.cfg).state_dict())
    n, starts = evaluation.measure_router(run, s), train.fixed_windows(run.split, 256)
    each = {}
    for routing in ("causal", "topk"):
        ids_BT, targets_BT = run.split.batch(starts)
        with torch.no_grad():
            each[routing] = np.array([run.model(ids_1T, targets_1T, routing=routing).losses["ce"].item()
                                      for ids_1T, targets_1T in zip(ids_BT.split(1), targets_BT.split(1))])
    for found, routing in ((n, "causal"), (n["topk"], "topk")):
        assert found["nats_per_token"] == pytest.approx(each[routing].mean(), abs=1e-5)
    gap = n["topk"]["minus_causal"]
    more = each["topk"] - each["causal"]
    assert gap["value"] == pytest.approx(more.mean(), abs=1e-5) and abs(gap["value"]) > 1e-3 and n["topk"]["causal"] is False
    assert gap["interval"] == pytest.approx(evaluation.interval(evaluation.bootstrap(more * 32, np.full(8, 32.0))), abs=1e-5)
    d = n["lot"]["minus_topk"]
    assert d["value"] == pytest.approx(n["lot"]["nats_per_token"] - n["topk"]["nats_per_token"]) and d["interval"][0] <= d["value"] <= d["interval"][1]
    assert n["bits_per_byte"] == pytest.approx(n["nats_per_token"] * run.bits)


@pytest.mark.parametrize("kv", ["own", "share"])
def test_the_ends_of_the_dial_are_depth_one_and_everyone_at_full_depth(kv):
    cfg = tiny(n_prelude=1, n_recur=3, n_coda=1, router="expert", router_alpha=0.7, kv=kv)
    model, ids_BT = loud(cfg), some_ids(2, 32)
    everyone = GPT(replace(cfg, capacity=[1.0] * 3)).eval()
    everyone.load_state_dict(model.state_dict())
    with torch.no_grad():
        for threshold, wanted, depth, flops in ((1.0, model(ids_BT, depth=1), 1, cfg.flops_per_token(32, depth=1)),
                                                (0.0, everyone(ids_BT), 3, everyone.cfg.flops_per_token(32))):
            x_BTD, depth_BT, _ = routed_pass(model, ids_BT, causal, threshold)
            assert torch.allclose(model.head(x_BTD), wanted.logits, atol=1e-5) and (depth_BT == depth).all()
            assert flops_at(cfg, [float((depth_BT > step).double().mean()) for step in range(3)]) == flops
        x_BTD, depth_BT, _ = routed_pass(model, ids_BT, topk, 0.5)
        out = model(ids_BT, routing="topk")
        assert torch.equal(model.head(x_BTD), out.logits) and torch.equal(depth_BT, out.depth_BT)


def test_flops_follow_the_shares_that_really_happened():
    cfg = tiny(n_prelude=1, n_recur=3, n_coda=1, router="expert", block_size=30)
    assert flops_at(cfg, [1.0, 20 / 30, 10 / 30]) == cfg.flops_per_token(30)
    assert flops_at(cfg, [1.0, 0.5, 0.5]) == replace(cfg, capacity=[1, 0.5, 0.5]).flops_per_token(30)
    assert flops_at(cfg, [1.0, 0.0, 0.0]) == flops_at(cfg, [1.0, 0.5, 0.5], 1) == cfg.flops_per_token(30, depth=1)
    token, aux = (replace(cfg, **keys) for keys in (dict(router="token"), dict(aux_router=True)))
    assert flops_at(token, [1.0, 20 / 30, 10 / 30]) == token.flops_per_token(30) > flops_at(token, [1.0, 0.5, 10 / 30])
    assert flops_at(aux, [1.0, 1.0, 1.0]) - flops_at(cfg, [1.0, 1.0, 1.0]) == 2 * 2 * 16                       # two auxiliary routers, asked by all
    cfg = replace(cfg, block_size=100)
    every = [flops_at(cfg, [1.0, n / 100, n / 100]) for n in range(1, 101)]                                    # 0.29 x 100 is less than 29
    assert every == sorted(every) and np.diff(every, 2) == pytest.approx(every[2] - 2 * every[1] + every[0], rel=1e-6)        # a parabola: attention


@pytest.mark.parametrize("name", ["expert", "token"])
def test_losses_by_depth_stand_beside_the_flops_of_who_really_went_on(place, monkeypatch, name):
    monkeypatch.chdir(place)
    run, s = open_run(f"out/{name}", eval_tokens=256)
    run.model.load_state_dict(loud(run.model.cfg).state_dict())
    points = evaluation.measure_depth(run, s.eval_tokens)["points"]
    ids_BT, _ = run.split.batch(train.fixed_windows(run.split, 256))
    with torch.no_grad():
        depth_BT = run.model(ids_BT).depth_BT
    shares = [float((depth_BT > step).double().mean()) for step in range(3)]
    for p in points:
        assert p["flops_per_token"] == pytest.approx(flops_at(run.model.cfg, shares, p["depth"]))
    declared = run.model.cfg.flops_per_token(32)
    assert [p["depth"] for p in points] == [0, 1, 2, 3] and abs(points[-1]["flops_per_token"] / declared - 1) > 0.001


# ---- the floor


def test_the_lot_takes_exactly_the_capacities_and_differs_by_row_and_step():
    cfg = tiny(n_recur=3, router="expert", capacity=[1, 0.7, 0.7])
    model, ids_BT = loud(cfg), some_ids(4, 32)
    with torch.no_grad():
        depth_BT, again_BT = (routed_pass(model, ids_BT, Lot(first), 0.5)[1] for first in (0, 0))
        later_BT = torch.cat([routed_pass(model, ids_BT[b : b + 1], Lot(b), 0.5)[1] for b in range(4)])
    assert [(depth_BT > step).sum(1).tolist() for step in range(3)] == [[32] * 4, [22] * 4, [22] * 4]
    assert torch.equal(depth_BT, again_BT) and torch.equal(depth_BT, later_BT) and len({tuple(row) for row in depth_BT.tolist()}) == 4
    lot = Lot(0)
    first, second = (lot(torch.zeros(1, 32), torch.zeros(1, 32, dtype=torch.bool), 10 / 32, 32, None)[0].nonzero()[:, 1].tolist() for _ in range(2))
    assert first != second and first != list(range(10)) and len(first) == 10


def test_the_lot_does_not_look_at_the_scores_and_leaves_each_token_its_own():
    cfg = tiny(n_recur=2, router="expert", capacity=[1, 0.5], router_alpha=1.0)
    model, ids_BT = loud(cfg), some_ids(3, 32)
    with torch.no_grad():
        before_BTD, before_BT, _ = routed_pass(model, ids_BT, Lot(0), 0.5)
        model.recursion.router.units[1].layers[0].weight *= -1
        after_BTD, after_BT, _ = routed_pass(model, ids_BT, Lot(0), 0.5)
        chosen_BT = routed_pass(model, ids_BT, topk, 0.5)[1]
    assert torch.equal(before_BT, after_BT) and not torch.equal(before_BT, chosen_BT)
    changed_BT = (before_BTD - after_BTD).abs().amax(-1) > 1e-6
    assert torch.equal(changed_BT, before_BT == 2)                                            # the score of the chosen, theirs, and no other's


# ---- token-choice


def test_depths_balance_and_scores_of_token_choice_by_hand(place, monkeypatch):
    monkeypatch.chdir(place)
    run, s = open_run("out/token", eval_tokens=512)
    number = transparent(run.model)
    with torch.no_grad():
        run.model.recursion.router.unit.layers[0].weight.copy_(torch.eye(3, 16) * 4)
    n, load, scores = evaluation.measure_router(run, s), [0, 0, 0], [0] * 20
    for row in windows_of(run, s):
        for id in row:
            e = [math.exp(4 * x) for x in number[id]]
            load[e.index(max(e))] += 1
            scores[int(max(e) / sum(e) * 20)] += 1
    assert n["depth_shares"] == pytest.approx([0, *(count / 512 for count in load)]) and n["scores"] == scores
    assert n["max_vio"] == pytest.approx((max(load) - 512 / 3) / (512 / 3)) and n["max_vio"] > 0.01 and min(load) > 0
    assert "thresholds" not in n and "topk" not in n


# ---- the kind of a token


def classes_of(tokenizer, ids, vocab_size=512):
    return TokenClasses(tokenizer, vocab_size).of(torch.tensor([ids]))[0].tolist()


def test_the_classes_of_bytes():
    s, c, o, x, a, w, _ = START, CONTINUATION, OPENING, CLOSING, AFTER, WHITESPACE, OTHER
    #        d  e  f     f  _  1  (  x  ,     "  "  [  -  1  ]  )  :  \n        (  (     )     é     +  =  "  a
    text = 'def f_1(x, ""[-1]):\n  (( ) é += "a'
    wanted = [s, c, c, w, s, c, c, o, a, _, w, _, _, o, a, s, x, x, _, w, w, w, o, o, w, x, w, s, c, w, _, _, w, _, s]
    tokenizer = prepare.get_tokenizer("bytes")
    assert classes_of(tokenizer, tokenizer.encode_ordinary(text)) == wanted
    eot = tokenizer.eot_token
    assert classes_of(tokenizer, [ord("a"), eot, ord("a"), ord("("), eot, ord("a")]) == [s, _, s, o, _, s]
    assert classes_of(tokenizer, [ord("("), 300, ord("a")]) == [o, _, s]                     # an id without text, as end-of-text


def test_the_classes_of_longer_tokens():
    words = [b" the", b"the", b"ory", b" (", b"()", b"('", b"\n    ", b"'t", b" \xe2\x80\x9c", b"\xc3\xa9t", b" 12", b"_x", b"):\n", b" +"]
    ranks = {**{bytes([i]): i for i in range(256)}, **{word: 256 + i for i, word in enumerate(words)}}
    tokenizer = tiktoken.Encoding("words", pat_str=r"[\s\S]+", special_tokens={"<|endoftext|>": 400}, mergeable_ranks=ranks)
    by_name = {name: i for i, name in enumerate(CLASSES)}
    cases = [(None, b" the", "word start"), (b"the", b" the", "word start"), (b" +", b"the", "word start"), (None, b"the", "word start"),
             (b"(", b" the", "word start"), (b"()", b"the", "word start"), (b"\n    ", b"the", "word start"), (b"('", b"the", "word start"),
             (b"the", b" 12", "word start"), (b" the", b"ory", "continuation"), (b"the", b"\xc3\xa9t", "continuation"), (b"the", b"_x", "continuation"),
             (b"the", b" (", "opening mark"), (b"(", b"(", "opening mark"), (b"the", b"()", "opening mark"), (b"(", b")", "closing mark"),
             (b"the", b"):\n", "closing mark"), (b"(", b"the", "after an opening mark"), (b" (", b"the", "after an opening mark"),
             (b"(", b"'t", "after an opening mark"), (b"(", b"\n    ", "whitespace"), (b"the", b"'t", "other"), (b"the", b" +", "other"),
             (b"the", b" \xe2\x80\x9c", "other")]
    for before, token, wanted in cases:
        ids = ([] if before is None else [ranks[before]]) + [ranks[token]]
        assert classes_of(tokenizer, ids)[-1] == by_name[wanted], (before, token)


def test_depth_by_class_counts_every_token_once():
    depth_WT, class_WT = np.array([[1, 2, 2], [3, 3, 1]]), np.array([[START, START, OTHER], [START, OTHER, WHITESPACE]])
    table = by_class(depth_WT, class_WT, 3)
    assert table["word start"] == {"count": 3, "mean_depth": 2.0, "depth_shares": pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])}
    assert table["other"] == {"count": 2, "mean_depth": 2.5, "depth_shares": [0, 0, 0.5, 0.5]} and table["whitespace"]["depth_shares"] == [0, 1, 0, 0]
    assert table["closing mark"] == {"count": 0, "mean_depth": None, "depth_shares": [0, 0, 0, 0]} and list(table) == list(CLASSES)


def test_the_class_that_is_counted_is_that_of_the_token_that_takes_the_steps(place, monkeypatch):
    monkeypatch.chdir(place)
    run, s = open_run("out/expert", eval_tokens=512)
    number = transparent(run.model)
    spaces = [id for row in windows_of(run, s) for id in row if id in (9, 10, 13, 32)]
    sure = [1 + (logits_by_hand(number, id)[1] >= 0) + all(logit >= 0 for logit in logits_by_hand(number, id)[1:]) for id in spaces]
    found = evaluation.measure_router(run, s)["classes"]
    assert (found["whitespace"]["count"], found["whitespace"]["mean_depth"]) == (len(spaces), pytest.approx(sum(sure) / len(sure)))
    assert sum(c["count"] for c in found.values()) == 512


# ---- the command


@pytest.mark.parametrize("name", ["expert", "token"])
def test_the_numbers_do_not_depend_on_the_batch_size(place, monkeypatch, name):
    monkeypatch.chdir(place)
    found = []
    for batch_size in (1, 3):
        run, s = open_run(f"out/{name}", eval_tokens=256, batch_size=batch_size, thresholds="[.3]")
        run.model.load_state_dict(loud(run.model.cfg).state_dict())
        found.append(evaluation.measure_router(run, s))
    same(*found)


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for pair in zip(a, b):
            same(*pair)
    else:
        assert a == b if isinstance(a, (str, int, type(None))) else a == pytest.approx(b, abs=1e-5)


def test_the_report_has_a_row_for_every_choice_and_labels_what_is_not_causal(go):
    lines, record, err = go("router", out_dir="out/expert", compare="out/token", thresholds="[0, .25]")
    part = record["parts"]["router"]
    rows = [line for line in lines if line.startswith(("out/expert", "out/token"))]
    for line, name, way in zip(rows, ("causal, threshold 0.5", "top-k (not causal)", "as many by lot", "token-choice"),
                               (part, part["topk"], part["lot"], part["compare"][0])):
        assert name in line and f"{way['nats_per_token']:.4f}" in line and f"{way['mean_depth']:.3f}" in line
    assert f"{part['topk']['minus_causal']['value']:+.4f}" in rows[1] and all("(not causal)" in line for line in lines if "top-k" in line)
    assert [p["threshold"] for p in part["thresholds"]] == [0, 0.25, 0.5] and sum("the model's own" in line for line in lines) == 1
    assert any("of 32 positions" in line and "8 windows" in line for line in lines)
    assert (part["windows"], part["tokens"], part["router"], part["compare"][0]["router"]) == (8, 256, "expert", "token")
    assert json.loads(Path("out/expert/eval.json").read_text("utf-8")) == record


def test_a_run_without_a_router_is_skipped_and_refused_by_name(go, capsys):
    lines, record, err = go(out_dir="out/none", exit_tokens=0)
    assert "router" not in record["parts"] and err.count("router (out/none has no router)") == 1
    before = Path("out/none/eval.json").read_text("utf-8")
    assert "out/none has no router, so there is nothing" in refusal(evaluation.main, ["loss", "router", "--out_dir=out/none", "--device=cpu"])
    assert Path("out/none/eval.json").read_text("utf-8") == before and capsys.readouterr().out == ""                   # refused before any work
    lines, record, err = go("router", out_dir="out/token", compare="out/none")
    assert record["parts"]["router"]["compare"] == [] and err.count("out/none has no router, so it has no part in what follows") == 1
    assert "router" in (parts := go(out_dir="out/token")[1]["parts"]) and "exit" not in parts
    assert "thresholds=[0.2, 1.5]: 1.5 is out of range" in refusal(evaluation.main, ["router", "--thresholds=[.2, 1.5]"])


def test_the_part_loss_of_an_expert_run_gives_both_ways(go):
    lines, record, _ = go("loss", out_dir="out/expert")
    part, (run, _) = record["parts"]["loss"], open_run("out/expert")
    ids = run.split.read(0, 10**9)
    nats = {"causal": 0.0, "topk": 0.0}
    for start in range(0, len(ids) - 1, 32):
        row = torch.from_numpy(ids[start : start + 33])[None]
        for routing in nats:
            with torch.no_grad():
                nats[routing] += run.model(row[:, :-1], row[:, 1:], routing=routing).losses["ce"].item() * (row.size(1) - 1)
    assert part["nats_per_token"] == pytest.approx(nats["causal"] / (len(ids) - 1), abs=1e-5)
    assert part["topk"]["nats_per_token"] == pytest.approx(nats["topk"] / (len(ids) - 1), abs=1e-5)
    assert part["topk"]["minus_causal"]["value"] == pytest.approx((nats["topk"] - nats["causal"]) / (len(ids) - 1), abs=1e-5)
    assert any("the same with top-k (not causal)" in line and f"{part['topk']['minus_causal']['value']:+.4f}" in line for line in lines)
    assert "topk" not in go("loss", out_dir="out/token")[1]["parts"]["loss"]


@pytest.mark.parametrize("name", ["expert", "token"])
def test_a_run_that_diverged_is_measured_and_is_not_a_number(go, name):
    state = train.load_checkpoint(Path(f"out/{name}/ckpt.pt"))
    state["model"]["embed.weight"].fill_(math.nan)
    train.save_checkpoint(Path(f"out/{name}/ckpt.pt"), state)
    part = go("router", out_dir=f"out/{name}")[1]["parts"]["router"]
    assert part["nats_per_token"] == "NaN" and part["mean_depth"] >= 1


@pytest.mark.slow
def test_runs_whose_routers_ask_nobody_are_measured_all_the_same(go):
    for name, changes in {"lot": dict(router="expert", router_choice="random"), "full": dict(router="expert", capacity=[1.0, 1.0, 1.0])}.items():
        make_config(Path(), **{**ROUTED, "max_iters": 2, "eval_tokens": 64, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        lines, record, _ = go("router", out_dir=f"out/{name}")
        part = record["parts"]["router"]
        assert part["scores"] == part["accuracy"]["steps"] == {} and not any("the threshold's answer" in line for line in lines)
        assert part["accuracy"]["pooled"]["asked"] == 0 and part["accuracy"]["pooled"]["balanced"] is None
        if name == "lot":
            assert part["threshold"] is None and part["thresholds"] == [] and any("causal, by lot" in line for line in lines)
            assert not any("dial" in line for line in lines)
            figure = pytest.importorskip("matplotlib.figure").Figure()
            run = SimpleNamespace(name="lot", meta={"fingerprint": "0"})
            evaluation.draw_dial(axes := figure.subplots(), [(run, part)])                            # no threshold is written beside its point
            assert len(axes.texts) == 0 and list(axes.get_lines()[0].get_xdata()) == [part["mean_depth"]]
    assert part["lot"]["nats_per_token"] == pytest.approx(part["nats_per_token"], abs=1e-6) and part["mean_depth"] == 3


@pytest.mark.slow
def test_the_picture_shows_the_dial_the_kinds_and_the_scores(go, monkeypatch):
    from matplotlib.figure import Figure
    monkeypatch.setattr(evaluation, "draw_router", DRAW)
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure) or savefig(figure, *args, **kwargs))
    part = go("router", out_dir="out/expert", compare="out/token")[1]["parts"]["router"]
    dial, kinds, *scores = drawn[0].get_axes()
    assert Path(part["picture"]).read_bytes()[:4] == b"\x89PNG" and part["picture"] == "out/expert/router.png" and len(scores) == 2
    lines = {line.get_label(): line for line in dial.get_lines()}
    assert list(lines["1+1x3+1 expert (out/expert)"].get_xdata()) == sorted(p["mean_depth"] for p in part["thresholds"])
    assert {"1+1x3+1 token (out/token)", "top-k (not causal)", "as many by lot"} <= set(lines) and "nats per token" in dial.get_ylabel()
    assert [text.get_text() for text in kinds.get_yticklabels()] == [name for name, c in part["classes"].items() if c["count"]]
    assert [axes.get_title().split(":")[0] for axes in scores] == ["step 1", "step 2"]
    assert go("router", out_dir="out/token")[1]["parts"]["router"]["picture"] == "out/token/router.png" and len(drawn[1].get_axes()) == 3
