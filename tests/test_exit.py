"""Early exit: who leaves the loop, what the others see of it, and what it saves.

    python -m pytest -q tests/test_exit.py
"""
import copy
import math
import pickle
from dataclasses import replace

import pytest
import spec
import torch
import torch.nn.functional as F
from tiny import all_pairs, layout, loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, make_cache, no_cache, stream

NORMS = {"plain": {}, "sandwich": dict(sandwich_norm=True), "loop": dict(loop_norm=True)}
UPDATES = ["replace", "inject", "gate", "random inject", "random gate"]            # random: the first state
EXITS = [(None, None), ("kl", 0.15), ("kl", 0.5), ("cdf", 0.6), ("cdf", 0.9)]


def config_of(case):
    loss = "every" if case["exit"][0] == "cdf" else "last"
    return tiny(**layout(case["layout"]), **NORMS[case["norms"]], loss=loss, bias=case["block"] == "gpt2", n_kv_head=2, router_alpha=0.7 if case["router"] == "expert" else None,
                update=case["update"].split()[-1], state_init="random" if " " in case["update"] else "anchor", **{name: case[name] for name in ("block", "lora_rank", "kv", "router")})


def legal(case):
    routed = case["router"] != "none"
    return not (routed and (case["norms"] == "loop" or case["exit"][0] == "cdf") or case["depth"] == 5 and (routed or case["lora_rank"]))


# Few models in which every two choices meet.
GRID = all_pairs({
    "layout": ["0+2x4+0", "1+2x3+1", "1+1x4+2"], "block": ["gpt2", "llama"], "update": UPDATES, "lora_rank": [0, 2], "norms": list(NORMS), "kv": ["own", "share", "share_k", "share_v"],
    "router": ["none", "expert"], "exit": EXITS, "depth": [2, None, 5]}, legal)


def case_name(case):
    return "-".join(str(value) for value in case.values())


def model_of(cfg, seed=0):
    return loud(cfg, seed).double()


def in_slow_motion(model, depth=None, exit=(None, None)):
    first = getattr(model.recursion.first_state, "still", None)
    return spec.Sequence(model.cfg, model.state_dict(), depth, first_state=lambda position: first[position], exit=exit[0], exit_threshold=exit[1])


def assert_close(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)                          # rotary tables are float32


def in_pieces(model, ids_BT, n_B, depth, exit, threshold, how="full"):
    """Logits (B, T, V) and steps (B, T) of rows whose first n tokens are a prompt, fed at once with padding behind the shorter, the others one by one."""
    cache, padded_BT = make_cache(model, len(ids_BT), ids_BT.size(1), depth, exit), torch.zeros(len(ids_BT), max(n_B), dtype=torch.long)
    for row, n in enumerate(n_B):
        padded_BT[row, :n] = ids_BT[row, :n]
    feed = lambda *args: model.feed(*args, exit=exit, exit_threshold=threshold)
    logits = feed(padded_BT, cache, depth, n_B, True)
    rows, taken = [list(logits[row, :n]) for row, n in enumerate(n_B)], [cache.taken_BT[row, :n].tolist() for row, n in enumerate(n_B)]
    cache = cache.compress(how)
    while max(map(len, rows)) < ids_BT.size(1):
        new_B1V = feed(torch.stack([ids_BT[row, len(known)][None] for row, known in enumerate(rows)]), cache, depth)
        for row, known in enumerate(rows):
            known.append(new_B1V[row, 0])
            taken[row] += cache.taken_BT[row].tolist()
    return [torch.stack(row) for row in rows], taken


# Models (keys, seed, rule, threshold) whose tokens leave after 1 to 4 of 4 steps.
LEAVERS = {"kl": (dict(update="gate", n_kv_head=2), 0, "kl", 0.3),
           "cdf": (dict(block="llama", n_kv_head=2, lora_rank=2, loss="every"), 1, "cdf", 0.7)}


