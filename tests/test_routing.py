"""Routers: who takes the next step. Against the specification, over the cache, through time, and as counts.

    python -m pytest -q tests/test_routing.py
"""
import copy
import itertools
import json
import math
import pickle
from dataclasses import replace

import pytest
import spec
import torch
from test_counts import smollm
from tiny import all_pairs, loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toy import make_config, make_data, refusal

import eval as evaluation
import sample
import train
from model import GPT, AtEnd, NoCache, Silence, check_threshold, compact, describe, make_cache, stream, topk

LAYOUT = dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, router_alpha=0.7)          # alpha: large enough that a wrong merge shows
CHOICES = dict(router=("expert", "token"), router_kind=("linear", "mlp"), update=("replace", "inject", "gate"), block=("gpt2", "llama"), kv=("own", "share"))
legal = lambda keys: (keys["router"], keys["update"]) != ("token", "gate")  # noqa: E731
ROUTED = [keys for keys in (dict(zip(CHOICES, values)) for values in itertools.product(*CHOICES.values())) if legal(keys)]
FEW = all_pairs(CHOICES, legal)                                                     # in which every two choices meet; the others are for the whole suite
SHARED = [dict(router="none", kv=kv, update=update, router_alpha=None) for kv, update in itertools.product(("share", "share_k", "share_v"), ("replace", "gate"))]
OPTIONS = [dict(router="expert", kv="share_k", block="llama"), dict(router="expert", kv="share_v", update="inject"), dict(router="token", kv="share_k", n_kv_head=2),
           dict(router="token", kv="share_v", block="llama"), dict(router="expert", aux_router=True, block="llama"),
           dict(router="expert", aux_router=True, update="gate", router_kind="mlp", kv="share"), dict(router="expert", router_choice="random", block="llama"),
           dict(router="expert", router_choice="random", kv="share", update="gate"),
           dict(router="expert", router_choice="random", capacity=[0.8, 0.5, 0.3], threshold=0.9), dict(router="expert", router_score="add", router_alpha=None, block="llama"),
           dict(router="expert", router_score="tanh", block="llama"), dict(router="expert", router_score="none", block="llama"),
           dict(router="token", router_balance="bias", block="llama"), dict(router="token", router_score="sigmoid", router_z_loss=0.1, block="llama"),
           dict(router="expert", router_z_loss=0.1, capacity=[1.0, 0.9, 0.2], block="llama")]


def cases(*lists):
    """Parameters of a test: the lists in full, those of ROUTED that are not among the few marked as slow."""
    return [pytest.param(keys, id=name(keys), marks=[pytest.mark.slow] if keys in ROUTED and keys not in FEW else []) for keys in itertools.chain(*lists)]


def name(keys):
    return "-".join(str(value) for value in keys.values())


def routed(keys, **more):
    return tiny(**{**LAYOUT, **keys, **more})


def assert_close(a, b):
    torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-4)                          # rotary tables are float32


@pytest.mark.parametrize("keys", cases(ROUTED, SHARED, OPTIONS))
@pytest.mark.slow
def test_logits_and_depths_equal_the_specification_at_every_depth(keys):
    cfg = routed(keys)
    model, ids_BT = loud(cfg).double(), some_ids(3, 12)
    seen = set()
    for depth in (None, 0, 1, 2):
        with torch.no_grad():
            out = model(ids_BT, depth=depth)
        for row, ids_T in enumerate(ids_BT.tolist()):
            sequence = spec.Sequence(cfg, model.state_dict(), depth)
            for t, id in enumerate(ids_T):
                assert_close(out.logits[row, t], sequence.token(id))
                assert out.depth_BT[row, t] == sequence.taken
                seen.add(sequence.taken)
    assert len(seen) > 2                                                            # tokens do part ways


