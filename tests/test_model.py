"""The model, in reading order: settings, weights that are shared, initial values, the forward pass, noise, loss, one's own
update rule, compiled parts. Cached decoding is in test_cache.py, counts in test_counts.py.

    python -m pytest -q tests/test_model.py
"""
import copy
import itertools
import math
from dataclasses import replace

import pytest
import spec
import torch
import torch.nn.functional as F
from tiny import GRID, case_config, case_name, loud, some_ids, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_py
from model import GPT, SHARINGS, UPDATES, Noise, Replace, Sharing, block_table

GRT = dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate", state_noise=0.1, gate_noise=0.1, depth_sampling="uniform")
FAMILIES = {
    "gpt2": dict(n_core=3, bias=True),
    "llama": dict(block="llama", n_core=3, n_kv_head=2),
    "cycle": dict(n_core=2, n_recur=3),
    "sequence": dict(n_core=2, n_recur=3, sharing="sequence"),
    "inject": dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="inject", state_noise=0.1),
    "grt": GRT,
    "llama grt": dict(GRT, block="llama"),
}


def forward(model, ids_BT, **options):
    with torch.no_grad():
        return model(ids_BT, **options).logits


# -------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("wrong, words", [
    (dict(n_embd=256, n_head=6), "n_head=6 does not divide n_embd=256; try 4 or 8"),
    (dict(n_embd=31), "n_head=4 does not divide n_embd=31; try 1 or 31"),
    (dict(n_kv_head=3), "n_kv_head=3 does not divide n_head=4"),
    (dict(n_kv_head=8), "n_kv_head=8 does not divide n_head=4"),
    (dict(n_kv_head=0), "n_kv_head=0 is too small"),
    (dict(block="llama", n_embd=20, n_head=4), "odd width 5"),
    (dict(block="llama", bias=True), "bias=True is a GPT-2 option"),
    (dict(block="gpt3"), "block='gpt3' is not one of gpt2, llama"),
    (dict(update="add"), "update='add' is not one of replace, inject, gate"),
    (dict(router="experts"), "router='experts' is not one of none, expert, token"),
    (dict(kv="shared"), "kv='shared' is not one of own, share"),
    (dict(router="token", update="gate"), "use router='expert'"),
    (dict(router="expert", sharing="sequence", n_recur=2), "router='expert' does not go with sharing='sequence'"),
    (dict(kv="share", sharing="sequence", n_recur=2), "kv='share' does not go with sharing='sequence'"),
    (dict(router="expert", n_recur=2, capacity=[1.0]), "one share of the tokens in (0, 1] for each of the n_recur=2 steps"),
    (dict(router="token", n_recur=2, capacity=[1.0, 0.5]), "of an expert-choice model"),
    (dict(router="expert", n_recur=2, capacity=[0.5, 0.5], kv="share"), "capacity must begin with 1, not 0.5"),
    (dict(router="expert", router_score="softmax"), "router_score='softmax' does not go with router='expert'"),
    (dict(router="expert", router_kind="deep"), "router_kind='deep' is not one of linear, mlp"),
    (dict(router="expert", threshold=1.5), "threshold=1.5 is outside 0..1"),
    (dict(router="expert", router_alpha=-1.0), "router_alpha=-1.0 must be positive"),
    (dict(loss="all"), "loss='all' is not one of last, every"),
    (dict(depth_sampling="often"), "depth_sampling='often' is not one of fixed, uniform, poisson"),
    (dict(proj_init="zero"), "proj_init='zero' is not one of normal, scaled, identity"),
    (dict(sharing="loop"), "sharing='loop' is not one of cycle"),
    (dict(n_core=0), "n_core=0 is too small"),
    (dict(n_recur=0), "n_recur=0 is too small"),
    (dict(n_coda=-1), "n_coda=-1 is too small"),
    (dict(block_size=0), "block_size=0 is too small"),
    (dict(vocab_size=None), "vocab_size=None is not a number"),
    (dict(min_depth=0), "min_depth=0 is outside 1..n_recur=1"),
    (dict(n_recur=2, min_depth=3), "min_depth=3 is outside 1..n_recur=2"),
    (dict(dropout=1.0), "dropout=1.0 is out of range"),
    (dict(state_noise=-0.1), "state_noise=-0.1 is out of range"),
    (dict(gate_temperature=0.0), "gate_temperature=0.0 must be positive"),
    (dict(norm_eps=math.nan), "norm_eps=nan must be positive"),
    (dict(n_core=100, n_recur=101), "surely a slip"),
])
def test_a_wrong_setting_is_refused_with_a_sentence(wrong, words):
    with pytest.raises(ValueError) as error:
        tiny(**wrong)
    assert words in str(error.value)


