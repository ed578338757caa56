"""Training routed models: what a step counts, the bias that balances, warm-up of capacities, evaluation both ways, graphs.

    python -m pytest -q tests/test_train_routing.py
"""
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train import NO_AUTOCAST, checkpoint, events, go, place, toy_split  # noqa: F401  fixtures
from tiny import loud, some_ids, tiny
from toy import make_config, refusal

import eval as evaluation
import train
from model import GPT, param_groups
from train import RouterTally, RouterWatch, agreement, at_edge, compile_parts, evaluate, extra_capacity, fixed_windows, step_gradients

LAYOUT = dict(n_prelude=1, n_core=1, n_recur=4, n_coda=1)
CALM = dict(update="replace", depth_sampling="fixed", state_noise=0.0, gate_noise=0.0)
EXPERT = dict(CALM, router="expert")
BIASED = dict(CALM, router="token", router_balance="bias", router_bias_rate=0.05)
AUX = dict(EXPERT, aux_router=True, aux_router_lr_scale=10.0, capacity_warmup_iters=3)


def routed_loud(**changes):
    """A loud model of four steps for the toy data, whose routers part tokens without being asked to."""
    return loud(tiny(**{**LAYOUT, "vocab_size": 320, "router_alpha": 0.5, **changes}))


# ------------------------------------------------------------------------------------------------- what a step counts


def test_a_step_counts_how_many_tokens_took_each_depth():
    model = GPT(tiny(**LAYOUT, router="expert")).train()
    batches = [(some_ids(2, 16, seed=i), some_ids(2, 16, seed=i)) for i in range(3)]
    seeds = [(i, i) for i in range(3)]
    loss, load = step_gradients(model, batches, seeds, NO_AUTOCAST, most=4)
    assert load.tolist() == [0, 24, 24, 24, 24]                      # capacities 16, 12, 8, 4 of 16: four leave at each step
    assert step_gradients(model, batches, seeds, NO_AUTOCAST) == (loss, None)
    assert train.mean_depth(load.tolist()) == 2.5 and train.max_vio(load.tolist()) == 0
    assert train.max_vio([5, 30, 10, 10, 10]) == pytest.approx(1.0)   # the fullest has twice the mean of 15; depth 0 is none of them


def test_the_log_has_the_depths_of_a_step_and_how_unbalanced_they_are(go):
    for r in events(go(**EXPERT, out_dir="out/expert"), "step"):
        assert r["depth"] == 2.5 and r["depth_shares"] == {"1": 0.25, "2": 0.25, "3": 0.25, "4": 0.25} and "max_vio" not in r
    for r in events(go(**BIASED, out_dir="out/token"), "step"):
        shares = [r["depth_shares"][str(d)] for d in range(1, 5)]
        assert sum(shares) == pytest.approx(1) and r["depth"] == pytest.approx(sum(d * s for d, s in enumerate(shares, 1)))
        assert r["max_vio"] == pytest.approx(max(shares) / 0.25 - 1)
    assert "depth_shares" not in events(go(out_dir="out/plain"), "step")[0]


# ---------------------------------------------------------------------------------------------------------- balancing


def test_after_each_step_the_bias_moves_by_its_rate_towards_the_depths_that_too_few_chose(go):
    folder = go(**BIASED, max_iters=5, gradient_accumulation_steps=3)
    wanted = [0.0] * 4
    for r in events(folder, "step"):                                  # the shares are of all three micro-batches
        for d, share in r["depth_shares"].items():
            wanted[int(d) - 1] += 0.05 * ((share < 0.25) - (share > 0.25))
    bias_R = checkpoint(folder)["model"]["recursion.router.bias_R"]
    assert bias_R.any() and bias_R.tolist() == pytest.approx(wanted)


@pytest.mark.slow
def test_a_bias_evens_out_what_its_absence_leaves_uneven(go):
    same = dict(BIASED, max_iters=40, learning_rate=1e-3)
    still, moved = (events(go(**{**same, "router_bias_rate": rate}, out_dir=f"out/{rate}"), "step")[-10:] for rate in (0.0, 0.001))
    assert sum(r["max_vio"] for r in moved) < 0.8 * sum(r["max_vio"] for r in still)


# ------------------------------------------------------------------------------------------------ warm-up, learning rates