@pytest.mark.parametrize("keys", cases(ROUTED, SHARED, OPTIONS))
def test_cached_logits_equal_the_full_forward_for_unequal_prompts(keys):
    model, ids_BT, n_B = loud(routed(keys)).double(), some_ids(3, 14), [5, 2, 4]
    with torch.no_grad():
        full = model(ids_BT).logits
    cache, padded_BT = make_cache(model, 3, 14), torch.zeros(3, 5, dtype=torch.long)
    for row, n in enumerate(n_B):
        padded_BT[row, :n] = ids_BT[row, :n]
    logits_B1V = model.feed(padded_BT, cache, None, n_B)
    for i in range(9):
        for row, n in enumerate(n_B):
            assert_close(logits_B1V[row, 0], full[row, n + i - 1])
        logits_B1V = model.feed(torch.stack([ids_BT[row, n + i][None] for row, n in enumerate(n_B)]), cache)


@pytest.mark.parametrize("keys", [keys for keys in ROUTED + OPTIONS if keys.get("router_kind", "linear") == "linear" and keys.get("router_choice") != "random"], ids=name)
def test_outside_training_a_token_changes_nothing_before_it_and_topk_does(keys):
    model, ids_BT = loud(routed(keys)).double(), some_ids(4, 16)
    changed_BT = ids_BT.clone()
    changed_BT[:, 10:] = some_ids(4, 6, seed=9)
    with torch.no_grad():
        for routing in ("causal", "topk"):
            a, b = (model(ids, routing=routing) for ids in (ids_BT, changed_BT))
            same = torch.equal(a.depth_BT[:, :10], b.depth_BT[:, :10]) and torch.allclose(a.logits[:, :10], b.logits[:, :10], atol=1e-6)
            assert same == (routing == "causal" or keys["router"] == "token"), routing


@pytest.mark.parametrize("kv", ["own", "share"])
def test_training_takes_the_capacities_of_the_full_length_each_set_inside_the_last(kv):
    model = loud(routed(dict(router="expert", kv=kv))).train()
    depth_BT = model(some_ids(4, 16), seed=(0, 0)).depth_BT
    assert [(depth_BT > step).sum(1).tolist() for step in range(3)] == [[16] * 4, [10] * 4, [5] * 4]       # int(2/3 x 16), int(1/3 x 16)
    assert (loud(routed(dict(router="expert"))).train()(some_ids(2, 1)).depth_BT == 3).all()               # never fewer than one


@pytest.mark.parametrize("kv", ["own", "share", "share_k", "share_v"])
def test_the_gathered_pass_equals_a_dense_one_that_masks(kv):
    """Expert-choice top-k, written densely: everyone is computed, attention and update look only at the chosen."""
    model, ids_BT = loud(routed(dict(router="expert", update="replace", kv=kv))).double(), some_ids(2, 12)
    with torch.no_grad():
        out = model(ids_BT, routing="topk")
        h_BTD, who = model.start(ids_BT, NoCache())
        active_BT, first = torch.ones(2, 12, dtype=torch.bool), {}
        for step, unit in enumerate(model.recursion.router.units):
            logit_BT = unit(h_BTD)[..., 0].masked_fill(~active_BT, -torch.inf)
            if step:
                kth = logit_BT.sort(1, descending=True).values[:, int((3 - step) / 3 * 12) - 1, None]
                active_BT = active_BT & (logit_BT >= kth)
            y_BTD = h_BTD
            for block in model.recursion.core:
                y_BTD = dense_block(block, y_BTD, active_BT, kv, first.setdefault(block, []))
            h_BTD = torch.where(active_BT[..., None], h_BTD + 0.7 * logit_BT.sigmoid()[..., None] * y_BTD, h_BTD)
        assert_close(model.head(model.finish(h_BTD, who, NoCache().coda_seat)), out.logits)


def dense_block(block, x_BTD, active_BT, kv, first):
    B, T, D = x_BTD.shape
    a, n_BTD = block.attention, block.attention_norm(x_BTD)
    q, k, v = (part(n_BTD).view(B, T, -1, a.head_width).transpose(1, 2) for part in (a.query, a.key, a.value))
    first[:] = first or (k, v)                                                      # of step 0, where everyone is active
    k, v = {"own": (k, v), "share": first, "share_k": (first[0], v), "share_v": (k, first[1])}[kv]
    mask_B1TT = torch.ones(2, 1, T, T, dtype=torch.bool).tril()
    if kv != "share":
        mask_B1TT = mask_B1TT & active_BT[:, None, None, :] | torch.eye(T, dtype=torch.bool)
    x_BTD = x_BTD + a.output(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT).transpose(1, 2).reshape(B, T, D))
    return x_BTD + block.mlp(block.mlp_norm(x_BTD))