def test_every_width_and_head_count_builds_or_is_refused():
    for n_embd, n_head, block in itertools.product(range(30, 67), range(1, 9), ("gpt2", "llama")):
        fits = n_embd % n_head == 0 and (block == "gpt2" or n_embd // n_head % 2 == 0)          # RoPE turns pairs
        if fits:
            model = GPT(tiny(block=block, n_embd=n_embd, n_head=n_head, n_core=1))
            assert model(some_ids(1, 3)).logits.shape == (1, 3, 61)
        else:
            with pytest.raises(ValueError, match=f"n_head={n_head}"):
                tiny(block=block, n_embd=n_embd, n_head=n_head)


def test_every_number_of_core_blocks_builds():
    for n_core in range(1, 13):
        assert len(GPT(tiny(n_core=n_core, n_recur=2)).blocks()) == n_core


def test_the_mlp_is_four_times_as_wide_or_what_the_config_says():
    assert GPT(tiny()).blocks()[0].mlp.up.weight.shape == (64, 16)
    assert GPT(tiny(block="llama")).blocks()[0].mlp.up.weight.shape == (48, 16)         # 8/3 of 16, up to a multiple of 8
    assert GPT(tiny(n_ffn=24)).blocks()[0].mlp.up.weight.shape == (24, 16)


def test_a_setting_without_effect_is_named():
    assert tiny(gate_bias=1.0).unused() == ["gate_bias=1.0 has no effect: update is not gate"]
    assert tiny(**GRT).unused() == []
    changed = tiny(n_recur=3, min_depth=2, rope_theta=1.0, proj_init="identity").unused()
    assert [sentence.split("=")[0] for sentence in changed] == ["proj_init", "min_depth", "rope_theta"]


def test_more_tokens_than_the_context_are_refused():
    model = loud(tiny(block_size=8))
    assert forward(model, some_ids(1, 8)).shape == (1, 8, 61)
    for n in (0, 9):
        with pytest.raises(ValueError, match=f"{n} tokens given; this model takes 1 to block_size=8"):
            model(some_ids(1, n))


# -------------------------------------------------------------------------------------------------- which block runs when


def test_nine_layers_from_three_blocks_in_a_cycle_or_in_sequence():
    assert block_table(tiny(n_core=3, n_recur=3)) == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert block_table(tiny(n_core=3, n_recur=3, sharing="sequence")) == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert block_table(tiny(n_core=3, n_recur=2, sharing="sequence")) == [[0, 0, 1], [1, 2, 2]]


def test_a_name_that_contradicts_the_layout_is_refused():
    for name, outer in (("cycle", 1), ("sequence", 1), ("middle_cycle", 0), ("middle_sequence", 0)):
        with pytest.raises(ValueError, match=f"sharing='{name}' contradicts the layout"):
            tiny(sharing=name, n_coda=outer, n_recur=2)
    assert tiny(n_coda=1).sharing_name == "middle_cycle" and tiny().sharing_name == "cycle"


@pytest.mark.parametrize("other", [dict(update="inject"), dict(update="gate"), dict(depth_sampling="uniform")])
def test_sequence_goes_with_nothing_that_treats_its_steps_alike(other):
    for sharing, n_prelude in (("sequence", 0), ("middle_sequence", 1)):
        with pytest.raises(ValueError, match=f"does not go with sharing='{sharing}'"):
            tiny(n_recur=2, sharing=sharing, n_prelude=n_prelude, **other)


def test_a_depth_that_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="always n_recur=3"):
        GPT(tiny(n_recur=3, sharing="sequence"))(some_ids(1, 4), depth=2)
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="is not a number of steps"):
            GPT(tiny(n_recur=3))(some_ids(1, 4), depth=wrong)


def test_sharing_is_by_construction_and_survives_loading_moving_and_copying():
    model = GPT(tiny(**GRT))
    blocks, gate_and_proj = 4 * (4 + 2 + 2), 2 + 3 + 2 + 1               # weights of a block: attention, mlp, norms
    tensors = blocks + gate_and_proj + 2 + 1                              # embedding, positions; the last norm

    def unique(model):
        return len({p.untyped_storage().data_ptr() for p in model.parameters()})

    assert unique(model) == len(model.state_dict()) == tensors
    model.load_state_dict(GPT(tiny(**GRT)).state_dict())
    assert unique(model) == tensors
    assert unique(model.to(torch.float64)) == tensors
    assert unique(copy.deepcopy(model)) == tensors
    assert sum(p.numel() for p in model.parameters()) == tiny(**GRT).n_params()