def leavers(name, **more):
    """(model, {exit: ..., exit_threshold: ...})"""
    keys, seed, exit, threshold = LEAVERS[name]
    return model_of(tiny(**layout("1+2x4+1"), **keys, **more), seed), dict(exit=exit, exit_threshold=threshold)


# ------------------------------------------------------------------------------------------------ three ways, one answer


@pytest.mark.parametrize("case", GRID, ids=case_name)
def test_exit_in_a_full_forward_and_over_the_cache_equals_the_specification(case):
    model, ids_BT, depth, exit = model_of(config_of(case)), some_ids(2, 9), case["depth"], case["exit"]
    with torch.no_grad():
        out = model(ids_BT, depth=depth, exit=exit[0], exit_threshold=exit[1])
    rows, taken = in_pieces(model, ids_BT, [2, 4], depth, *exit)
    for row, ids_T in enumerate(ids_BT.tolist()):
        sequence = in_slow_motion(model, depth, exit)
        for t, id in enumerate(ids_T):
            assert_close(out.logits[row, t], sequence.token(id))
            assert out.depth_BT[row, t] == sequence.taken
        assert_close(rows[row], out.logits[row, : len(rows[row])])
        assert taken[row] == sequence.all_taken[: len(taken[row])]


def test_in_most_of_these_cases_tokens_exit_at_different_steps():
    cases = [case for case in GRID if case["exit"][0] and case["depth"] != 2]
    steps = [model_of(config_of(case))(some_ids(2, 9), depth=case["depth"], exit=case["exit"][0], exit_threshold=case["exit"][1]).depth_BT for case in cases]
    assert sum(len(depth_BT.unique()) > 1 for depth_BT in steps) > 0.7 * len(cases)


@pytest.mark.parametrize("how", ["first", "last", "mean"])
@pytest.mark.parametrize("name", LEAVERS)
def test_a_compressed_cache_with_exit_folds_the_steps_that_a_token_took(name, how):
    (model, exit), ids_BT, n_B = leavers(name), some_ids(2, 10), [5, 3]
    rows, taken = in_pieces(model, ids_BT, n_B, None, *exit.values(), how)
    for row, n in enumerate(n_B):
        sequence = in_slow_motion(model, None, tuple(exit.values()))
        for t in range(len(rows[row])):
            if t == n:
                sequence.compress(how)
            assert_close(rows[row][t], sequence.token(int(ids_BT[row, t])))
        assert taken[row] == sequence.all_taken
    parts = ([step for row, n in zip(taken, n_B) for step in row[part(n)]] for part in (lambda n: slice(n), lambda n: slice(n, None)))
    assert all(len(set(steps)) > 1 for steps in parts)                              # in the prompts, and after


@pytest.mark.parametrize("name", LEAVERS)
def test_who_left_by_exit_stands_in_later_steps_as_it_was_at_its_last(name):
    """In the full forward as over the cache; the specification says the same above."""
    (model, exit), ids_BT = leavers(name), some_ids(2, 10)
    with torch.no_grad():
        out = model(ids_BT, **exit)
    rows, taken = in_pieces(model, ids_BT, [5, 3], None, *exit.values())
    for row, logits_TV in enumerate(rows):
        assert_close(logits_TV, out.logits[row, : len(logits_TV)])
        assert taken[row] == out.depth_BT[row, : len(logits_TV)].tolist()
    assert len(out.depth_BT.unique()) > 2


# ------------------------------------------------------------------------------------------------------------ who leaves


def by_depth(model, ids_BT):
    """Of every depth from 1: (logits (B, T, V), exit gate's logits (B, T) where there is a gate), in float64."""
    seen, found = [], {}
    model.norm.register_forward_hook(lambda module, args, x: seen.append(x))
    with torch.no_grad():
        for depth in range(1, model.cfg.n_recur + 1):
            found[depth] = model(ids_BT, depth=depth).logits, model.exit_gate(seen[-1]) if model.cfg.loss == "every" else None
    return found