def test_ties_go_to_the_earlier_token_and_what_is_kept_stays_in_order():
    by_AC = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert topk(by_AC, by_AC > 0, 0.4, 5, None)[1][1].tolist() == [[1, 2]]
    _, column_BM, real_BM = compact(torch.tensor([[False, True, False, True], [False, False, False, True]]))
    assert column_BM[real_BM].tolist() == [1, 3, 3] and real_BM.tolist() == [[True, True], [True, False]]


def test_a_threshold_of_zero_sends_everyone_all_the_way_and_one_sends_nobody_on():
    model, ids_BT = loud(routed(dict(router="expert"))), some_ids(2, 8)
    for threshold, depth in ((0.0, 3), (1.0, 1)):                                   # step 0 has capacity 1: it asks nobody
        other = GPT(replace(model.cfg, threshold=threshold)).eval()
        other.load_state_dict(model.state_dict())
        assert (other(ids_BT).depth_BT == depth).all()
        assert torch.equal(other.generate(ids_BT, 5, temperature=0), model.generate(ids_BT, 5, temperature=0, threshold=threshold))


def test_token_choice_with_every_token_at_one_depth_is_the_anchor_and_p_times_the_core():
    cfg = routed(dict(router="token", update="replace", router_alpha=1.0))
    model, ids_BT = loud(cfg).double(), some_ids(2, 8)
    for depth in (1, 2, 3):
        with torch.no_grad():
            unit = model.recursion.router.unit.layers[0]
            unit.weight.zero_()
            model.recursion.router.score = lambda x, depth=depth: torch.nn.functional.one_hot(torch.full(x.shape[:-1], depth - 1), 3).double() * 0.6
            e_BTD, who = model.start(ids_BT, NoCache())
            y_BTD = e_BTD
            for _ in range(depth):
                for block in model.recursion.core:
                    y_BTD = block(y_BTD)
            h_BTD, got = model.recursion(e_BTD, who, 3, Silence(), NoCache(), AtEnd(model, who, NoCache()))
        assert_close(h_BTD, e_BTD + 0.6 * y_BTD)
        assert (torch.as_tensor(got.depth) == depth).all()


@pytest.mark.parametrize("keys", [keys for keys in ROUTED if keys["block"] == "llama"], ids=name)
def test_every_parameter_learns_routers_included(keys):
    cfg = routed(keys)
    model = loud(cfg).train()
    for seed in range(2):
        out = model(some_ids(2, 16), some_ids(2, 16, seed=3), seed=(seed, seed))
        out.loss.backward()
    assert set(out.losses) == {"ce", "router"} | ({"router_z"} if cfg.router == "token" else set()) and out.loss == sum(out.losses.values())
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


# Both terms have weights here that are not 1, and every choice that changes them.
WEIGHED = dict(router_loss=0.3, router_z_loss=0.2)
TERMS = {"expert": dict(router="expert"), "expert, capacities": dict(router="expert", capacity=[0.8, 0.5, 0.5], kv="own"), "aux": dict(router="expert", aux_router=True),
         "token": dict(router="token"), "token, sigmoid": dict(router="token", router_score="sigmoid"), "token, bias": dict(router="token", router_balance="bias")}


def heard(model, ids_BT):
    """(out, {a router's name: its logits}) of a call in training."""
    logits, hooks = {}, []
    for name, unit in model.recursion.router.named_modules():
        if name.startswith(("unit", "aux_units")) and hasattr(unit, "layers"):
            hooks.append(unit.register_forward_hook(lambda module, args, out, name=name: logits.__setitem__(name, out.detach())))
    out = model.train()(ids_BT, ids_BT, seed=(0, 0))
    for hook in hooks:
        hook.remove()
    return out, logits


def mean(numbers):
    return sum(numbers) / len(numbers)