def test_every_core_block_runs_once_in_each_step_and_others_once():
    model, calls = loud(tiny(**GRT)), []
    for name in ("prelude.0", "recursion.core.0", "recursion.core.1", "coda.0"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    forward(model, some_ids(1, 4), depth=2)
    core = ["recursion.core.0", "recursion.core.1"]
    assert calls == ["prelude.0", *core, *core, "coda.0"]


def test_a_shared_model_does_not_load_into_an_unshared_one():
    shared, unshared = GPT(tiny(n_core=2, n_recur=3)), GPT(tiny(n_core=6))
    for source, target in ((shared, unshared), (unshared, shared)):
        with pytest.raises(RuntimeError, match="recursion.core.2"):
            target.load_state_dict(source.state_dict())


def test_the_head_is_the_token_table():
    model, ids_BT = loud(tiny()), some_ids(1, 4)
    before = forward(model, ids_BT)
    unseen = next(id for id in range(61) if id not in ids_BT)
    with torch.no_grad():
        model.embed.weight[unseen] *= 2
    changed = (forward(model, ids_BT) != before).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [unseen]
    model(ids_BT, ids_BT).loss.backward()
    assert (model.embed.weight.grad != 0).any(-1).all(), "every token's row learns from every prediction"


# --------------------------------------------------------------------------------------------------------- initial values


def test_matrices_start_at_a_std_of_002_and_residual_outputs_lower():
    for block, divisor in (("gpt2", math.sqrt(2 * (1 + 2 * 3 + 1))), ("llama", 1)):          # blocks executed at full depth
        model = GPT(tiny(block=block, n_embd=64, **{**GRT, "n_core": 2}))
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                assert p.std().item() == pytest.approx(0.02 / (divisor if residual else 1), rel=0.06), name
            else:
                start = 4.0 if name.endswith("gate.down.bias") else 0.0 if name.endswith("bias") else 1.0
                assert (p == start).all(), name


def test_a_gate_starts_by_keeping_982_thousandths_of_the_state():
    gates = []
    model = GPT(tiny(**GRT)).eval()
    model.recursion.update.gate.register_forward_hook(lambda module, args, g: gates.append(g))
    forward(model, some_ids(2, 8))
    assert len(gates) == 3
    for g in gates:
        assert g.shape == (2, 8, 16) and (g - 1 / (1 + math.exp(-4))).abs().max() < 0.005


def test_the_gate_bias_is_the_configs():
    model = GPT(tiny(**GRT, gate_bias=-2.0))
    model.init_weights()
    assert (model.recursion.update.gate.down.bias == -2).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_made_on_meta_starts_with_the_same_values(family):
    cfg = tiny(**FAMILIES[family])
    with torch.device("meta"):
        made = GPT(cfg)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(math.nan)
    normal = GPT(cfg)
    for model in (made, normal):
        torch.manual_seed(3)
        model.init_weights()
    assert len(made.state_dict()) == len(normal.state_dict())
    for name, p in normal.state_dict().items():
        assert torch.equal(p, made.state_dict()[name]), name


def test_an_adapter_that_starts_as_identity_reads_the_state_alone():
    identity = loud_but(tiny(**{**GRT, "update": "inject"}, proj_init="identity"))
    assert torch.equal(identity.recursion.update.from_state.weight, torch.eye(16))
    plain = GPT(tiny(**{**GRT, "update": "replace"})).eval()
    plain.load_state_dict(identity.state_dict(), strict=False)
    assert torch.equal(forward(identity, some_ids(2, 8)), forward(plain, some_ids(2, 8)))


def loud_but(cfg):
    """Loud, apart from the adapter, which keeps its start."""
    model, start = loud(cfg), GPT(cfg)
    for name in ("from_state", "from_anchor"):
        model.recursion.update.get_submodule(name).load_state_dict(start.recursion.update.get_submodule(name).state_dict())
    return model


# ------------------------------------------------------------------------------------------------------- the forward pass


@pytest.mark.parametrize("case", GRID, ids=case_name)
def test_logits_equal_the_specification(case):
    model, ids_BT = loud(case_config(case)), some_ids(2, 9)
    logits_BTV = forward(model, ids_BT, depth=case["depth"])
    assert logits_BTV.std() > 0.5                                           # not flat: a mistake would show
    sequence = spec.Sequence(model.cfg, model.state_dict(), case["depth"])
    for t, id in enumerate(ids_BT[1]):
        assert torch.allclose(logits_BTV[1, t], sequence.token(id), atol=1e-4), f"token {t}"


@pytest.mark.parametrize("keys", [
    dict(block="llama", rope_theta=20.0, n_head=2, n_kv_head=1),
    dict(block="llama", n_ffn=20, norm_eps=0.5), dict(norm_eps=0.5, n_ffn=20),
    dict(n_recur=3, update="gate", gate_temperature=3.0), dict(block="llama", n_recur=2, update="gate", norm_eps=0.5)], ids=str)
def test_other_widths_periods_and_temperatures_equal_the_specification_too(keys):
    model, ids = loud(tiny(**keys)), some_ids(1, 12)
    sequence = spec.Sequence(model.cfg, model.state_dict())
    assert torch.allclose(forward(model, ids)[0], torch.stack([sequence.token(id) for id in ids[0]]), atol=1e-4)


def test_one_step_that_replaces_is_a_plain_stack_bit_for_bit():
    looped, plain = loud(tiny(n_prelude=1, n_core=2, n_recur=3, n_coda=1)), loud(tiny(n_core=4))
    order = [*looped.prelude, *looped.recursion.core, *looped.coda]
    for block, other in zip(plain.recursion.core, order):
        block.load_state_dict(other.state_dict())
    for part in ("embed", "positions", "norm"):
        plain.get_submodule(part).load_state_dict(looped.get_submodule(part).state_dict())
    assert torch.equal(forward(looped, some_ids(2, 9), depth=1), forward(plain, some_ids(2, 9)))


def test_depth_zero_is_the_coda_on_the_anchor():
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 9)
    with torch.no_grad():
        e_BTD = model.prelude[0](model.embed(ids_BT) + model.positions.table.weight[:9])
        expected = model.norm(model.coda[0](e_BTD)) @ model.embed.weight.T
    assert torch.allclose(forward(model, ids_BT, depth=0), expected, atol=1e-5)


