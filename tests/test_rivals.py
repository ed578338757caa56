"""The rivals: heavy-tail Poisson (random first state, sampled depth, truncated backward), RRT's low-rank additions, Ouro's loss at
every step.

    python -m pytest -q tests/test_rivals.py
"""
import copy
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import spec
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_model import LargestTensor
from tiny import layout, loud, some_ids, tiny
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toy import flags, make_config, make_data

import bench
import model as model_py
import train
from model import DEPTHS, GPT, Noise, chunked, fold_in, generator, log_exits, make_cache, param_groups

LAYOUT = dict(n_prelude=1, n_core=2, n_recur=4, n_coda=1)
POISSON = dict(LAYOUT, update="inject", state_init="random", depth_sampling="poisson", bptt=2)
RRT = dict(LAYOUT, lora_rank=3)
OURO = dict(LAYOUT, loss="every")


def gradients(model, loss):
    """By name; None where the loss does not reach."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(grads, expected, **tolerance):
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert (grad is None) == (expected[name] is None), name
        if grad is not None:
            torch.testing.assert_close(grad, expected[name], **tolerance or dict(atol=1e-12, rtol=1e-9))


@pytest.mark.parametrize("wrong, words", [
    (dict(POISSON, update="replace"), "state_init='random' does not go with update='replace' (nothing else brings the text to the loop)"),
    (dict(LAYOUT, state_init="random", update="inject", router="token"), "state_init='random' does not go with router='token'"),
    (dict(LAYOUT, depth_sampling="poisson", router="expert"), "depth_sampling='poisson' does not go with router='expert'"),
    (dict(RRT, depth_sampling="poisson"), "depth_sampling='poisson' does not go with lora_rank=3"),
    (dict(depth_sampling="poisson"), "adds n_recur - 1 = 0 steps to one; give a larger n_recur, or poisson_mean"),
    (dict(POISSON, poisson_mean=0.0), "poisson_mean=0.0 must be positive"),
    (dict(POISSON, bptt=0), "bptt=0 is too small"),
    (dict(LAYOUT, bptt=2), "bptt=2 does not go with update='replace' (the prelude learns through the anchor alone)"),
    (dict(RRT, update="inject", bptt=2), "bptt=2 does not go with lora_rank=3"),
    (dict(OURO, update="inject", bptt=2), "bptt=2 does not go with loss='every' (every step is supervised)"),
    (dict(LAYOUT, update="gate", kv="share_v", bptt=2), "bptt=2 does not go with kv='share_v' (what is made at step 0 and kept would not learn)"),
    (dict(OURO, router="expert"), "loss='every' does not go with router='expert'"),
    (dict(OURO, sharing="middle_sequence"), "loss='every' does not go with sharing='middle_sequence'"),
    (dict(LAYOUT, loop_norm=True, router="expert"), "loop_norm=True does not go with router='expert'"),
    (dict(OURO, exit_entropy=-0.1), "exit_entropy=-0.1 is out of range")])
def test_a_poisson_lora_or_ouro_setting_that_cannot_be_is_refused_with_a_sentence(wrong, words):
    with pytest.raises(ValueError) as error:
        tiny(**wrong)
    assert words in str(error.value)


@pytest.mark.parametrize("keys", [POISSON, RRT, OURO, dict(OURO, sandwich_norm=True, loop_norm=True)], ids=["poisson", "lora", "ouro", "ouro with all norms"])
@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_every_parameter_of_poisson_lora_and_ouro_learns(keys, block):
    torch.manual_seed(0)
    model = GPT(tiny(**keys, block=block)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):                                                           # B of a low-rank pair starts at 0, so A learns a step later
        grads = gradients(model, model(some_ids(2, 16, seed=step), some_ids(2, 16, seed=step + 2), seed=(step, step)).loss)
        optimizer.step()
    assert all(grad is not None and grad.abs().max() > 1e-12 for grad in grads.values())


# ------------------------------------------------------------------------------------------------------- poisson: the depth


def draws(cfg, n):
    rng = generator(0)
    return [DEPTHS[cfg.depth_sampling](cfg, rng) for _ in range(n)]


@pytest.mark.parametrize("rbar", [3, 9.0])
def test_poisson_depths_are_on_average_one_more_than_rbar_with_a_heavy_tail(rbar):
    cfg, n = tiny(**{**POISSON, "poisson_mean": rbar}), 20_000
    depths = draws(cfg, n)
    variance = rbar + rbar**2 * (math.exp(0.5**2) - 1)                               # of a Poisson whose rate is log-normal
    mean = sum(depths) / n
    assert mean == pytest.approx(rbar + 1, abs=4 * math.sqrt(variance / n)) and min(depths) == 1 and cfg.mean_depth == rbar + 1
    assert sum((depth - mean) ** 2 for depth in depths) / n == pytest.approx(variance, rel=0.1)
    tail = sum(depth - 1 > 2 * rbar for depth in depths) / n
    thin = 1 - sum(math.exp(-rbar) * rbar**k / math.factorial(k) for k in range(int(2 * rbar) + 1))
    assert tail > 2 * thin


def test_poisson_depths_have_the_distribution_of_their_formula():
    """P(k + 1) is the mean of Poisson(k; e^tau) over tau ~ N(ln rbar - 1/8, 1/2), here in 4,000 slices."""
    n, rbar = 20_000, 4.0
    share = {depth: count / n for depth, count in Counter(draws(tiny(**{**POISSON, "poisson_mean": rbar}), n)).items()}
    taus = [math.log(rbar) - 0.125 + 0.5 * z / 500 for z in range(-2000, 2001)]
    weight = [math.exp(-((z / 500) ** 2) / 2) for z in range(-2000, 2001)]
    for k in range(12):
        p = sum(w * math.exp(-math.exp(tau) + k * tau) for w, tau in zip(weight, taus)) / math.factorial(k) / sum(weight)
        assert share.get(k + 1, 0) == pytest.approx(p, abs=4 * math.sqrt(p / n)), f"depth {k + 1}"


def test_without_a_mean_poisson_training_is_as_deep_as_evaluation_on_average():
    assert tiny(**POISSON).mean_depth == 4 and tiny(**{**POISSON, "n_recur": 9}).poisson_rate == 8
    assert tiny(**POISSON).trained_depths == (1, math.inf)
    assert tiny(**OURO, depth_sampling="uniform", min_depth=2).trained_depths == (1, OURO["n_recur"])        # every step is supervised


def test_two_ranks_draw_the_same_poisson_depth_and_first_states_of_their_own():
    ranks, ids_BT = [loud(tiny(**POISSON)).train() for _ in range(2)], some_ids(2, 5)
    depths = set()
    for shared in range(20):
        a, b = (model(ids_BT, seed=(shared, own)) for own, model in enumerate(ranks))
        assert torch.equal(a.depth_BT, b.depth_BT) and not torch.allclose(a.logits, b.logits)
        depths.add(int(a.depth_BT[0, 0]))
    assert len(depths) > 4 and max(depths) > 4                                      # deeper than n_recur, too
    assert torch.equal(ranks[0](ids_BT, seed=(3, 4)).logits, ranks[1](ids_BT, seed=(3, 4)).logits)


@pytest.fixture
def go(tmp_path, monkeypatch):
    """go(**flags) -> the records of the training steps of a run."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path)
    make_config(tmp_path, update="inject", state_init="random", depth_sampling="poisson", bptt=2)

    def go(**changes):
        train.main(["toy.py", *flags(**changes)])
        records = map(json.loads, (Path(changes["out_dir"]) / "log.jsonl").read_text("utf-8").splitlines())
        return [record for record in records if record["event"] == "step"]
    return go