def expert_terms(cfg, depth_BT, logits):
    """Of each step with a choice: -log of what the router that decides gives to what top-k did, and the other's squared logit."""
    own = {name: value[..., 0].flatten().tolist() for name, value in logits.items()}                  # a row after the other, in order
    router, z = 0.0, 0.0
    for step in [step for step, share in enumerate(cfg.capacities) if share < 1]:
        went_on = [taken > step for row in depth_BT.tolist() for taken in row if taken >= step]
        judges = own[f"aux_units.{step}" if cfg.aux_router else f"units.{step}"]
        router += mean([-math.log(1 / (1 + math.exp(-x if yes else x))) for x, yes in zip(judges, went_on, strict=True)])
        z += mean([x * x for x in own[f"units.{step}"]])
    return router, z


def token_terms(cfg, depth_BT, logits):
    """Per row N times the sum over depths of (share of its tokens that chose it) x (its mean probability); log of the summed exponents."""
    R, rows, z = cfg.n_recur, [], []
    for depths, row in zip(depth_BT.tolist(), logits["unit"].tolist()):
        sums = [sum(math.exp(x) for x in token) for token in row]
        p = [[math.exp(x) / total if cfg.score_name == "softmax" else 1 / (1 + math.exp(-x)) for x in token] for token, total in zip(row, sums)]
        rows.append(R * sum(depths.count(d + 1) / len(depths) * mean([token[d] for token in p]) for d in range(R)))
        z += [math.log(total) ** 2 for total in sums]
    return mean(rows), mean(z)


@pytest.mark.parametrize("case", TERMS)
def test_the_routers_own_losses_are_those_of_plain_loops(case):
    cfg = routed({**TERMS[case], **WEIGHED})
    out, logits = heard(loud(cfg).double(), some_ids(4, 12))
    router, z = (expert_terms if cfg.router == "expert" else token_terms)(cfg, out.depth_BT, logits)
    terms = {name: float(term.detach()) for name, term in out.losses.items()}
    assert terms.get("router", 0.0) == pytest.approx(0.0 if cfg.router_balance == "bias" else 0.3 * router) and router > 0.1
    assert terms["router_z"] == pytest.approx(0.2 * z) and z > 0.1 and float(out.loss.detach()) == pytest.approx(sum(terms.values()))


@pytest.mark.parametrize("case", TERMS)
def test_the_routers_losses_of_a_batch_are_the_mean_of_its_halves(case):
    model, ids_BT = loud(routed({**TERMS[case], **WEIGHED})).double(), some_ids(4, 12, seed=4)
    whole, *halves = (heard(model, ids)[0].losses for ids in (ids_BT, ids_BT[:2], ids_BT[2:]))
    for term in {"router", "router_z"} & set(whole):
        a, b = (float(half[term].detach()) for half in halves)
        assert float(whole[term].detach()) == pytest.approx((a + b) / 2) and abs(a - b) > 1e-3


def test_unique_parameters_of_a_routed_360m_model():
    assert replace(smollm("360M", "1+10x3+1"), router="expert").n_params(embeddings=False) == 117_991_680


@pytest.mark.parametrize("plan, kv, mflop", [("1+15x2+1", "own", 623.49), ("1+10x3+1", "own", 555.63), ("1+8x4+1", "own", 553.45), ("1+10x3+1", "share", 536.25)])
def test_flops_equal_the_table_of_the_mor_paper(plan, kv, mflop):
    assert round(replace(smollm("360M", plan), router="expert", kv=kv).flops_per_token(2048, "paper") / 1e6, 2) == mflop


@pytest.mark.slow
@pytest.mark.parametrize("keys", [keys for keys in ROUTED + SHARED + OPTIONS if keys["router"] != "token"], ids=name)
@pytest.mark.slow
def test_exact_flops_are_those_of_a_real_forward_at_its_capacities(keys):
    cfg, T = routed(keys), 12
    for depth in (3, 0, 1, 2):                                                      # shallow passes ask one router more than they take steps
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            depth_BT = loud(cfg)(some_ids(2, T), routing="topk", depth=depth).depth_BT
        share = [float((depth_BT > step).double().mean()) for step in range(3)]
        square = sum(s * 2 * 4 * 16 * (T if cfg.kv == "share" else s * T) for s in share) + 2 * 4 * 16 * T         # what ran; half of it counts
        assert counter.get_total_flops() == pytest.approx(2 * T * (cfg.flops_per_token(T, depth=depth) + square / 2), rel=1e-9), depth