def test_the_warm_up_begins_at_all_falls_along_a_cosine_and_ends_on_time():
    s = SimpleNamespace(capacity_warmup_iters=8)
    extra = [extra_capacity(step, s) for step in range(10)]
    assert extra[0] == 1 and extra[4] == pytest.approx(0.5) and extra[8] == extra[9] == 0 and extra[:9] == sorted(extra[:9], reverse=True)
    assert extra[2] == pytest.approx(0.5 + math.sqrt(0.125)) and extra_capacity(0, SimpleNamespace(capacity_warmup_iters=0)) == 0


def test_capacities_of_training_shrink_during_the_warm_up_and_those_of_evaluation_do_not(go):
    folder = go(**EXPERT, capacity_warmup_iters=4, max_iters=6)
    depths = [r["depth"] for r in events(folder, "step")]
    assert depths[0] == 4 and depths == sorted(depths, reverse=True) and depths[3] > depths[4] == depths[5] == 2.5
    assert depths[2] == pytest.approx((32 + 28 + 24 + 20) / 32)       # half way: (1 + c) / 2
    first = events(folder, "eval")[0]
    assert first["dead_tokens"] > 0                                   # top-k at the start: a quarter of the positions, not all


def test_aux_routers_have_a_learning_rate_of_their_own_which_survives_a_resume(go):
    folder = go(**AUX, max_iters=2)
    rates = lambda: [group["lr"] for group in checkpoint(folder)["optimizer"]["param_groups"]]  # noqa: E731
    lr = events(folder, "step")[-1]["lr"]
    assert rates() == pytest.approx([lr, lr, 10 * lr])
    go(**{**AUX, "aux_router_lr_scale": 3.0}, max_iters=4, init_from="resume")
    lr = events(folder, "step")[-1]["lr"]
    assert rates() == pytest.approx([lr, lr, 3 * lr])


def test_a_checkpoint_whose_groups_know_no_scale_goes_on(go):
    folder = go(max_iters=2)
    state = checkpoint(folder)
    for group in state["optimizer"]["param_groups"]:
        del group["lr_scale"]
    del state["at_edge"]
    torch.save(state, folder / "ckpt.pt")
    go(max_iters=4, init_from="resume")
    lr = events(folder, "step")[-1]["lr"]
    assert [group["lr"] for group in checkpoint(folder)["optimizer"]["param_groups"]] == [lr, lr]


@pytest.mark.parametrize("keys", [AUX, BIASED, dict(AUX, router_choice="random", aux_router=False, kv="share")], ids=["aux", "bias", "random share"])
@pytest.mark.slow
def test_a_routed_run_that_is_broken_off_and_resumed_is_the_unbroken_one_bit_for_bit(go, keys):
    same = dict(keys, dropout=0.1, gradient_accumulation_steps=2, lr_decay_iters=6, eval_interval=2)
    whole, broken = go(**same, out_dir="out/whole", max_iters=6), go(**same, out_dir="out/broken", max_iters=2)
    go(**same, out_dir="out/broken", max_iters=6, init_from="resume")
    a, b = checkpoint(whole), checkpoint(broken)
    assert a["at_edge"] == b["at_edge"] and list(a["model"]) == list(b["model"])
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    assert "recursion.router.bias_R" not in a["model"] or a["model"]["recursion.router.bias_R"].any()
    clean = lambda folder: [{k: v for k, v in r.items() if "per_" not in k or k == "bits_per_byte"} for r in events(folder)  # noqa: E731
                            if r["event"] != "start"]
    assert clean(whole) == clean(broken)


# ---------------------------------------------------------------------------------------------------------- watching