def first_step(leaves, R):
    """The first step after which it leaves, R if none."""
    return next((step for step in range(1, R + 1) if leaves(step)), R)


@pytest.mark.parametrize("threshold", [0.05, 0.07, 0.1])
def test_exit_by_kl_compares_the_predictions_of_a_step_and_of_the_one_before(threshold):
    model, ids_BT = model_of(tiny(**layout("1+2x5+1"), update="gate")), some_ids(40, 1)                 # alone, a token sees nobody leave
    log_p = {depth: logits.log_softmax(-1)[:, 0] for depth, (logits, _) in by_depth(model, ids_BT).items()}
    kl = {t: F.kl_div(log_p[t - 1], log_p[t], log_target=True, reduction="none").sum(-1) for t in range(2, 6)}         # of p_t from p_{t-1}
    expected = [first_step(lambda t: t > 1 and kl[t][row] < threshold, 5) for row in range(40)]
    out = model(ids_BT, exit="kl", exit_threshold=threshold)
    assert out.depth_BT[:, 0].tolist() == expected and len(set(expected)) > 2
    assert_close(out.logits[:, 0].log_softmax(-1), torch.stack([log_p[step][row] for row, step in enumerate(expected)]))


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.9])
def test_exit_by_cdf_adds_up_the_exit_gates_chances(threshold):
    model, ids_BT = model_of(tiny(**layout("1+2x5+1"), update="gate", loss="every")), some_ids(40, 1)
    chance = {depth: z.sigmoid()[:, 0] for depth, (_, z) in by_depth(model, ids_BT).items()}
    cdf = lambda row, step: 1 - math.prod(1 - float(chance[t][row]) for t in range(1, step + 1))
    expected = [first_step(lambda t: cdf(row, t) >= threshold, 5) for row in range(40)]
    assert model(ids_BT, exit="cdf", exit_threshold=threshold).depth_BT[:, 0].tolist() == expected and len(set(expected)) > 2


@pytest.mark.parametrize("exit, never, at_once, first", [("kl", 0.0, 1e9, 2), ("cdf", 1.0, 0.0, 1)])
def test_an_exit_threshold_at_its_end_lets_nobody_go_or_everybody_at_once(exit, never, at_once, first):
    model, ids_BT = model_of(tiny(**layout("1+2x4+1"), update="gate", loss="every" if exit == "cdf" else "last")), some_ids(3, 9)
    for depth in (None, 1, 3, 6):
        out, plain = model(ids_BT, depth=depth, exit=exit, exit_threshold=never), model(ids_BT, depth=depth)
        assert (out.depth_BT == plain.depth_BT).all()
        assert_close(out.logits, plain.logits)
        out, plain = model(ids_BT, depth=depth, exit=exit, exit_threshold=at_once), model(ids_BT, depth=min(first, depth or 4))
        assert (out.depth_BT == plain.depth_BT).all()
        assert_close(out.logits, plain.logits)
    assert_close(model(ids_BT, depth=0, exit=exit).logits, model(ids_BT, depth=0).logits)


def test_an_exit_threshold_of_zero_keeps_even_a_state_at_rest():
    torch.manual_seed(0)
    model = GPT(tiny(**layout("1+2x4+1"), update="gate", gate_bias=9.0)).eval()     # float32: here a KL may come out below zero
    assert (model(some_ids(4, 30), exit="kl", exit_threshold=0.0).depth_BT == 4).all()


def test_without_a_threshold_an_exit_rule_has_its_own():
    model, ids_BT = model_of(tiny(**layout("1+2x4+1"), update="gate", loss="every")), some_ids(3, 9)
    for exit, threshold in (("kl", 5e-4), ("cdf", 0.5)):
        assert torch.equal(model(ids_BT, exit=exit).logits, model(ids_BT, exit=exit, exit_threshold=threshold).logits)