def test_a_routed_model_goes_no_deeper_than_it_has_routers():
    with pytest.raises(ValueError, match="every step of this model has a router of its own"):
        loud(routed(dict(router="expert")))(some_ids(1, 4), depth=4)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(router="expert"), dict(router="expert", kv="share", update="inject"), dict(router="token")], ids=name)
@pytest.mark.slow
def test_a_routed_run_trains_evaluates_and_writes(tmp_path, monkeypatch, capsys, keys):
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)
    make_config(tmp_path, **{**dict(update="replace", depth_sampling="fixed", state_noise=0.0, gate_noise=0.0), **keys})
    train.main(["toy.py"])
    records = [json.loads(line) for line in (tmp_path / "out/toy/log.jsonl").read_text("utf-8").splitlines()]
    depths = [r["depth"] for r in records if r["event"] == "step"]
    assert all(1 <= depth <= 4 for depth in depths) and (keys["router"] == "token" or depths == [pytest.approx(2.5)] * 4)      # (32 + 24 + 16 + 8) / 32
    evaluation.main(["--device=cpu"])
    parts = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert parts["loss"]["train"]["agrees"] and [p["depth"] for p in parts["depth"]["points"]] == [0, 1, 2, 3, 4]
    sample.main(["--max_new_tokens=5"])
    assert "more than n_recur=4" in refusal(sample.main, ["--recursions=9"])
    assert "sends tokens to different steps" in refusal(sample.main, ["--cache=mean"])


@pytest.mark.slow
def test_a_router_learns_which_tokens_top_k_takes():
    """Trained as a whole, a model agrees with its own top-k at the threshold: what makes causal routing possible."""
    model, ids_BT = loud(routed(dict(router="expert", block="llama"), n_embd=32, router_alpha=None, router_loss=0.1, capacity=[1.0, 0.2, 0.1])), some_ids(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    agrees = lambda: (model.eval()(ids_BT).depth_BT == model(ids_BT, routing="topk").depth_BT).double().mean()  # noqa: E731
    before = agrees()
    for seed in range(80):
        optimizer.zero_grad()
        model.train()(ids_BT[:, :-1], ids_BT[:, 1:], seed=(seed, seed)).loss.backward()
        optimizer.step()
    assert before < 0.7 and agrees() > 0.9


# What a recursion does at its edges: keys, tokens of a row, depth asked -> steps that each token takes in training.
EDGES = {"every token everywhere": (dict(router="expert", capacity=[1.0, 1.0, 1.0]), 4, None, [3, 3, 3, 3]),
         "depth 0": (dict(router="expert"), 3, 0, [0, 0, 0]), "depth 1": (dict(router="expert"), 3, 1, [1, 1, 1]),
         "one token at a time": (dict(router="expert", capacity=[0.01, 0.01, 0.01]), 6, None, [0, 0, 0, 0, 0, 3]),
         "more steps than tokens": (dict(router="expert", n_recur=5), 2, None, [1, 5]),
         "one token": (dict(router="expert"), 1, None, [3])}


@pytest.mark.parametrize("case", EDGES)
def test_the_edges_of_a_recursion(case):
    keys, T, depth, want = EDGES[case]
    assert sorted(loud(routed(keys)).train()(some_ids(1, T), depth=depth, seed=(0, 0)).depth_BT[0].tolist()) == want


def test_a_loop_of_one_step_is_the_plain_model_bit_for_bit_and_no_capacity_is_nought():
    recursive, plain = loud(tiny(n_recur=3, n_core=2)), loud(tiny(n_recur=1, n_core=2))
    assert torch.equal(recursive(some_ids(2, 9), depth=1).logits, plain(some_ids(2, 9)).logits)
    for capacity in ([1.0, 0.0, 0.0], [1.0, 0.5], [1.0, 0.5, 1.5]):
        with pytest.raises(ValueError, match="one share of the tokens in"):
            routed(dict(router="expert", capacity=capacity))


# ---- options of the routers


@pytest.mark.slow
def test_an_auxiliary_router_learns_beside_the_model_and_changes_nothing_in_it():
    plain, ids_BT, targets_BT = loud(routed(dict(router="expert"), router_loss=0.0)), some_ids(4, 24), some_ids(4, 24, seed=3)
    model = loud(routed(dict(router="expert", aux_router=True)))
    model.load_state_dict(plain.state_dict(), strict=False)
    for m in (plain, model):
        m.train()(ids_BT, targets_BT).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads.pop(name), p.grad)
    assert len(grads) == 2 and all("router.aux_units" in name and grad.any() for name, grad in grads.items())            # step 0 chooses nobody
    aux = [p for name, p in model.named_parameters() if "aux_units" in name]
    optimizer = torch.optim.Adam(aux, lr=0.3)
    agrees = lambda: float((model.eval()(ids_BT).depth_BT == model(ids_BT, routing="topk").depth_BT).double().mean())  # noqa: E731
    before = agrees()
    for _ in range(100):
        optimizer.zero_grad()
        model.train()(ids_BT, targets_BT).loss.backward()
        optimizer.step()
    assert agrees() > max(0.8, before)