def test_a_poisson_run_that_was_cut_draws_the_depths_of_one_that_was_not(go):
    whole = go(max_iters=8, lr_decay_iters=8, out_dir="out/whole")
    go(max_iters=3, lr_decay_iters=8, out_dir="out/cut")
    cut = go(max_iters=8, out_dir="out/cut", init_from="resume")
    assert [r["depth"] for r in cut] == [r["depth"] for r in whole] and len({r["depth"] for r in whole}) > 2
    assert [r["loss"] for r in cut] == [r["loss"] for r in whole]


# ----------------------------------------------------------------------------------------------- poisson: truncated backward


def test_bptt_of_as_many_steps_as_there_are_is_the_whole_gradient_and_fewer_give_the_same_loss():
    ids_BT, targets_BT, found = some_ids(2, 8), some_ids(2, 8, seed=2), {}
    for bptt in (None, 7, 5, 4, 2, 1):
        model = loud(tiny(**{**POISSON, "bptt": bptt})).double().train()
        loss = model(ids_BT, targets_BT, seed=(1, 2), depth=5).loss
        found[bptt] = loss.item(), gradients(model, loss)
    assert len({loss for loss, _ in found.values()}) == 1
    assert_same(found[7][1], found[None][1], atol=0, rtol=0)
    assert_same(found[5][1], found[None][1], atol=0, rtol=0)
    whole = found[None][1]["recursion.core.0.mlp.up.weight"]
    for bptt in (4, 2, 1):
        assert not torch.allclose(found[bptt][1]["recursion.core.0.mlp.up.weight"], whole, rtol=0.01)
        assert found[bptt][1]["prelude.0.mlp.up.weight"].any()                      # through the anchor of the last steps