@pytest.mark.parametrize("exit, thresholds", [("kl", [0.0, 0.02, 0.05, 0.1, 0.3, 1.0]), ("cdf", [1.0, 0.99, 0.9, 0.6, 0.3, 0.0])])
def test_a_looser_exit_threshold_never_costs_a_token_a_step(exit, thresholds):
    model, ids_BT = model_of(tiny(**layout("1+2x5+1"), update="gate", loss="every" if exit == "cdf" else "last")), some_ids(40, 1)
    steps = [model(ids_BT, exit=exit, exit_threshold=threshold).depth_BT[:, 0] for threshold in thresholds]
    assert all((later <= before).all() for before, later in zip(steps, steps[1:])) and len({float(x.double().mean()) for x in steps}) == len(steps)


@pytest.mark.parametrize("name", LEAVERS)
def test_with_exit_the_answer_of_a_row_does_not_depend_on_its_batch(name):
    (model, exit), ids_BT = leavers(name), some_ids(5, 8)
    together, written = model(ids_BT, **exit), model.generate(ids_BT, 6, temperature=0, **exit)
    for row in range(5):
        alone = model(ids_BT[row, None], **exit)
        assert_close(alone.logits[0], together.logits[row])
        assert torch.equal(alone.depth_BT[0], together.depth_BT[row])
        assert torch.equal(model.generate(ids_BT[row, None], 6, temperature=0, **exit)[0], written[row])


def test_with_exit_a_token_changes_nothing_before_it():
    for name in LEAVERS:
        (model, exit), ids_BT = leavers(name), some_ids(3, 12)
        changed_BT = ids_BT.clone()
        changed_BT[:, 8:] = some_ids(3, 4, seed=9)
        a, b = model(ids_BT, **exit), model(changed_BT, **exit)
        assert torch.equal(a.depth_BT[:, :8], b.depth_BT[:, :8]) and not torch.equal(a.logits[:, 8:], b.logits[:, 8:])
        assert_close(a.logits[:, :8], b.logits[:, :8])


def test_a_routed_token_takes_no_step_after_its_exit():
    model, ids_BT = model_of(tiny(**layout("1+2x4+1"), router="expert", router_alpha=0.7)), some_ids(4, 16)
    routed, both = model(ids_BT).depth_BT, model(ids_BT, exit="kl", exit_threshold=0.05).depth_BT
    assert (both[:, 0] <= routed[:, 0]).all() and both.double().mean() < routed.double().mean() and len(both.unique()) > 2


# ------------------------------------------------------------------------------------------------------------ what it saves


def tokens_through(model, block):
    """A list that grows by how many tokens the block takes at each call."""
    seen = []
    block.register_forward_hook(lambda module, args, x: seen.append(x.size(0) * x.size(1)))
    return seen


@pytest.mark.parametrize("name", LEAVERS)
def test_a_token_that_left_by_exit_is_computed_no_more(name):
    (model, exit), ids_BT = leavers(name), some_ids(1, 24)                          # one row: nothing is padded
    core, coda = tokens_through(model, model.recursion.core[1]), tokens_through(model, model.coda[0])
    depth_BT = model(ids_BT, **exit).depth_BT
    assert core == coda == [n for n in ((depth_BT > step).sum().item() for step in range(4)) if n] and len(set(core)) > 1
    ids_BT = some_ids(6, 10)
    depth_BT, cache = model(ids_BT, **exit).depth_BT, make_cache(model, 6, 10, None, exit["exit"])
    model.feed(ids_BT[:, :9], cache, **exit)
    core.clear(), coda.clear()
    model.feed(ids_BT[:, 9:], cache, **exit)                                        # six rows of one token: who left is in no row
    assert core == coda == [n for n in ((depth_BT[:, 9] > step).sum().item() for step in range(4)) if n] and len(set(core)) > 1