def test_a_gate_forced_open_keeps_the_state_at_any_depth():
    model, ids_BT = force_gate(loud(tiny(**GRT)), 1e4), some_ids(2, 9)
    for depth in (1, 3, 5):
        assert torch.equal(forward(model, ids_BT, depth=depth), forward(model, ids_BT, depth=0))


def test_a_gate_forced_shut_with_an_identity_adapter_replaces():
    gated = force_gate(loud_but(tiny(**GRT, proj_init="identity")), -1e4)
    plain = GPT(tiny(**{**GRT, "update": "replace"})).eval()
    plain.load_state_dict(gated.state_dict(), strict=False)
    for depth in (1, 3, 5):
        assert torch.equal(forward(gated, some_ids(2, 9), depth=depth), forward(plain, some_ids(2, 9), depth=depth))


def force_gate(model, logit):
    with torch.no_grad():
        model.recursion.update.gate.down.weight.zero_()
        model.recursion.update.gate.down.bias.fill_(logit)
    return model


def test_a_higher_temperature_makes_softer_gates():
    gates = {}
    for tau in (0.5, 2.0):
        model = loud(tiny(**GRT, gate_temperature=tau))
        model.recursion.update.gate.register_forward_hook(lambda module, args, g: gates.__setitem__(tau, g))
        forward(model, some_ids(2, 8), depth=1)
    assert torch.allclose(gates[0.5].logit(), 4 * gates[2.0].logit(), atol=1e-3)


@pytest.mark.parametrize("block", ["gpt2", "llama"])
@pytest.mark.parametrize("update", ["replace", "inject", "gate"])
def test_a_token_changes_nothing_before_it(block, update):
    model, ids_BT = loud(tiny(**{**GRT, "update": update}, block=block)), some_ids(2, 16)
    before = forward(model, ids_BT)
    for t in (1, 7, 15):
        other_BT = ids_BT.clone()
        other_BT[:, t] = (ids_BT[:, t] + 1) % 61
        after = forward(model, other_BT)
        assert torch.allclose(before[:, :t], after[:, :t], atol=1e-5)
        assert (before[:, t:] - after[:, t:]).abs().amax(-1).min() > 1e-3            # but all from it on


def test_the_answer_of_a_row_does_not_depend_on_its_batch():
    model, ids_BT = loud(tiny(**GRT)), some_ids(5, 12)
    assert torch.allclose(forward(model, ids_BT)[3:4], forward(model, ids_BT[3:4]), atol=1e-5)