@pytest.mark.slow
def test_a_balancing_bias_evens_out_the_depths_without_a_loss():
    model, ids_BT = loud(routed(dict(router="token", router_balance="bias"), router_z_loss=0.0)).train(), some_ids(8, 32)
    model.recursion.router.bias_R.zero_()
    violations = []
    for _ in range(300):
        out = model(ids_BT, ids_BT)
        load_R = torch.bincount(out.depth_BT.flatten(), minlength=4)[1:].double()
        violations.append(float(load_R.max() / load_R.mean() - 1))                  # MaxVio
        model.recursion.router.rebalance(load_R, 0.005)
    assert set(out.losses) == {"ce"} and violations[0] > 0.5 and violations[-1] < 0.1
    other = loud(routed(dict(router="token")))
    other.recursion.router.rebalance(load_R, 1.0)
    assert not other.recursion.router.bias_R.any() and "recursion.router.bias_R" not in other.state_dict()


def test_warm_capacities_begin_at_everyone_and_end_as_declared():
    model, ids_BT = loud(routed(dict(router="expert"))), some_ids(2, 24)
    router, shares = model.recursion.router, {}
    for extra in (1.0, 0.5, 0.0):
        router.warm(extra)
        depth_BT = model.train()(ids_BT).depth_BT
        shares[extra] = [int((depth_BT[0] > step).sum()) for step in range(3)]
        assert [int((model.eval()(ids_BT, routing="topk").depth_BT[0] > step).sum()) for step in range(3)] == [24, 16, 8]
    assert shares == {1.0: [24, 24, 24], 0.5: [24, 20, 16], 0.0: [24, 16, 8]}


def test_a_random_choice_asks_no_router_and_takes_its_share():
    cfg = routed(dict(router="expert", router_choice="random"), block_size=4000)
    model, ids_BT = loud(cfg), some_ids(1, 3000)
    other = loud(cfg, seed=5)
    with torch.no_grad():
        depth_BT = model(ids_BT).depth_BT
        assert torch.equal(depth_BT, other(ids_BT).depth_BT)
        assert [float((depth_BT > step).double().mean()) for step in (1, 2)] == pytest.approx([2 / 3, 1 / 3], abs=0.03)
    deaf = loud(replace(cfg, threshold=0.99, router_loss=5.0))
    assert torch.equal(deaf(ids_BT).depth_BT, depth_BT)                             # nobody is asked, so there is no threshold
    losses = deaf.train()(some_ids(2, 9), some_ids(2, 9)).losses
    assert set(losses) == {"ce", "router"} and losses["router"] == 0 and losses["router"].dtype == torch.float32       # and nothing to learn
    assert [line.split("=")[0] for line in deaf.cfg.unused()] == ["threshold", "router_loss"] and cfg.router_weight == 0
    assert [line.split("=")[0] for line in replace(cfg, router_score="add", router_kind="mlp").unused()] == ["router_kind"]