@pytest.mark.parametrize("keys", [dict(), dict(kv="share"), dict(aux_router=True), dict(capacity=[1.0, 1.0, 0.5, 0.25]), dict(threshold=0.97)], ids=str)
def test_a_watch_pairs_each_token_that_was_asked_with_what_it_did(keys):
    model, ids_BT = routed_loud(router="expert", **keys), some_ids(5, 20)
    shares, T, threshold = model.cfg.capacities, 20, model.cfg.threshold
    for routing in ("causal", "topk"):
        with RouterWatch(model) as watch, torch.no_grad():
            depth_BT = model(ids_BT, routing=routing).depth_BT
        everything = watch.asked(depth_BT)
        for step, share in enumerate(shares):
            if share == 1:
                assert everything[step] is None
                continue
            logit_N, went_N, position_N = everything[step]
            assert position_N.tolist() == [t for row in depth_BT.tolist() for t, taken in enumerate(row) if taken >= step]
            assert went_N.tolist() == [taken > step for row in depth_BT.tolist() for taken in row if taken >= step]
            if routing == "causal":                                   # a logit beside the wrong token would not fit
                assert len(logit_N) == len(went_N) and torch.equal(logit_N.sigmoid() >= threshold, went_N)
            elif not keys.get("aux_router"):
                k, ends = int(share * T), (depth_BT >= step).sum(1).cumsum(0).tolist()
                for logits, went in zip(logit_N.split([b - a for a, b in zip([0, *ends], ends)]), went_N.split([b - a for a, b in zip([0, *ends], ends)])):
                    assert went.sum() == min(k, len(went)) and (len(went) == k or logits[went].min() > logits[~went].max())
    assert [len(module._forward_hooks) for module in (model, *model.recursion.router.units)] == [0] * 5      # nothing is left behind


def test_rows_that_only_fill_up_are_not_asked_and_a_plain_model_has_no_one_to_ask():
    model, ids_BT = routed_loud(router="expert"), some_ids(4, 16)
    with torch.no_grad():
        for routing in ("causal", "topk"):
            with RouterWatch(model) as watch:
                few = watch.asked(model(ids_BT, routing=routing).depth_BT, 2)
            with RouterWatch(model) as watch:
                alone = watch.asked(model(ids_BT[:2], routing=routing).depth_BT)
            for a, b in zip(few[1:], alone[1:]):
                torch.testing.assert_close(a[0], b[0])
                assert torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
        with RouterWatch(GPT(tiny(**LAYOUT))) as watch:
            assert watch.asked(torch.full((1, 4), 4)) == [None] * 4


def test_where_nobody_is_left_nobody_is_asked():
    model, ids_BT = routed_loud(router="expert", threshold=1.0), some_ids(2, 8)
    with RouterWatch(model) as watch, torch.no_grad():
        model(ids_BT, routing="topk")                                 # a pass before this one has left nothing
        asked = watch.asked(model(ids_BT).depth_BT)
    assert [len(at[1]) for at in asked[1:]] == [16, 0, 0] and all(len(logit_N) == len(went_N) for logit_N, went_N, _ in asked[2:])


# --------------------------------------------------------------------------------------------------------- evaluation


def by_hand(model, split, starts):
    """The numbers of an evaluation from their definitions, window by window."""
    R, T = model.cfg.n_recur, 32
    load, reached, said, losses = [0] * (R + 1), set(), {step: [] for step in range(1, R)}, {"causal": [], "topk": []}
    for start in starts.tolist():
        ids_BT, targets_BT = split.batch([start])
        for routing, nats in losses.items():
            with RouterWatch(model) as watch, torch.no_grad():
                out = model(ids_BT, targets_BT, routing=routing)
            nats.append(out.losses["ce"].item())
            for t, depth in enumerate(out.depth_BT[0].tolist()):
                load[depth] += routing == "causal"
                if routing == "topk" and depth == R:
                    reached.add(t)
        for step in said:
            said[step] += list(zip((watch.asked(out.depth_BT)[step][0] >= math.log(0.6 / 0.4)).tolist(), (out.depth_BT[out.depth_BT >= step] > step).tolist()))
    rate = lambda pairs, kind: sum(yes == kind for yes, chosen in pairs if chosen == kind) / sum(chosen == kind for _, chosen in pairs)  # noqa: E731
    right = {step: (rate(pairs, True) + rate(pairs, False)) / 2 for step, pairs in said.items()}
    n = sum(load)
    return sum(losses["causal"]) / len(starts), sum(losses["topk"]) / len(starts), {
        "mean_depth": sum(d * m for d, m in enumerate(load)) / n, "depth_shares": {d: m / n for d, m in enumerate(load) if d},
        "go_on": {step: sum(load[step + 1 :]) / sum(load[step:]) for step in said}, "router_accuracy": sum(right.values()) / 3,
        "router_accuracy_at": right, "dead_tokens": 1 - len(reached) / T}