def test_evaluation_is_without_noise_and_deterministic_whatever_the_seed():
    model, ids_BT = loud(tiny(**GRT, dropout=0.2)), some_ids(2, 8)
    state = torch.get_rng_state()
    first = forward(model, ids_BT)
    assert torch.equal(torch.get_rng_state(), state), "evaluation drew a random number"
    for seed in (None, (0, 0), (1, 2)):
        assert torch.equal(forward(model, ids_BT, seed=seed), first)
    assert torch.equal(first, forward(loud(tiny(**{**GRT, "state_noise": 0.0, "gate_noise": 0.0})), ids_BT))


def test_routing_names_change_nothing_without_a_router():
    model, ids_BT = loud(tiny()), some_ids(1, 4)
    for routing in ("topk", "causal"):
        assert torch.equal(forward(model, ids_BT, routing=routing), forward(model, ids_BT))
    with pytest.raises(ValueError, match="routing='best'"):
        model(ids_BT, routing="best")


def test_depth_is_reported_for_every_token():
    model = loud(tiny(**GRT))
    assert model(some_ids(2, 5)).depth_BT.tolist() == [[3] * 5] * 2
    assert model(some_ids(2, 5), depth=7).depth_BT.tolist() == [[7] * 5] * 2


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_half_precision_weights_give_nearly_the_same_answer():
    for family, keys in FAMILIES.items():
        model, ids_BT = loud(tiny(**keys)), some_ids(2, 8)
        exact = forward(model, ids_BT)
        half = forward(copy.deepcopy(model).bfloat16(), ids_BT)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = forward(model, ids_BT)
        assert half.dtype == mixed.dtype == torch.bfloat16
        assert (half - exact).abs().mean() < 0.1 and (mixed - exact).abs().mean() < 0.1, family


# -------------------------------------------------------------------------------------------------------- noise and depth


def draws(cfg, own, T):
    """The noise of one training call as functions of (step, position), for the specification."""
    noise, blank = Noise(cfg, own), torch.zeros(1, T, cfg.n_embd)
    return (lambda step, position: noise.on_state(blank, step)[0, position],
            lambda step, position: noise.on_gate(blank, step)[0, position, 0])


@pytest.mark.parametrize("block", ["gpt2", "llama"])
@pytest.mark.parametrize("update", ["replace", "inject", "gate"])
def test_noise_enters_where_the_specification_says(block, update):
    keys = dict(n_prelude=1, n_recur=3, update=update, state_noise=0.5)
    cfg = tiny(block=block, gate_noise=0.5 if update == "gate" else 0.0, **keys)
    model, ids_BT = loud(cfg).train(), some_ids(1, 8)
    noisy = forward(model, ids_BT, seed=(0, 11), depth=2)[0]
    state_noise, gate_noise = draws(cfg, 11, 8) if update == "gate" else (draws(cfg, 11, 8)[0], None)
    sequence = spec.Sequence(cfg, model.state_dict(), 2, state_noise, gate_noise)
    for t, id in enumerate(ids_BT[0]):
        assert torch.allclose(noisy[t], sequence.token(id), atol=1e-4), f"token {t}"
    assert (noisy - forward(model.eval(), ids_BT, depth=2)[0]).abs().mean() > 0.05


def test_state_noise_is_drawn_for_every_feature_and_gate_noise_for_every_token():
    noise, h_BTD = Noise(tiny(state_noise=0.1, gate_noise=0.3), 5), torch.zeros(8, 32, 16)
    on_state, on_gate = noise.on_state(h_BTD, 0), noise.on_gate(h_BTD, 0)
    assert on_state.shape == (8, 32, 16) and on_gate.shape == (8, 32, 1)
    assert abs(on_state.mean()) < 0.01 and abs(on_gate.mean()) < 0.1
    assert on_state.std().item() == pytest.approx(0.1, rel=0.1) and on_gate.std().item() == pytest.approx(0.3, rel=0.2)
    assert len(on_state.unique()) > 4000 and len(on_gate.unique()) > 250


def test_noise_is_fresh_at_every_step_and_a_function_of_seed_and_step():
    cfg, h_BTD = tiny(state_noise=0.1, gate_noise=0.1), torch.zeros(1, 8, 16)
    for kind in ("on_state", "on_gate"):
        def draw(seed, step):
            return getattr(Noise(cfg, seed), kind)(h_BTD, step)

        assert torch.equal(draw(5, 2), draw(5, 2))
        assert not torch.equal(draw(5, 2), draw(5, 3)) and not torch.equal(draw(5, 2), draw(6, 2))
    assert not torch.equal(Noise(cfg, 5).on_state(h_BTD, 0)[..., :1], Noise(cfg, 5).on_gate(h_BTD, 0))