@pytest.mark.parametrize("keys", [dict(update="gate"), dict(update="inject", block="llama", n_kv_head=2), dict(lora_rank=2, n_coda=0), dict(kv="share")], ids=str)
@pytest.mark.parametrize("exit, threshold, depth", [("kl", 0.0, 4), ("kl", 1e9, 2), ("cdf", 1.0, 4), ("cdf", 0.0, 1)])
def test_exit_flops_are_the_flops_of_a_real_forward(keys, exit, threshold, depth):
    cfg, T = tiny(**{**layout("1+2x4+2"), **keys}, loss="every" if exit == "cdf" else "last"), 12
    model = loud(cfg).requires_grad_(False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        assert (model(some_ids(2, T), exit=exit, exit_threshold=threshold).depth_BT == depth).all()
    attentions = cfg.n_prelude + depth * (cfg.n_core + cfg.n_coda)
    full_attention = attentions * 4 * cfg.n_embd * T                                # what ran, per token: the whole square
    exact = cfg.flops_per_token(T, depth=depth, exit=exit)                          # counts half of it, the causal triangle
    gates = depth * 2 * cfg.n_embd if exit == "cdf" else 0                          # a product and a sum, which the counter does not know
    assert counter.get_total_flops() == 2 * T * (exact + full_attention / 2 - gates)


@pytest.mark.parametrize("kv", ["own", "share", "share_k"])
@pytest.mark.parametrize("router", ["none", "expert"])
def test_exit_kv_bytes_are_those_of_the_cache_to_the_byte(kv, router):
    cfg = tiny(**layout("1+2x3+2"), n_kv_head=2, kv=kv, router=router)
    for depth in (None, 0, 1, 3) + ((5,) if router == "none" else ()):
        cache = make_cache(GPT(cfg), 3, 10, depth, "kl")
        assert cfg.kv_bytes(10, 3, torch.float32, depth=depth, exit="kl") == cache.nbytes()
        for how in ("first", "last", "mean") if cfg.compressible else ():
            assert cfg.kv_bytes(10, 3, torch.float32, how, depth, "kl") == make_cache(GPT(cfg), 3, 10, depth, "kl").compress(how).nbytes()


# ------------------------------------------------------------------------------------------------------------- how it is used


@pytest.mark.parametrize("name", LEAVERS)
def test_generating_with_exit_equals_reading_the_whole_context_again_even_past_the_context(name):
    model, exit = leavers(name, block_size=12)
    prompts = [some_ids(7), some_ids(3, seed=2), some_ids(11, seed=3)]
    cached, whole = (model.generate(prompts, 16, temperature=0, use_cache=use_cache, **exit) for use_cache in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(cached, whole)) and [len(row) for row in cached] == [23, 19, 27]
    assert not all(torch.equal(a, b) for a, b in zip(cached, model.generate(prompts, 16, temperature=0)))


def test_taken_is_the_exit_of_every_token_that_was_read():
    (model, exit), prompts, taken = leavers("kl"), [some_ids(5).tolist(), some_ids(3, seed=2).tolist()], [[], []]
    drawn = list(stream(model, prompts, 8, temperature=0, taken=taken, **exit))
    for row, prompt in enumerate(prompts):
        text = prompt + [next_B[row] for next_B in drawn][:-1]
        assert taken[row] == model(torch.tensor([text]), **exit).depth_BT[0].tolist() and len(set(taken[row])) > 1


def test_exit_with_targets_is_the_cross_entropy_of_what_each_token_left_with():
    (model, exit), ids_BT, targets_BT = leavers("kl"), some_ids(2, 9), some_ids(2, 9, seed=2)
    out = model(ids_BT, targets_BT, **exit)
    assert torch.equal(out.logits, model(ids_BT, **exit).logits)
    for row, steps in enumerate(out.depth_BT[:, 0].tolist()):                       # the first token sees nobody leave
        assert steps < 4
        assert_close(out.logits[row, 0], model(ids_BT[row, :1][None], depth=steps).logits[0, 0])
    assert out.loss.item() == pytest.approx(F.cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten()).item(), abs=1e-12)
    fused = GPT(replace(model.cfg, fused_loss=True)).double().eval()
    fused.load_state_dict(model.state_dict())
    assert fused(ids_BT, targets_BT, **exit).loss.item() == pytest.approx(out.loss.item(), abs=1e-12)