class From(nn.Module):
    """A first state that is given."""

    def __init__(self, h_BTD):
        super().__init__()
        self.h_BTD = h_BTD

    def forward(self, e_BTD, position_BT, noise):
        return self.h_BTD


def test_bptt_of_one_step_is_the_gradient_of_a_one_step_model_from_where_the_others_came():
    model, ids_BT, seen = loud(tiny(**{**POISSON, "bptt": 1})).double().train(), some_ids(2, 8), []
    grads = gradients(model, model(ids_BT, ids_BT, seed=(1, 2), depth=4).loss)
    hook = model.recursion.register_forward_hook(lambda module, args, out: seen.append(out[0].detach()))
    model(ids_BT, seed=(1, 2), depth=3)
    hook.remove()
    one = copy.deepcopy(model)
    one.recursion.first_state = From(seen[0])
    assert_same(grads, gradients(one, one(ids_BT, ids_BT, seed=(1, 2), depth=1).loss))


def test_before_bptts_steps_nothing_is_kept_for_backward():
    def saved(bptt, depth):
        model, kept = loud(tiny(**{**POISSON, "bptt": bptt})).train(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            model(some_ids(2, 8), some_ids(2, 8), seed=(1, 2), depth=depth)
        return sum(kept)

    assert saved(2, 2) == saved(2, 3) == saved(2, 9) < saved(3, 9) < saved(None, 9)
    with torch.no_grad():
        assert saved(2, 9) == saved(None, 9) == 0


def test_under_autocast_bptt_reaches_every_weight():
    """A weight that was cast in a step without gradients must not be the one that the last steps use."""
    model, ids_BT = loud(tiny(**POISSON)).train(), some_ids(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids_BT, ids_BT, seed=(1, 2), depth=5).loss
    for (name, grad), exact in zip(gradients(model, loss).items(), gradients(model, model(ids_BT, ids_BT, seed=(1, 2), depth=5).loss).values()):
        assert grad.norm().item() == pytest.approx(exact.norm().item(), rel=0.05), name


def test_bptt_with_recomputed_steps_gives_the_same_gradients():
    grads = []
    for lean in (False, True):
        model = loud(tiny(**POISSON, state_noise=0.3)).double().train()
        if lean:
            train.checkpoint_activations(model)
        grads.append(gradients(model, model(some_ids(2, 8), some_ids(2, 8, seed=2), seed=(1, 2), depth=5).loss))
    assert_same(*grads)


# ---------------------------------------------------------------------------------------------- poisson: random first state


@pytest.mark.parametrize("keys, std", [({}, 0.02 * 2**0.5), (dict(block="llama"), 0.02), (dict(state_std=(2 / 5) ** 0.5), (2 / 5) ** 0.5)], ids=str)
def test_a_random_first_state_of_poisson_is_normal_cut_at_three_sigma(keys, std):
    cfg = tiny(**POISSON, **keys, block_size=2000)
    model, zeros = GPT(cfg), torch.zeros(4, 500, 16)
    for x in (model.recursion.first_state.still, Noise(cfg, 5).on_first(zeros, cfg.first_std)):                 # of evaluation, of training
        assert 2.9 * std < x.abs().max() <= 3 * std and x.mean().abs() < 0.02 * std
        assert x.std() == pytest.approx(0.98658 * std, rel=0.02)                    # what cutting leaves of it
    embedded = model.positions.add(model.embed(some_ids(4, 500)), torch.arange(500)[None])
    assert cfg.state_std or embedded.std().item() == pytest.approx(std, rel=0.05)                       # as large as what the text begins with


def test_in_evaluation_a_random_first_state_of_poisson_is_a_function_of_seed_and_position_alone():
    model, ids_BT = loud(tiny(**POISSON)), some_ids(3, 8)
    together = model(ids_BT).logits
    torch.manual_seed(7)
    assert torch.equal(model(ids_BT, seed=(5, 6)).logits, together)
    for row in range(3):
        torch.testing.assert_close(model(ids_BT[row, None]).logits[0], together[row], atol=1e-5, rtol=1e-5)
    other = GPT(tiny(**POISSON, state_seed=1)).eval()
    other.load_state_dict(model.state_dict())
    assert (other(ids_BT).logits - together).abs().max() > 1e-3
    still = model.recursion.first_state.still
    assert not torch.allclose(still[0], still[1]) and torch.equal(still, GPT(tiny(**POISSON)).recursion.first_state.still)
    assert not any("first_state" in name for name in model.state_dict())


def test_in_training_a_random_first_state_of_poisson_is_the_calls_own():
    model, ids_BT = loud(tiny(**POISSON)).train(), some_ids(2, 8)
    a, b = (model(ids_BT, seed=(0, own), depth=2).logits for own in (1, 2))
    assert not torch.allclose(a, b) and torch.equal(a, model(ids_BT, seed=(9, 1), depth=2).logits)
    same_BT = ids_BT[:1].expand(2, -1)
    rows = model(same_BT, seed=(0, 1), depth=2).logits
    assert not torch.allclose(rows[0], rows[1])                                     # every row draws its own


def test_a_random_first_state_of_poisson_follows_the_position_while_decoding():
    model, ids_BT = loud(tiny(**POISSON)).double(), some_ids(2, 9)
    expected, cache = model(ids_BT).logits, make_cache(model, 2, 9)
    model.feed(ids_BT[:, :4], cache, None, [4, 2])
    for t in range(5):
        logits_B1V = model.feed(torch.stack([ids_BT[row, n + t: n + t + 1] for row, n in enumerate([4, 2])]), cache)
        for row, n in enumerate([4, 2]):
            torch.testing.assert_close(logits_B1V[row, 0], expected[row, n + t])


def test_a_poisson_model_made_on_meta_has_the_same_first_states():
    with torch.device("meta"):
        made = GPT(tiny(**POISSON))
    made.to_empty(device="cpu")
    made.init_weights()
    still = made.recursion.first_state.still
    assert still.any() and torch.equal(still, GPT(tiny(**POISSON)).recursion.first_state.still)


# --------------------------------------------------------------------------------------------- lora: additions of each step


def with_lora(rank=3, **keys):
    """(a plain model, one with the same weights and fresh low-rank additions)"""
    torch.manual_seed(0)
    plain, model = (GPT(tiny(**{**LAYOUT, **keys}, lora_rank=r)).double() for r in (0, rank))
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and missing and all(name.startswith("recursion.lora.") for name in missing)
    return plain, model


@pytest.mark.parametrize("keys", [dict(bias=True), dict(block="llama", n_kv_head=2), dict(update="gate"), dict(router="expert")], ids=str)
def test_lora_at_the_start_changes_no_logit_and_no_gradient(keys):
    plain, model = with_lora(**keys)
    ids_BT = some_ids(2, 8)
    assert torch.equal(model.eval()(ids_BT).logits, plain.eval()(ids_BT).logits)
    expected, grads = (gradients(m, m.train()(ids_BT, ids_BT, seed=(1, 2)).loss) for m in (plain, model))
    assert_same({name: grads[name] for name in expected}, expected)
    for name, grad in grads.items():                                                # B is 0, so A has no pull yet
        if ".lora." in name:
            assert (".lora.up." in name) == bool(grad.any()), name


@pytest.mark.parametrize("keys", [dict(bias=True), dict(block="llama", n_kv_head=2)], ids=str)
def test_lora_equals_the_specification(keys):
    model, ids_T = loud(tiny(**RRT, **keys)).double(), some_ids(5)
    sequence = spec.Sequence(model.cfg, model.state_dict())
    for logits_V, id in zip(model(ids_T[None]).logits[0], ids_T.tolist()):
        torch.testing.assert_close(sequence.token(id), logits_V, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keys", [dict(), dict(block="llama", n_kv_head=2)], ids=str)
def test_after_a_step_every_lora_matrix_of_every_step_learns(keys):
    model, ids_BT = with_lora(**keys)[1].train(), some_ids(2, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients(model, model(ids_BT, ids_BT).loss)
    optimizer.step()
    for name, grad in gradients(model, model(ids_BT, ids_BT).loss).items():
        if ".lora." in name:
            assert all(of_step.any() for of_step in grad), name


def test_lora_starts_normal_and_at_zero():
    lora = GPT(tiny(**LAYOUT, lora_rank=8, n_embd=64)).recursion.lora
    for down, up in zip(lora.down, lora.up):
        assert down.keys() == up.keys() == {"qkv", "output", "up", "down"}
        assert all(A.std().item() == pytest.approx(0.02, rel=0.1) and not up[name].any() for name, A in down.items())


def test_lora_has_16_rank_n_embd_parameters_for_each_step_and_block():
    for rank in (1, 8):
        more = tiny(**LAYOUT, lora_rank=rank).n_params() - tiny(**LAYOUT).n_params()
        assert more == 4 * 2 * 16 * rank * 16                                       # steps, blocks, 16 rank D
    llama = dict(LAYOUT, block="llama", n_kv_head=2, n_ffn=40)                      # query, key and value: 16 -> 16 + 2 x 8; output; gate, up, down
    assert tiny(**llama, lora_rank=2).n_params() - tiny(**llama).n_params() == 4 * 2 * 2 * ((16 + 32) + (16 + 16) + 3 * (16 + 40))


def test_lora_does_not_decay():
    model = GPT(tiny(**RRT, bias=True))
    decay, rest = param_groups(model, 0.1)
    lora = {id(p) for p in model.recursion.lora.parameters()}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0) and lora
    assert lora <= {id(p) for p in rest["params"]} and not lora & {id(p) for p in decay["params"]}


@pytest.mark.parametrize("which", ["down", "up"])
@pytest.mark.parametrize("step", range(4))
def test_a_step_reads_its_own_lora_and_no_other(which, step):
    model, ids_BT = loud(tiny(**RRT)).double(), some_ids(2, 8)
    before = [model(ids_BT, depth=depth).logits for depth in range(5)]
    with torch.no_grad():
        getattr(model.recursion.lora, which)[1]["output"][step] += 0.5
    changed = [not torch.equal(model(ids_BT, depth=depth).logits, logits) for depth, logits in enumerate(before)]
    assert changed == [depth > step for depth in range(5)]


def test_lora_is_refused_beyond_the_steps_that_have_one():
    model = GPT(tiny(**RRT)).eval()
    for call in (lambda: model(some_ids(1, 4), depth=5), lambda: model.generate(some_ids(1, 4), 2, depth=5), lambda: make_cache(model, 1, 4, 5)):
        with pytest.raises(ValueError, match="depth=5 is more than n_recur=4, and every step of this model has low-rank additions of its own"):
            call()


@pytest.mark.parametrize("keys", [dict(), dict(block="llama", n_kv_head=2)], ids=str)
def test_a_vector_of_steps_gives_every_row_the_lora_of_its_own(keys):
    model = loud(tiny(**RRT, **keys)).double()
    x_BTD, lora, block = torch.randn(3, 5, 16).double(), model.recursion.lora, model.recursion.core[1]
    cos, sin = model.positions.tables(torch.arange(5)[None])
    together = block(x_BTD, cos, sin, None, lora.at(torch.tensor([[0], [2], [1]]), 1))
    for row, step in enumerate([0, 2, 1]):
        torch.testing.assert_close(together[row], block(x_BTD[row, None], cos, sin, None, lora.at(step, 1))[0])
    assert not torch.allclose(together[0], block(x_BTD[:1], cos, sin, None, lora.at(1, 1))[0])


def counted_flops(model, *args, **options):
    """Of a forward pass, matrix products alone."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model.requires_grad_(False)(*args, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("keys", [dict(), dict(update="gate"), dict(block="llama", n_kv_head=2), dict(kv="share"), dict(kv="share_k"), dict(kv="share_v", n_kv_head=1)], ids=str)
def test_lora_flops_are_those_of_a_real_forward(keys):
    cfg, plain = (tiny(**LAYOUT, **keys, lora_rank=rank) for rank in (3, 0))
    for depth in (0, 1, 3):
        more = counted_flops(loud(cfg), some_ids(2, 12), depth=depth) - counted_flops(loud(plain), some_ids(2, 12), depth=depth)
        assert more == 2 * 12 * (cfg.flops_per_token(12, depth=depth) - plain.flops_per_token(12, depth=depth)) and (more > 0) == (depth > 0)


# ------------------------------------------------------------------------------------------------------- ouro: every step


def test_ouros_exit_chances_sum_to_one_and_follow_the_product_rule():
    z_RN = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_RN = log_exits(z_RN).exp()
    torch.testing.assert_close(p_RN.sum(0), torch.ones(40).double())
    for n in range(40):
        assert p_RN[:, n].tolist() == pytest.approx(spec.exit_chances(z_RN[:, n].sigmoid().tolist()), abs=1e-12)
    assert torch.equal(log_exits(torch.full((1, 3), -9.0)), torch.zeros(1, 3))      # one step takes everybody
    assert log_exits(torch.tensor([[200.0], [0.0], [-200.0]])).isfinite().all()


class Uniform(nn.Module):
    """An exit gate with lambda_t = 1 / (R - t + 1)."""

    def forward(self, x_RBTD):
        chance = torch.tensor([1 / (len(x_RBTD) - t) for t in range(len(x_RBTD) - 1)] + [0.5]).to(x_RBTD)
        return chance.logit().view(-1, 1, 1).expand(x_RBTD.shape[:-1])


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5])
def test_with_uniform_chances_ouros_loss_is_the_mean_over_steps_less_beta_log_r(beta):
    model, ids_BT, targets_BT = loud(tiny(**OURO, exit_entropy=beta)).double(), some_ids(2, 8), some_ids(2, 8, seed=2)
    model.exit_gate = Uniform()
    ces = [model(ids_BT, targets_BT, depth=depth).loss.item() for depth in range(1, 5)]
    out = model.train()(ids_BT, targets_BT)
    assert out.loss.item() == pytest.approx(sum(ces) / 4 - beta * math.log(4), abs=1e-7)                # the gate's chances are float32
    assert out.losses["ce"].item() == pytest.approx(ces[-1], abs=1e-12) and sum(out.losses.values()).item() == pytest.approx(out.loss.item(), abs=1e-12)


@pytest.mark.parametrize("keys", [dict(), dict(block="llama", loop_norm=True, sandwich_norm=True, n_coda=0), dict(update="gate", fused_loss=True)], ids=str)
@pytest.mark.parametrize("ignored", [0, 5])
def test_ouros_loss_equals_the_specification(keys, ignored):
    cfg = tiny(**{**OURO, **keys}, exit_entropy=0.3)
    model, ids_BT, targets_BT = loud(cfg).double(), some_ids(2, 6), some_ids(2, 6, seed=2)
    targets_BT.view(-1)[:ignored] = -100
    losses, ces = [], []
    for ids_T, targets_T in zip(ids_BT.tolist(), targets_BT.tolist()):
        sequence = spec.Sequence(cfg, model.state_dict(), exit="cdf", exit_threshold=math.inf)          # read after every step, nobody leaves
        for id, target in zip(ids_T, targets_T):
            sequence.token(id)
            if target != -100:
                ce = [-float(logits.log_softmax(0)[target]) for logits in sequence.logits]
                losses.append(spec.expected_loss([float(chance) for chance in sequence.lambdas], ce, 0.3))
                ces.append(ce[-1])
    out = model.train()(ids_BT, targets_BT)
    assert out.loss.item() == pytest.approx(sum(losses) / len(losses), abs=2e-6)                        # rotary tables are float32
    assert out.losses["ce"].item() == pytest.approx(sum(ces) / len(ces), abs=2e-6) and out.losses["entropy"] < 0
    assert set(out.losses) == {"ce", "early", "entropy"} and (out.depth_BT == 4).all()


def plain_chunked(x_QD, table_VD, target_N, weight_Q):
    """What model.chunked computes, with all logits there."""
    target_Q = target_N.repeat(len(x_QD) // len(target_N))
    ce_Q = F.cross_entropy(x_QD @ table_VD.T, target_Q, ignore_index=-100, reduction="none")
    return (ce_Q * weight_Q).sum(), ce_Q


@pytest.mark.parametrize("ignored", [0, 70])
def test_ouros_chunked_loss_has_the_gradients_of_cross_entropy(ignored):
    x_QD, table_VD, p_Q = torch.randn(3 * 100, 8).double(), torch.randn(8192, 8).double(), torch.rand(3 * 100).double()       # two chunks, across the passes
    target_N = some_ids(100, vocab_size=8192)
    target_N[10: 10 + ignored] = -100
    found = []
    for of in (chunked, plain_chunked):
        leaves = [leaf.clone().requires_grad_() for leaf in (x_QD, table_VD, p_Q)]
        counts_Q = (target_N != -100).double().repeat(3)
        total, ce_Q = of(leaves[0], leaves[1], target_N, leaves[2] * counts_Q)
        found.append((total, ce_Q * counts_Q, *torch.autograd.grad(0.5 * total, leaves)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("ignored", [0, 5, 16])
def test_ouros_gradients_are_those_of_plain_autograd_without_recomputation(ignored, fused_loss, monkeypatch):
    model, ids_BT, targets_BT = loud(tiny(**OURO, fused_loss=fused_loss)).double().train(), some_ids(2, 8), some_ids(2, 8, seed=2)
    targets_BT.view(-1)[:ignored] = -100
    out = model(ids_BT, targets_BT)
    grads = gradients(model, out.loss)
    assert ignored < 16 or out.loss == 0 and not any(grad.any() for grad in grads.values())
    monkeypatch.setattr(model_py, "chunked", plain_chunked)
    monkeypatch.setattr(model_py, "checkpoint", lambda call, *args, use_reentrant: call(*args))
    plain = model(ids_BT, targets_BT)
    assert plain.loss.item() == pytest.approx(out.loss.item(), abs=1e-12) and (out.logits is None) == fused_loss
    assert_same(grads, gradients(model, plain.loss))


def test_ouro_with_recomputed_steps_gives_the_same_gradients():
    grads = []
    for lean in (False, True):
        model = loud(tiny(**OURO)).double().train()
        if lean:
            train.checkpoint_activations(model)
        grads.append(gradients(model, model(some_ids(2, 8), some_ids(2, 8, seed=2)).loss))
    assert_same(*grads)


@pytest.mark.slow
def test_the_more_entropy_weighs_the_more_even_ouros_chances_become():
    entropies = []
    for beta in (0.0, 2.0):
        model, ids_BT = loud(tiny(**OURO, exit_entropy=beta)).train(), some_ids(4, 16)
        optimizer = torch.optim.SGD(model.exit_gate.parameters(), lr=0.05)
        for _ in range(20):
            gradients(model, model(ids_BT, ids_BT).loss)
            optimizer.step()
        p_RN = [log_exits(model.exit_gate(x).flatten(1)).exp() for x in features_of_every_step(model, ids_BT)][0]
        entropies.append(-(p_RN * p_RN.log()).nan_to_num().sum(0).mean().item())
    assert entropies[0] < 0.9 * entropies[1]


def features_of_every_step(model, ids_BT):
    seen, gate = [], model.exit_gate.register_forward_hook(lambda module, args, z: seen.append(args[0]))
    model(ids_BT, ids_BT)
    gate.remove()
    return seen


def test_outside_training_and_without_targets_ouro_is_a_plain_model():
    model, ids_BT, targets_BT = loud(tiny(**OURO)), some_ids(2, 8), some_ids(2, 8, seed=2)
    plain = loud(tiny(**LAYOUT))
    plain.load_state_dict({name: p for name, p in model.state_dict().items() if "exit_gate" not in name})
    for training in (False, True):
        out = model.train(training)(ids_BT)
        assert torch.equal(out.logits, plain(ids_BT).logits) and out.loss is None and out.losses == {}
    out = model.eval()(ids_BT, targets_BT)
    assert torch.equal(out.loss, plain(ids_BT, targets_BT).loss) and set(out.losses) == {"ce"}
    assert torch.equal(model.train()(ids_BT, targets_BT).logits, plain(ids_BT).logits)                  # of the last step


@pytest.mark.parametrize("n_coda", [0, 2])
def test_ouros_training_flops_are_those_of_a_real_forward(n_coda):
    cfg, ids_BT = tiny(**{**OURO, "n_coda": n_coda}, fused_loss=True), some_ids(2, 12)
    for depth in (1, 4):
        attentions = cfg.n_prelude + depth * (cfg.n_core + n_coda)
        full_attention = attentions * 4 * cfg.n_embd * 12                           # what ran, per token: the whole square; half of it is counted
        exact = cfg.train_flops_per_token(12, depth) - depth * 2 * cfg.n_embd       # the gate's product and sum, which the counter does not know
        one_logit = 2 * cfg.n_embd                                                  # what a matrix product's dtype is found out by
        assert counted_flops(loud(cfg).train(), ids_BT, ids_BT, depth=depth) == 2 * 12 * (exact + full_attention / 2) + one_logit


@pytest.mark.slow
def test_ouro_reads_ten_steps_in_at_most_half_as_much_memory_again():
    """At the proportions of GRT Small, 1+1x10+1: a vocabulary of 64 n_embd, where the logits of ten steps would be most of it."""
    peaks, n_tokens = {}, 16 * 64
    for loss in ("last", "every"):
        torch.manual_seed(0)
        model = GPT(tiny(**layout("1+1x10+1"), n_embd=64, vocab_size=4096, block_size=64, fused_loss=True, loss=loss)).train()
        ids_BT = some_ids(16, 64, vocab_size=4096)
        with bench.Live([*model.parameters(), ids_BT]) as live, LargestTensor() as largest:
            model(ids_BT, ids_BT).loss.backward()
        peaks[loss] = live.peak
        assert largest.numel < n_tokens * 4096 / 2                                  # logits: never even those of half a step
    assert peaks["every"] < 1.5 * peaks["last"] and 10 * n_tokens * 4096 * 4 > peaks["last"]