def test_depth_follows_the_shared_seed_and_noise_the_own_one():
    model, ids_BT = loud(tiny(**GRT)).train(), some_ids(1, 4)
    depths = [int(model(ids_BT, seed=(shared, 0)).depth_BT[0, 0]) for shared in range(40)]
    assert depths == [int(model(ids_BT, seed=(shared, 99)).depth_BT[0, 0]) for shared in range(40)]
    assert set(depths) == {1, 2, 3}, "uniform sampling must reach both of its ends"
    assert all(depths.count(depth) >= 6 for depth in (1, 2, 3))
    assert torch.equal(forward(model, ids_BT, seed=(4, 5)), forward(model, ids_BT, seed=(4, 5)))
    assert not torch.equal(forward(model, ids_BT, seed=(4, 5)), forward(model, ids_BT, seed=(4, 6)))


def test_min_depth_is_the_smallest_depth_drawn():
    model, ids_BT = GPT(tiny(**GRT, min_depth=2)).train(), some_ids(1, 2)
    assert {int(model(ids_BT, seed=(shared, 0)).depth_BT[0, 0]) for shared in range(20)} == {2, 3}
    fixed = GPT(tiny(n_recur=3)).train()
    assert {int(fixed(ids_BT, seed=(shared, 0)).depth_BT[0, 0]) for shared in range(20)} == {3}


def test_without_a_seed_training_draws_from_torchs_generator():
    model, ids_BT = loud(tiny(**GRT)).train(), some_ids(1, 4)
    torch.manual_seed(1)
    first, second = forward(model, ids_BT, depth=2), forward(model, ids_BT, depth=2)
    torch.manual_seed(1)
    assert torch.equal(forward(model, ids_BT, depth=2), first) and not torch.equal(first, second)


# ------------------------------------------------------------------------------------------------------------------- loss


def test_loss_is_the_mean_over_the_targets_that_count():
    model, ids_BT, targets_BT = loud(tiny()), some_ids(3, 8), some_ids(3, 8, seed=2)
    targets_BT[0, :5] = targets_BT[2] = -100
    out = model(ids_BT, targets_BT)
    log_p = out.logits.double().log_softmax(-1)
    each = [-log_p[b, t, targets_BT[b, t]].item() for b in range(3) for t in range(8) if targets_BT[b, t] != -100]
    assert len(each) == 11 and out.loss.item() == pytest.approx(sum(each) / 11, rel=1e-5)


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_a_legal_gradient():
    model = loud(tiny(**GRT)).train()
    out = model(some_ids(2, 8), torch.full((2, 8), -100), seed=(0, 0))
    out.loss.backward()
    assert out.loss.item() == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_in_evaluation_the_loss_is_the_cross_entropy():
    model, ids_BT, targets_BT = loud(tiny(**GRT)), some_ids(2, 8), some_ids(2, 8, seed=2)
    out = model(ids_BT, targets_BT)
    assert torch.equal(out.loss, out.losses["ce"])
    assert out.loss.item() == pytest.approx(F.cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten()).item(), rel=1e-6)
    assert model(ids_BT).loss is None and model(ids_BT).losses == {}


def test_training_minimises_the_sum_of_the_named_losses_and_evaluation_reports_the_cross_entropy(monkeypatch):
    terms = {"ce": torch.tensor(2.0), "router": torch.tensor(0.5)}
    monkeypatch.setitem(model_py.LOSSES, "last", lambda *where: terms)
    model, ids_BT = loud(tiny()), some_ids(1, 4)
    assert model.train()(ids_BT, ids_BT).loss == 2.5 and model.eval()(ids_BT, ids_BT).loss == 2.0
    assert model(ids_BT, ids_BT).losses == terms