GRT = dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate")


@pytest.mark.parametrize("keys, options, words", [
    (GRT, dict(exit="often"), "exit='often' is not one of None, 'kl', 'cdf'"),
    (GRT, dict(exit_threshold=0.5), "exit_threshold=0.5 belongs to an exit rule; give exit='kl' or 'cdf' too"),
    (GRT, dict(exit="cdf"), "it has no exit gate, which loss='every' trains"),
    (dict(n_core=2), dict(exit="kl"), "it has one step"),
    (dict(n_core=2, n_recur=2, sharing="sequence"), dict(exit="kl"), "sharing='sequence' always runs all steps"),
    (dict(n_core=2, n_recur=2, router="token"), dict(exit="kl"), "router='token' has given every token its depth"),
    (dict(n_core=2, n_recur=2, router="expert", capacity=[0.8, 0.5]), dict(exit="kl"), "not all tokens take step 0"),
    (GRT, dict(exit="kl", exit_threshold=-0.1), "exit_threshold=-0.1 is out of range; kl takes 0 or more"),
    (dict(GRT, loss="every"), dict(exit="cdf", exit_threshold=1.5), "exit_threshold=1.5 is out of range; cdf takes 0 to 1")])
def test_an_exit_that_cannot_be_is_refused_with_a_sentence(keys, options, words):
    model, ids_BT = GPT(tiny(**keys)).eval(), some_ids(1, 4)
    calls = (lambda: model(ids_BT, **options), lambda: model.generate(ids_BT, 2, **options), lambda: model.generate(ids_BT, 2, use_cache=False, **options))
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        assert words in str(error.value)


def test_exit_does_not_go_with_topk_which_would_call_back_who_left():
    model = GPT(tiny(**layout("1+2x3+1"), router="expert")).eval()
    with pytest.raises(ValueError, match="exit='kl' does not go with routing='topk'"):
        model(some_ids(1, 4), routing="topk", exit="kl")


def test_exit_is_not_for_training_and_a_cache_is_made_for_it():
    model, ids_BT = GPT(tiny(**GRT)), some_ids(1, 4)
    with pytest.raises(ValueError, match="exit is for evaluation and decoding"):
        model.train()(ids_BT, exit="kl")
    for made, asked in (("kl", None), (None, "kl")):
        for cache in (make_cache(model.eval(), 1, 4, None, made), no_cache(model.cfg, made)):
            with pytest.raises(ValueError, match=f"the cache was made {'for' if made else 'without'} early exit; make another one"):
                model.feed(ids_BT, cache, exit=asked)


def test_a_cache_for_exit_can_be_copied():
    (model, exit), ids_BT = leavers("kl"), some_ids(2, 8)
    cache = make_cache(model, 2, 8, None, "kl")
    model.feed(ids_BT[:, :7], cache, **exit)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    logits, *others = (model.feed(ids_BT[:, 7:], c, **exit) for c in (cache, *copies))
    assert all(torch.equal(logits, other) for other in others)


def test_at_depth_0_there_is_no_exit_score_to_count():
    cfg = tiny(**layout("1+2x4+2"), loss="every")
    for exit in ("kl", "cdf"):
        assert cfg.flops_per_token(16, depth=0, exit=exit) == cfg.flops_per_token(16, depth=0)
        assert cfg.kv_io(16, depth=0, exit=exit) == cfg.kv_io(16, depth=0) == 16 * 3 and cfg.kv_io(16, exit=exit) == cfg.kv_io(16) + 16 * 3 * 2
    with pytest.raises(ValueError, match="exit='sometimes' is not one of None, kl, cdf"):
        cfg.flops_per_token(16, exit="sometimes")