def test_settings_that_contradict_each_other_are_refused():
    for keys, words in ((dict(router="token", aux_router=True), "belongs to router='expert'"), (dict(router="expert", router_balance="bias"), "belongs to router='token'"),
                        (dict(router_choice="random"), "belongs to router='expert'"), (dict(router="expert", router_choice="random", aux_router=True), "would learn a random choice"),
                        (dict(router="expert", kv="share_k", capacity=[0.5, 0.5, 0.5]), "capacity must begin with 1"), (dict(router="token", router_score="add"), "does not go with"),
                        (dict(router="expert", capacity=[0.3, 1.0, 1.0]), "rises at step 1"), (dict(router="expert", capacity=[1.0, 0.5, 0.6]), "rises at step 2"),
                        (dict(router="expert", router_score="add", aux_router=True), "aux_router=True teaches to others"),
                        (dict(router="expert", router_score="add", router_loss=0.0), "router_loss=0 turns off"),
                        (dict(router="expert", router_z_loss=-1.0), "0 turns it off"), (dict(router="expert", router_choice="x"), "is not one of score, random")):
        with pytest.raises(ValueError, match=words):
            tiny(**{**LAYOUT, "router_alpha": None, **keys})


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), "x", [0.5]], ids=str)
def test_a_threshold_that_is_no_probability_is_refused(value):
    with pytest.raises(ValueError, match="is not a number from 0"):
        check_threshold(value)
    for fine in (None, 0, 1, 0.5):
        check_threshold(fine)


@pytest.mark.parametrize("keys", [dict(router=router, router_score=score) for router, scores in (("expert", ("sigmoid", "tanh", "none", "add")), ("token", ("softmax", "sigmoid")))
                                  for score in scores] + [dict(router="expert", aux_router=True, update="gate"), dict(router="expert", router_choice="random")], ids=name)
def test_a_routed_model_survives_a_pickle_and_a_copy(keys):
    model, ids_BT = loud(routed(keys)), some_ids(2, 9)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(ids_BT).logits, model(ids_BT).logits)


@pytest.mark.parametrize("kv, why", [("share", "keeps no more already"), ("share_k", "kv='share_k' keeps one of the two for all steps"), ("share_v", "kv='share_v' keeps one")])
def test_why_shared_k_and_v_are_not_compressed(kv, why):
    with pytest.raises(ValueError, match=why):
        tiny(**{**LAYOUT, "router_alpha": None}, kv=kv).check_cache("mean")


# ---- the cache: what it holds, and what a token that stopped costs


def impose(model, depth_T):
    """Every token at position t takes depth_T[t] steps, whatever the router thinks."""
    router, depth_T = model.recursion.router, torch.tensor(depth_T)
    if model.cfg.router == "expert":
        router.judge = lambda router, logit_AC, x_ACD, who, step: (logit_AC, (depth_T[who.position_AC] > step).expand(logit_AC.shape), logit_AC)
    else:
        enter = router.enter
        router.enter = lambda e_BTD, who, depth: enter(e_BTD, who, depth)._replace(wanted_BT1=depth_T[who.position_AC].expand(e_BTD.shape[:2])[..., None].clamp(max=depth))
    return model


@pytest.mark.parametrize("router, kv", list(itertools.product(("expert", "token"), ("own", "share", "share_k"))))
def test_the_cache_of_balanced_tokens_takes_the_bytes_that_are_declared(router, kv):
    model = impose(loud(routed(dict(router=router, kv=kv))), [3, 1, 2] * 6)
    cfg, cache = model.cfg, make_cache(model, 2, 18)
    declared = cfg.kv_bytes(18, 2, torch.float32)
    assert cache.nbytes() == declared
    ids_BT = some_ids(2, 18)
    model.feed(ids_BT[:, :7], cache, None, [7, 7])
    for t in range(7, 18):
        model.feed(ids_BT[:, t : t + 1], cache)
    assert cache.nbytes() == declared and cache.length_B == [18, 18]                # nothing grew
    vanilla, outer = replace(cfg, router="none", kv="own", router_alpha=None).kv_bytes(18, 2, torch.float32), 2 * 2 * 2 * 18 * 16 * 4
    assert (declared - outer) / (vanilla - outer) == {"own": 4 / 6, "share": 1 / 3, "share_k": 4 / 6}[kv]            # (N + 1) / 2N, 1 / N