class LargestTensor(TorchDispatchMode):
    """The most elements that one floating-point tensor had while this was on."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.numel = max(self.numel, *made, 0)
        return out


def loss_and_gradients(model, ids_BT, targets_BT):
    model.zero_grad()
    out = model(ids_BT, targets_BT, seed=(1, 2))
    (out.loss * 0.5).backward()
    return out, out.loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("masked", [0, 1, 40])
def test_a_fused_loss_is_the_same_loss_with_the_same_gradients_in_less_memory(masked):
    cfg = tiny(vocab_size=8192, block_size=600, n_prelude=1, n_core=1, n_recur=2, update="gate")
    model, fused = loud(cfg).double().train(), loud(replace(cfg, fused_loss=True)).double().train()
    ids_BT, targets_BT = some_ids(2, 600, vocab_size=8192), some_ids(2, 600, vocab_size=8192, seed=2)      # five chunks of tokens
    targets_BT[:, 300 : 300 + masked] = -100
    plain, loss, grads = loss_and_gradients(model, ids_BT, targets_BT)
    with LargestTensor() as seen:
        out, fused_loss, fused_grads = loss_and_gradients(fused, ids_BT, targets_BT)
    assert plain.logits is not None and out.logits is None and fused_loss == pytest.approx(loss, abs=1e-12)
    assert seen.numel == 256 * 8192 < plain.logits.numel() // 4
    for name, grad in grads.items():
        torch.testing.assert_close(fused_grads[name], grad, atol=1e-12, rtol=1e-9)
    assert fused.eval()(ids_BT, targets_BT).loss.item() == pytest.approx(model.eval()(ids_BT, targets_BT).loss.item(), abs=1e-12)
    assert torch.equal(fused(ids_BT).logits, model(ids_BT).logits)                                         # without targets there is nothing to fuse


def test_a_fused_loss_is_differentiated_once_and_keeps_nothing_after():
    model, ids_BT = loud(tiny(fused_loss=True)).train(), some_ids(2, 8)
    loss = model(ids_BT, ids_BT, seed=(1, 2)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        loss.backward()


@pytest.mark.parametrize("wrong", [-1, 61])
def test_a_fused_loss_refuses_a_target_that_is_no_token(wrong):
    targets_BT = some_ids(2, 8)
    targets_BT[1, 3] = wrong
    for fused_loss in (True, False):
        with pytest.raises((IndexError, RuntimeError)):
            loud(tiny(fused_loss=fused_loss))(some_ids(2, 8), targets_BT)


def test_a_fused_loss_in_which_nothing_counts_is_zero_and_changes_nothing():
    out, loss, grads = loss_and_gradients(loud(tiny(fused_loss=True)).train(), some_ids(2, 8), torch.full((2, 8), -100))
    assert loss == 0 and not any(grad.any() for grad in grads.values())


def test_an_untrained_model_knows_nothing():
    for keys in FAMILIES.values():
        torch.manual_seed(0)
        loss = GPT(tiny(**keys)).eval()(some_ids(4, 32), some_ids(4, 32, seed=2)).loss.item()
        assert loss == pytest.approx(math.log(61), rel=0.05)


def test_dropout_acts_in_training_and_never_in_evaluation():
    dropped, plain, ids_BT = loud(tiny(**GRT, dropout=0.5)), loud(tiny(**GRT)), some_ids(2, 8)
    assert torch.equal(forward(dropped, ids_BT), forward(plain, ids_BT))
    assert torch.equal(forward(dropped, ids_BT), forward(dropped, ids_BT))
    assert torch.equal(dropped.generate(ids_BT, 4, temperature=0), plain.generate(ids_BT, 4, temperature=0))
    first = forward(dropped.train(), ids_BT, seed=(0, 0), depth=2)
    assert not torch.allclose(first, forward(dropped, ids_BT, seed=(0, 0), depth=2)), "fresh masks, though the seed is the same"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_learns(family):
    torch.manual_seed(0)
    model = GPT(tiny(**FAMILIES[family])).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(some_ids(2, 16, seed=step), some_ids(2, 16, seed=step + 2), seed=(step, step)).loss.backward()
        optimizer.step()
    for name, p in model.named_parameters():
        if not name.endswith("key.bias"):                     # softmax does not see what is added to all keys alike
            assert p.grad is not None and p.grad.abs().max() > 1e-9, name


def test_weights_of_two_or_more_axes_decay_and_each_is_listed_once():
    model = GPT(tiny(**GRT, bias=True))
    decay, rest = model_py.param_groups(model, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() >= 2 for p in decay["params"]) and all(p.dim() < 2 for p in rest["params"])
    listed = [id(p) for group in (decay, rest) for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))


# ------------------------------------------------------------------------------------------- one's own update and sharing


class Momentum(Replace):
    """h <- h + m,  m <- b m + (core(h) - h) with a learned b: a rule of one's own in ten lines."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.b = torch.nn.Parameter(torch.tensor([0.5]))

    def anchor(self, e_BTD):
        return [torch.zeros_like(e_BTD)]

    def write(self, h_BTD, y_BTD, anchor, noise_BT1):
        anchor[0] = self.b * anchor[0] + (y_BTD - h_BTD)
        return h_BTD + anchor[0]