def flat(numbers):
    return {f"{name} {key}": v for name, value in numbers.items() for key, v in (value.items() if isinstance(value, dict) else [("", value)])}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_routing_numbers_are_those_of_the_windows_counted_by_hand(place, batch_size):
    model, split = routed_loud(router="expert", threshold=0.6).train(), toy_split(place)
    starts, tally = fixed_windows(split, 6 * 32), RouterTally(model, "cpu")
    causal = evaluate(model, split, starts, [1, 4], batch_size, "cpu", look=tally.look)[4]
    with tally.watch:
        topk = evaluate(model, split, starts, [4], batch_size, "cpu", routing="topk", look=tally.look_topk)[4]
    assert model.training
    wanted_causal, wanted_topk, wanted = by_hand(model.eval(), split, starts)
    assert causal == pytest.approx(wanted_causal, abs=1e-6) and topk == pytest.approx(wanted_topk, abs=1e-6) and abs(causal - topk) > 1e-3
    assert flat(tally.numbers(train.ALONE)) == pytest.approx(flat(wanted)) and 0 < wanted["dead_tokens"] < 1 and len(set(flat(wanted).values())) > 8


def test_accuracy_is_one_half_for_a_router_that_says_the_same_to_all_and_none_where_top_k_takes_all():
    balanced = lambda *counts: agreement(torch.tensor(counts).view(2, 2))["balanced"]  # noqa: E731
    assert balanced(0, 6, 0, 2) == balanced(6, 0, 2, 0) == 0.5 and balanced(3, 1, 1, 3) == 0.75
    assert balanced(3, 1, 0, 0) is balanced(0, 0, 0, 7) is None
    tally = RouterTally(routed_loud(router="expert", capacity=[1.0, 0.5, 0.5, 0.25]), "cpu")
    tally.load += torch.tensor([0, 4, 0, 2, 2])
    tally.said += torch.tensor([[[0, 0], [0, 0]], [[3, 1], [1, 3]], [[0, 0], [1, 3]], [[2, 0], [2, 0]]])           # at step 2 top-k took all who were left
    numbers = tally.numbers(train.ALONE)
    assert numbers["router_accuracy_at"] == {1: 0.75, 3: 0.5} and numbers["router_accuracy"] == 0.625


def test_a_logit_at_the_threshold_counts_as_the_model_counts_it():
    threshold = 0.001                                                 # where rounding parts the two ways of asking
    logit_N = torch.tensor([train.as_logit(threshold)])
    assert logit_N >= train.as_logit(threshold) and logit_N.sigmoid() < threshold
    model, asked = routed_loud(router="expert", threshold=threshold), [None, (logit_N, torch.tensor([True]), None), None, None]
    tally, other = RouterTally(model, "cpu"), evaluation.Tally(model.cfg, 1.0)
    tally.watch.asked = lambda *args: asked
    tally.look_topk(torch.ones(1, 32, dtype=torch.long), 1)
    other.add(torch.zeros(1), torch.ones(1, 32), asked)
    assert tally.said[1].tolist() == other.yes_counts[1].tolist() == [[0, 0], [0, 1]]


def test_the_validation_loss_is_the_causal_one_and_top_k_stands_beside_it_with_its_label(go, capsys):
    folder = go(**EXPERT, max_iters=3, eval_interval=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "| routing " in line]
    model, records = GPT(train.GPTConfig(**checkpoint(folder)["model_config"])), events(folder, "eval")
    model.load_state_dict(checkpoint(folder)["model"])
    split = train.Split("data", "toy", "val", train.prepare.load_meta("data", "toy"), 32)
    both = [evaluate(model, split, fixed_windows(split, 128), [4], 4, "cpu", routing=routing)[4] for routing in ("causal", "topk")]
    last = records[-1]
    assert [last["val_loss"], last["topk_val_loss"]] == both and last["topk_gap"] == both[0] - both[1] != 0 and checkpoint(folder)["val_loss"] == both[0]
    assert set(last["by_depth"]) == {"1", "2", "4"} and len(lines) == len(records) == 3
    for line, r in zip(lines, records):
        assert f"top-k (not causal) {r['topk_val_loss']:.4f} nats/token, causal {r['topk_gap']:+.4f}" in line and f"depth {r['mean_depth']:.2f}" in line
        assert f"router accuracy {100 * r['router_accuracy']:.1f}%" in line and f"dead {100 * r['dead_tokens']:.1f}%" in line


