"""Routers: who takes the next step. Against the specification, over the cache, through time, and as counts.

    python -m pytest -q tests/test_routing.py
"""
import itertools
import json
from dataclasses import replace

import pytest
import spec
import torch
from test_counts import smollm
from tiny import loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toy import make_config, make_data, refusal

import eval as evaluation
import sample
import train
from model import GPT, NoCache, Silence, compact, make_cache, topk

LAYOUT = dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, router_alpha=0.7)          # alpha: large enough that a wrong merge shows
ROUTED = [dict(router=router, router_kind=kind, update=update, block=block, kv=kv) for router, kind, update, block, kv in itertools.product(
    ("expert", "token"), ("linear", "mlp"), ("replace", "inject", "gate"), ("gpt2", "llama"), ("own", "share")) if (router, update) != ("token", "gate")]
SHARED = [dict(router="none", kv="share", update=update, router_alpha=None) for update in ("replace", "gate")]


def name(keys):
    return "-".join(str(value) for value in keys.values())


def routed(keys, **more):
    return tiny(**{**LAYOUT, **keys, **more})


def assert_close(a, b):
    torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-4)                          # rotary tables are float32


@pytest.mark.parametrize("keys", ROUTED + SHARED, ids=name)
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


@pytest.mark.parametrize("keys", ROUTED + SHARED, ids=name)
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


@pytest.mark.parametrize("keys", [keys for keys in ROUTED if keys["router_kind"] == "linear"], ids=name)
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


def test_the_gathered_pass_equals_a_dense_one_that_masks():
    """Expert-choice top-k, written densely: everyone is computed, attention and update look only at the chosen."""
    model, ids_BT = loud(routed(dict(router="expert", update="replace"))).double(), some_ids(2, 12)
    with torch.no_grad():
        out = model(ids_BT, routing="topk")
        h_BTD, _, who = model.start(ids_BT, NoCache())
        active_BT = torch.ones(2, 12, dtype=torch.bool)
        for step, unit in enumerate(model.recursion.router.units):
            logit_BT = unit(h_BTD)[..., 0].masked_fill(~active_BT, -torch.inf)
            if step:
                kth = logit_BT.sort(1, descending=True).values[:, int((3 - step) / 3 * 12) - 1, None]
                active_BT = active_BT & (logit_BT >= kth)
            y_BTD = h_BTD
            for block in model.recursion.core:
                y_BTD = dense_block(block, y_BTD, active_BT)
            h_BTD = torch.where(active_BT[..., None], h_BTD + 0.7 * logit_BT.sigmoid()[..., None] * y_BTD, h_BTD)
        assert_close(model.head(model.finish(h_BTD, who, NoCache())), out.logits)


def dense_block(block, x_BTD, active_BT):
    B, T, D = x_BTD.shape
    a, n_BTD = block.attention, block.attention_norm(x_BTD)
    q, k, v = (part(n_BTD).view(B, T, -1, a.head_width).transpose(1, 2) for part in (a.query, a.key, a.value))
    mask_B1TT = (torch.ones(T, T, dtype=torch.bool).tril() & active_BT[:, None, :] | torch.eye(T, dtype=torch.bool))[:, None]
    x_BTD = x_BTD + a.output(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT).transpose(1, 2).reshape(B, T, D))
    return x_BTD + block.mlp(block.mlp_norm(x_BTD))


def test_ties_go_to_the_earlier_token_and_what_is_kept_stays_in_order():
    assert topk(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]), 2, None, None)[0].tolist() == [[1, 2]]
    column_BM, real_BM = compact(torch.tensor([[False, True, False, True], [False, False, False, True]]))
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
            e_BTD, _, who = model.start(ids_BT, NoCache())
            y_BTD = e_BTD
            for _ in range(depth):
                for block in model.recursion.core:
                    y_BTD = block(y_BTD)
            h_BTD, got = model.recursion(e_BTD, e_BTD, who, 3, Silence(), NoCache())
        assert_close(h_BTD, e_BTD + 0.6 * y_BTD)
        assert (torch.as_tensor(got.depth) == depth).all()


@pytest.mark.parametrize("keys", [keys for keys in ROUTED if keys["block"] == "llama"], ids=name)
def test_every_parameter_learns_routers_included(keys):
    cfg = routed(keys)
    model = loud(cfg).train()
    for seed in range(2):
        out = model(some_ids(2, 16), some_ids(2, 16, seed=3), seed=(seed, seed))
        out.loss.backward()
    assert set(out.losses) == {"ce", "router"} and out.loss == sum(out.losses.values())
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_unique_parameters_of_a_routed_360m_model():
    assert replace(smollm("360M", "1+10x3+1"), router="expert").n_params(embeddings=False) == 117_991_680


@pytest.mark.parametrize("plan, kv, mflop", [("1+15x2+1", "own", 623.49), ("1+10x3+1", "own", 555.63), ("1+8x4+1", "own", 553.45), ("1+10x3+1", "share", 536.25)])
def test_flops_equal_the_table_of_the_mor_paper(plan, kv, mflop):
    assert round(replace(smollm("360M", plan), router="expert", kv=kv).flops_per_token(2048, "paper") / 1e6, 2) == mflop


@pytest.mark.slow
@pytest.mark.parametrize("keys", [keys for keys in ROUTED + SHARED if keys["router"] != "token"], ids=name)
def test_exact_flops_are_those_of_a_real_forward_at_its_capacities(keys):
    cfg, T = routed(keys), 12
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        depth_BT = loud(cfg)(some_ids(2, T), routing="topk").depth_BT
    share = [float((depth_BT > step).double().mean()) for step in range(3)]
    square = sum(s * 2 * 4 * 16 * (T if cfg.kv == "share" else s * T) for s in share) + 2 * 4 * 16 * T             # what ran; half of it counts
    assert counter.get_total_flops() == pytest.approx(2 * T * (cfg.flops_per_token(T) + square / 2), rel=1e-9)


def test_a_routed_model_goes_no_deeper_than_it_has_routers():
    with pytest.raises(ValueError, match="every step of a routed model has a router of its own"):
        loud(routed(dict(router="expert")))(some_ids(1, 4), depth=4)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(router="expert"), dict(router="expert", kv="share", update="inject"), dict(router="token")], ids=name)
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
    assert parts["loss"]["train"]["agrees"] and [p["depth"] for p in parts["depth"]["points"]] == ([4] if keys["router"] == "token" else [0, 1, 2, 3, 4])
    sample.main(["--max_new_tokens=5"])
    assert "more than n_recur=4" in refusal(sample.main, ["--recursions=9"])
    assert "sends tokens to different steps" in refusal(sample.main, ["--cache=mean"])