def test_entries_read_per_token_follow_the_table_of_the_mor_paper():
    core = lambda **keys: routed(keys, n_prelude=0, n_coda=0).kv_io(18)  # noqa: E731
    vanilla = core(router_alpha=None)
    assert core(router="expert") / vanilla == core(router="token") / vanilla == 4 / 6 and core(router="expert", kv="share") / vanilla == 1.0


@pytest.mark.parametrize("router", ["expert", "token"])
def test_a_cache_that_grows_equals_one_that_was_large(router):
    """Every token goes all the way, far beyond the declared capacities, from an early place on."""
    model, ids_BT = impose(loud(routed(dict(router=router))).double(), [1, 1, 3] + [3] * 29), some_ids(2, 20)
    with torch.no_grad():
        full = model(ids_BT).logits
    cache = make_cache(model, 2, 20)
    small = cache.nbytes()
    for t in range(20):
        logits_B1V = model.feed(ids_BT[:, t : t + 1], cache)
        assert_close(logits_B1V[:, 0], full[:, t])
    assert cache.nbytes() > small


@pytest.mark.parametrize("router, kv", list(itertools.product(("expert", "token"), ("own", "share"))))
def test_a_row_that_stopped_costs_nothing_and_a_step_that_nobody_takes_is_skipped(router, kv):
    model, prompts = loud(routed(dict(router=router, kv=kv))), [some_ids(n, seed=n).tolist() for n in (3, 5, 2, 4)]
    seen, cache = [], make_cache(model, 4, 30)
    model.recursion.core[0].register_forward_hook(lambda module, args, out: seen.append(out.shape[0] * out.shape[1]))
    padded_BT = torch.tensor([row + [0] * (5 - len(row)) for row in prompts])
    model.feed(padded_BT, cache, None, [3, 5, 2, 4])
    skipped = uneven = 0
    for t in range(20):
        seen.clear()
        model.feed(some_ids(4, 1, seed=t), cache)
        want = [int((cache.taken_BT > step).sum()) for step in range(3)]
        assert seen == [n for n in want if n]
        skipped, uneven = skipped + (0 in want), uneven + any(0 < n < 4 for n in want)
    assert uneven and (skipped or router == "token") and seen[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("router, kv", [("expert", "own"), ("expert", "share"), ("token", "own"), ("token", "share"), ("expert", "share_k"), ("token", "share_v")])
def test_200_greedy_tokens_with_a_cache_are_those_without_and_so_are_their_depths(router, kv):
    model, prompts = loud(routed(dict(router=router, kv=kv, block="llama"), block_size=256)).double(), [some_ids(n, seed=n).tolist() for n in (9, 4, 17)]
    runs = []
    for use_cache in (True, False):
        taken = [[], [], []]
        runs.append((list(stream(model, prompts, 200, temperature=0, use_cache=use_cache, taken=taken)), taken))
    assert runs[0] == runs[1]
    depths = [steps for row in runs[0][1] for steps in row]
    assert [len(row) for row in runs[0][1]] == [208, 203, 216] and min(depths.count(d) for d in (1, 2, 3)) > 10          # all depths occur


def test_steps_taken_are_told_for_every_token_that_is_read():
    model, prompts = loud(routed(dict(router="expert", block="llama"))), [some_ids(5).tolist(), some_ids(40, seed=2).tolist()]
    taken = [[], []]
    tokens = list(stream(model, prompts, 20, temperature=0, taken=taken))
    assert [len(row) for row in taken] == [24, 59]
    assert taken[1][:24] == [None] * 24 and None not in taken[1][24:] + taken[0]      # a row over block_size keeps its newest half: 16 of 40
    ids = prompts[0] + [next_B[0] for next_B in tokens]
    assert taken[0][:5] == model(torch.tensor([ids[:5]])).depth_BT[0].tolist()


@pytest.mark.parametrize("keys", OPTIONS, ids=name)
def test_the_page_of_every_option_is_written(keys):
    assert "tokens take step 0" in describe(routed(keys))