def test_a_choice_by_lot_has_no_accuracy(go, capsys):
    record = events(go(**EXPERT, router_choice="random", max_iters=0), "eval")[0]
    assert record["router_accuracy"] is None and record["go_on"] and "router accuracy - |" in capsys.readouterr().out


def test_token_choice_is_evaluated_once_at_full_depth_and_says_how_unbalanced_it_is(go, capsys):
    record = events(go(**BIASED, max_iters=1), "eval")[-1]
    shares = record["depth_shares"]
    assert set(record["by_depth"]) == {"4"} and "topk_val_loss" not in record and record["max_vio"] == pytest.approx(4 * max(shares.values()) - 1)
    assert f"max violation {record['max_vio']:.2f}" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ at an edge


def test_an_edge_is_a_step_that_takes_all_or_nobody_and_a_depth_that_has_all_or_nobody():
    expert, token = tiny(**LAYOUT, router="expert"), tiny(**LAYOUT, router="token")
    assert at_edge(expert, {"go_on": {1: 0.98, 2: 0.02, 3: 0.5}}) is None and at_edge(tiny(), {}) is None
    assert "99.5% of the tokens asked take step 2 (a router that chooses: 1 to 99%; its capacity: 66.7%)" in at_edge(expert, {"go_on": {1: 0.5, 2: 0.995}})
    assert "0.0% of the tokens asked take step 3" in at_edge(expert, {"go_on": {1: 0.5, 3: 0.0}}) and "larger router_loss, aux_router=True" in at_edge(expert, {"go_on": {1: 1.0}})
    assert at_edge(token, {"depth_shares": {1: 0.97, 2: 0.01, 3: 0.01, 4: 0.01}}) is None
    assert "depth 2 has 0.05% of the tokens" in at_edge(token, {"depth_shares": {1: 0.5, 2: 0.0005, 3: 0.25, 4: 0.25}})
    assert "depth 1 has 99.50%" in at_edge(token, {"depth_shares": {1: 0.995, 2: 0.002, 3: 0.0015, 4: 0.0015}})


def test_an_edge_is_measured_by_what_a_step_is_to_take_and_the_advice_is_what_is_not_on_yet():
    stuck, even = {"go_on": {1: 0.5, 2: 1.0, 3: 0.002}}, {1: 0.995, 2: 0.002, 3: 0.0015, 4: 0.0015}
    of = lambda **keys: at_edge(tiny(**LAYOUT, **{"router": "expert", **keys}), stuck)  # noqa: E731
    assert of(capacity=[1.0, 0.5, 0.5, 0.005], block_size=1000) is None              # step 2 takes whoever is left, step 3 one in a hundred of them
    assert "100.0% of the tokens asked take step 2" in of(capacity=[1.0, 0.5, 0.4, 0.3]) and "0.2% of the tokens asked take step 3" in of(capacity=[1.0, 0.5, 0.5, 0.2])
    assert "0.0% of the tokens asked take step 2" in at_edge(tiny(**LAYOUT, router="expert", capacity=[1.0, 0.5, 0.5, 0.2]), {"go_on": {2: 0.0}})
    assert of(router_choice="random") is None
    assert "try a larger router_loss, or another threshold" in of(aux_router=True)
    assert "try a larger router_bias_rate, or a smaller" in at_edge(tiny(**LAYOUT, router="token", router_balance="bias"), {"depth_shares": even})
    assert "try a larger router_loss, router_balance='bias', or" in at_edge(tiny(**LAYOUT, router="token"), {"depth_shares": even})


def test_three_evaluations_in_a_row_at_an_edge_are_said_and_a_resume_does_not_forget(go, capsys):
    stuck = dict(EXPERT, threshold=0.0, eval_interval=1)              # everyone goes all the way
    folder = go(**stuck, max_iters=1)
    go(**stuck, max_iters=1, init_from="resume")                      # looks again at the same step: that is no third one
    assert not events(folder, "note") and checkpoint(folder)["at_edge"] == 2
    go(**stuck, max_iters=3, init_from="resume")
    assert [(r["step"], r["evaluations"]) for r in events(folder, "note")] == [(2, 3), (3, 4)]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: routing")]
    assert said[0].startswith("note: routing, for 3 evaluations now: 100.0% of the tokens asked take step 1") and len(said) == 2