class SpecOfMomentum(spec.Sequence):
    def write(self, h, y, e, noise):
        past = self.momentum.get(self.n_seen, 0.0)
        self.momentum[self.n_seen] = self.weights["recursion.update.b"] * past + (y - h)
        return h + self.momentum[self.n_seen]

    def read(self, h, e):
        return h

    def which_block(self, step, j):
        return j if step % 2 == 0 else self.cfg.n_core - 1 - j


def test_a_new_update_and_a_new_sharing_need_no_change_of_the_model(monkeypatch):
    monkeypatch.setitem(UPDATES, "momentum", Momentum)
    there_and_back = lambda step, j, cfg: j if step % 2 == 0 else cfg.n_core - 1 - j  # noqa: E731
    monkeypatch.setitem(SHARINGS, "zigzag", Sharing(there_and_back, any_depth=True))
    cfg = tiny(n_core=3, n_recur=3, n_coda=1, update="momentum", sharing="zigzag")
    assert block_table(cfg) == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
    model, ids_BT = loud(cfg), some_ids(2, 12)
    full = forward(model, ids_BT)

    sequence = SpecOfMomentum(cfg, model.state_dict())
    sequence.momentum = {}
    assert torch.allclose(full[1], torch.stack([sequence.token(id) for id in ids_BT[1]]), atol=1e-4)

    cache = model_py.make_cache(model, 2, 12)
    assert torch.allclose(model.feed(ids_BT[:, :5], cache, every=True), full[:, :5], atol=1e-4)
    for t in range(5, 12):
        assert torch.allclose(model.feed(ids_BT[:, t: t + 1], cache)[:, 0], full[:, t], atol=1e-4)
    assert cfg.n_params() == sum(p.numel() for p in model.parameters())
    model.train()(ids_BT, ids_BT).loss.backward()
    assert model.recursion.update.b.grad.abs() > 0


# --------------------------------------------------------------------------------------------------------- compiled parts


def count_graphs(model, calls):
    """Compile the parts with a backend that only counts; graphs known after each call."""
    import train
    graphs, after = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    train.compile_parts(model, backend=backend)
    for call in calls:
        call()
        after.append(len(graphs))
    torch._dynamo.reset()
    return after


def test_another_depth_needs_no_new_graph():
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 8)
    plain = {depth: forward(model, ids_BT, depth=depth) for depth in (1, 2, 3, 4)}
    compiled = {}
    after = count_graphs(model, [lambda d=d: compiled.__setitem__(d, forward(model, ids_BT, depth=d)) for d in (1, 2, 3, 4)])
    assert after[0] >= 3 and after == [after[0]] * 4                      # a block, the read, the write
    assert all(torch.allclose(compiled[d], plain[d], atol=1e-5) for d in plain)


@pytest.mark.slow
def test_training_at_sampled_depths_needs_no_new_graph():
    model, ids_BT = loud(tiny(**GRT)).train(), some_ids(2, 8)
    after = count_graphs(model, [lambda d=d: model(ids_BT, ids_BT, depth=d, seed=(0, d)).loss.backward() for d in (1, 2, 3, 4)])
    assert after == [after[0]] * 4


@pytest.mark.slow
def test_the_length_of_a_text_needs_no_new_graph():
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 4)
    after = count_graphs(model, [lambda n=n: model.generate(ids_BT, n, temperature=0) for n in (5, 15, 20, 25)])
    assert after[1] == after[2] == after[3] <= 8                          # the second length makes sizes symbolic


def test_twelve_blocks_share_one_graph():
    model = loud(tiny(n_core=12))
    after = count_graphs(model, [lambda: forward(model, some_ids(2, 8))])
    assert after[0] <= 3


@pytest.mark.parametrize("width", [16, 64])
def test_a_scaled_adapter_passes_on_as_much_as_it_reads_at_any_width(width):
    torch.manual_seed(0)
    gains = {}
    for start in ("normal", "scaled"):
        update = GPT(tiny(n_recur=2, n_embd=width, update="inject", proj_init=start)).recursion.update
        h_BTD, e_BTD = torch.randn(2, 8, 64, width)
        gains[start] = update.read(h_BTD, update.anchor(e_BTD)).std().item()
    assert gains["scaled"] == pytest.approx(1, abs=0.15) and gains["normal"] == pytest.approx(0.02 * (2 * width) ** 0.5, rel=0.15)