def test_one_evaluation_away_from_the_edge_begins_the_count_anew():
    written = []
    run = SimpleNamespace(losses={"at_edge": 0, "val_step": -1}, log=SimpleNamespace(write=lambda line, **record: written.append(record["step"])))
    for run.step, sentence in enumerate(["a", "a", None, "a", "a", "a"]):
        train.Run.warn_at_edge(run, sentence)
        run.losses["val_step"] = run.step
    assert written == [5]


# -------------------------------------------------------------------------------------------------- graphs and memory


def graphs(steps, ragged=False, warm=lambda model, i: None, **keys):
    """How many graphs training makes, none of them broken off."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = loud(tiny(**{**LAYOUT, "n_core": 2, **keys})).train()
    compile_parts(model, ragged=ragged, backend=backend, dynamic=False)
    for i in range(steps):
        warm(model, i)
        step_gradients(model, [(some_ids(4, 32, seed=i), some_ids(4, 32, seed=i + 1))], [(i, i)], NO_AUTOCAST)
    assert not torch._dynamo.utils.counters["graph_break"]
    return len(made)


@pytest.mark.slow
@pytest.mark.parametrize("keys, most", [(dict(router="expert"), 4), (dict(router="expert", update="gate", n_recur=9), 27), (dict(router="expert", aux_router=True), 4)],
                         ids=["replace", "gate, nine steps", "aux"])
def test_expert_choice_training_makes_a_graph_for_each_capacity_and_no_more(keys, most):
    assert graphs(3, **keys) == most                                  # of a block; with a gate of read and write too


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(router="token", kv="share"), dict(router="token", update="inject", block="llama"),
                                  dict(router="token", kv="share_k", n_kv_head=2)], ids=str)
def test_token_choice_training_makes_few_whole_graphs_whatever_the_numbers_of_tokens(keys):
    assert graphs(20, ragged=True, **keys) <= 6
    assert graphs(4, ragged=False, **keys) > 6                        # what would become of it otherwise


@pytest.mark.slow
def test_a_warm_up_of_capacities_does_not_make_a_graph_at_every_step():
    warm = lambda model, i: model.recursion.router.warm(extra_capacity(i, SimpleNamespace(capacity_warmup_iters=12)))  # noqa: E731
    assert graphs(12, ragged=True, warm=warm, router="expert") <= 4
    ragged = lambda steps, **keys: train.is_ragged(tiny(**LAYOUT, **keys), SimpleNamespace(capacity_warmup_iters=steps))  # noqa: E731
    assert [ragged(0), ragged(9), ragged(0, router="expert"), ragged(9, router="expert"), ragged(0, router="token")] == [False, False, False, True, True]


@pytest.mark.parametrize("keys", [EXPERT, BIASED], ids=["expert", "token"])
@pytest.mark.slow
def test_evaluation_of_a_compiled_routed_run_makes_no_graph(go, monkeypatch, keys):
    made = []

    def backend(graph, inputs):
        made.append(torch.is_grad_enabled())
        return graph.forward
    monkeypatch.setattr(train, "want_compile", lambda *args: True)
    monkeypatch.setattr(train, "compile_parts", lambda model, **options: compile_parts(model, backend=backend, **options))
    torch._dynamo.reset()
    folder = go(**keys, max_iters=3, eval_interval=1, eval_tokens=160)
    assert made and all(made) and len(events(folder, "eval")) == 4


@pytest.mark.parametrize("keys", [dict(router="expert"), dict(router="expert", kv="share", update="gate"), dict(router="expert", aux_router=True),
                                  dict(router="token"), dict(router="token", kv="share", router_balance="bias")], ids=str)
def test_a_step_computed_again_chooses_the_same_tokens(keys):
    ids_BT, grads = some_ids(2, 24), []
    for lean in (False, True):
        model = loud(tiny(**LAYOUT, dropout=0.1, state_noise=0.1, **keys)).train()
        if lean:
            train.checkpoint_activations(model)
        loss, load = step_gradients(model, [(ids_BT, ids_BT)], [(1, 1)], NO_AUTOCAST, most=4)
        grads.append((loss, load, [p.grad for p in model.parameters()]))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    for a, b in zip(grads[0][2], grads[1][2]):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


# ----------------------------------------------------------------------------------------------------- words beforehand


def test_the_start_page_says_who_routes_how_many_and_what_it_costs(go, capsys):
    go(**AUX, max_iters=0)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("router "))
    for words in ("expert-choice: linear router, score sigmoid, capacities 1 0.75 0.5 0.25, falling from 1 over 3 steps", "the aux router decides, threshold 0.5",
                  "kv=own", "losses: router 0.016, z 0"):
        assert words in line, words
    go(**BIASED, max_iters=0, router_z_loss=0.5, out_dir="out/token")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("router "))
    assert "token-choice: linear router, score softmax, depths 1..4, balanced by a bias, rate 0.05; kv=own" in line and "z 0.5" in line
    go(**EXPERT, router_choice="random", max_iters=0, out_dir="out/lot")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("router "))
    assert "a lot by position and step decides, in training and outside; kv=own; losses: router 0, z 0" in line and "threshold" not in line
    go(**EXPERT, capacity=[1.0] * 4, max_iters=0, out_dir="out/everyone")
    assert "go on" not in capsys.readouterr().out                     # no step has a choice
    go(max_iters=0, out_dir="out/plain")
    assert not re.search("^router ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("key, value", [("capacity_warmup_iters", 5), ("aux_router_lr_scale", 2.0), ("router_bias_rate", 0.5)])
def test_a_router_key_without_its_router_is_announced(go, capsys, key, value):
    go(max_iters=0, **{key: value})
    assert f"note: {key}={value} has no effect: " in capsys.readouterr().out


def test_a_run_starts_from_routed_weights_whose_tensors_fit_and_names_the_key_of_those_that_do_not(go):
    source = go(**EXPERT, max_iters=1)
    go(**EXPERT, max_iters=1, init_from=source, out_dir="out/fits", capacity=[1.0, 0.9, 0.5, 0.5], threshold=0.3, router_loss=0.0)
    for changes, words in ((dict(router="none"), "router is 'expert' there and 'none' here"), (dict(aux_router=True), "aux_router is False there and True here"),
                           (dict(router_kind="mlp"), "router_kind is 'linear'"), (dict(n_recur=3), "n_recur is 4 there and 3 here")):
        assert words in refusal(go, **{**EXPERT, **changes}, init_from=source, out_dir="out/other")
    plain = go(**CALM, max_iters=1, out_dir="out/plain")
    go(**CALM, max_iters=1, init_from=plain, n_recur=3, out_dir="out/shallower")                    # without routers any depth fits
    with_aux = go(**AUX, max_iters=1, out_dir="out/aux")
    assert "capacity is None there" in refusal(go, **AUX, init_from=with_aux, capacity=[1.0, 1.0, 0.5, 0.5], out_dir="out/aux other")
    spelt = dict(capacity=[1.0, 0.75, 0.5, 0.25], n_kv_head=2, n_ffn=64, router_width=32)             # what None means here
    go(**AUX, **spelt, max_iters=1, init_from=with_aux, out_dir="out/spelt")
    assert "n_ffn is None there and 32 here" in refusal(go, **{**AUX, "n_ffn": 32}, init_from=with_aux, out_dir="out/aux other")


def test_an_evaluation_of_an_expert_choice_model_is_estimated_with_its_top_k_pass(monkeypatch):
    import itertools
    clock = itertools.count()
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    settings = SimpleNamespace(batch_size=2, gradient_accumulation_steps=1, max_iters=0, eval_interval=0, eval_tokens=640)
    for keys, passes in ((dict(router="expert", capacity=[1.0] * 4), 2), (dict(), 1)):
        cfg = tiny(**LAYOUT, **keys)
        flops = cfg.flops_per_token
        by_depth = sum(flops(32, depth=d) for d in (1, 2)) / flops(32)
        assert train.estimate_seconds(GPT(cfg).train(), settings, "cpu", NO_AUTOCAST, 0) == pytest.approx((by_depth + passes) * 640 / 64 / 3, rel=1e-3)
