"""eval.py's part steps: how the state moves, counted again slowly: token by token, pair by pair, with (tokens x tokens) matrices.

    python -m pytest -q tests/test_eval_steps.py
"""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from spec import Sequence, rotate
from tiny import layout, loud, some_ids, tiny
from toy import DENSE, SEQUENCE, flags, open_run, train_runs

import eval as evaluation
import train
from eval import HEAD_TYPES, Cka, HeadWatch, Sums, change, explained, head_type, improvement, in_tenths, movements, number_of, taken_apart, token_nats

DRAW = evaluation.draw_steps


class Told(Sequence):
    """The slow model, which tells what every step made of a token, and whom its heads looked at."""

    def __init__(self, cfg, weights):
        super().__init__(cfg, weights)
        self.rows, self.looks = [], {}                          # of each token; (step, block) -> of each token and head, weights over the past

    def token(self, id):
        self.rows.append([])
        super().token(id)

    def take_up(self, step, h, y, e, written):
        new = super().take_up(step, h, y, e, written)
        self.rows[-1].append((h, y, self.norm("recursion.norm", new) if self.cfg.loop_norm else new, self.blocks))
        return new

    def core_block(self, step, j, x, position, entries):
        x = super().core_block(step, j, x, position, entries)
        self.blocks = [*(self.blocks if j else []), x]
        return x

    def attention(self, name, place, x, position):
        y = super().attention(name, place, x, position)
        if isinstance(place[0], int) and place in self.memory:
            H, G = self.cfg.n_head, self.cfg.n_kv_head or self.cfg.n_head
            q = self.linear(f"{name}.query", x).split(self.cfg.n_embd // H)
            if self.cfg.block == "llama":
                q = [rotate(head, position, self.cfg.rope_theta) for head in q]
            scores = lambda h: torch.stack([q[h] @ k[h // (H // G)] for k, _ in self.memory[place]])  # noqa: E731
            self.looks.setdefault(place, []).append([(scores(h) / math.sqrt(len(q[0]))).softmax(0).tolist() for h in range(H)])
        return y


def exact(**changes):
    """A loud model in float64, so that only a mistake can tell it from the slow one."""
    return loud(tiny(**changes)).double()


def told(model, ids_T):
    slow = Told(model.cfg, model.state_dict())
    for id in ids_T.tolist():
        slow.token(id)
    return slow


LOOPS = {"replace": dict(layout("1+2x3+1"), update="replace"), "inject": dict(layout("1+1x4+1"), update="inject", block="llama", n_kv_head=2),
         "gate": dict(layout("1+1x4+1"), update="gate"), "loop_norm": dict(layout("0+1x3+1"), loop_norm=True),
         "expert": dict(layout("1+1x3+1"), router="expert"), "gated expert": dict(layout("1+1x3+1"), router="expert", update="gate"),
         "token": dict(layout("1+1x3+1"), router="token"), "sequence": dict(layout("1+2x2+0"), sharing="middle_sequence"),
         "share": dict(layout("0+2x3+0"), kv="share")}


# ---- a pass, taken apart


@pytest.mark.parametrize("changes", LOOPS.values(), ids=list(LOOPS))
def test_every_step_is_taken_down_as_the_slow_model_takes_it(changes):
    model, ids_BT = exact(**changes), some_ids(2, 12)
    with torch.no_grad():
        p = taken_apart(model, ids_BT)
    tooks = set()
    for b in range(2):
        rows = told(model, ids_BT[b]).rows
        for t, steps in enumerate(rows):
            tooks.add(len(steps))
            assert torch.stack(p.took)[:, b, t].tolist() == [r < len(steps) for r in range(model.cfg.n_recur)]
            for r in range(model.cfg.n_recur):
                old, new, o = p.states[r][b, t], p.states[r + 1][b, t], p.proposals[r][b, t]
                if r < len(steps):
                    for found, wanted in zip((old, o, new), steps[r]):
                        assert torch.allclose(found, wanted, atol=1e-6)
                    if model.cfg.update == "gate" and model.cfg.router == "none":
                        g = p.gates[r][b, t]
                        assert torch.allclose(g * old + (1 - g) * o, new, atol=1e-9)
                else:
                    assert torch.equal(new, old) and not o.any() and not any(g_BTD[b, t].any() for g_BTD in p.gates[r : r + 1])
    assert (len(tooks) > 1) == (model.cfg.router != "none") and bool(p.gates) == (model.cfg.update == "gate")      # some stopped early
    assert torch.allclose(model.head(p.features(p.states[-1])), model(ids_BT).logits, atol=1e-9)


def test_a_step_that_nobody_takes_moves_nothing():
    with torch.no_grad():
        p = taken_apart(exact(**LOOPS["expert"], threshold=1.0), some_ids(2, 12))
    assert [took_BT.all().item() for took_BT in p.took] == [True, False, False] and not p.took[1].any() and len(p.states) == 4
    assert torch.equal(p.states[1], p.states[3]) and not p.proposals[2].any()


@pytest.mark.parametrize("changes", [{}, dict(n_prelude=1, n_coda=1, block="llama"), dict(loop_norm=True), dict(lora_rank=2)])
def test_a_dense_models_steps_are_its_blocks(changes):
    model, ids_BT = exact(n_core=3, **changes), some_ids(2, 12)
    with torch.no_grad():
        p = taken_apart(model, ids_BT)
    assert len(p.states) == 4 and len(p.proposals) == len(p.took) == 3 and p.gates == [] and all(took_BT.all() for took_BT in p.took)
    for b in range(2):
        slow = told(model, ids_BT[b])
        for t, ((h, _, last, blocks),) in enumerate(slow.rows):
            assert torch.allclose(p.states[0][b, t], h, atol=1e-6) and torch.allclose(p.states[3][b, t], last, atol=1e-6)
            assert all(torch.allclose(o_BTD[b, t], y, atol=1e-6) for o_BTD, y in zip(p.proposals, blocks))
    assert torch.allclose(model.head(p.features(p.states[-1])), model(ids_BT).logits, atol=1e-9)


def test_the_model_is_left_as_it_was():
    model, ids_BT = exact(**LOOPS["gate"]), some_ids(1, 12)
    before = model(ids_BT).logits
    with HeadWatch(model):
        taken_apart(model, ids_BT)
    hooks = [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    assert hooks == [] and torch.equal(model(ids_BT).logits, before)


def test_losses_are_read_off_the_states_of_the_depths_that_the_model_has():
    for name, changes in LOOPS.items():
        model, ids_BT, targets_BT = exact(**changes), some_ids(2, 12), some_ids(2, 12, seed=2)
        targets_BT[0, :5] = -100
        depths = evaluation.readable(model.cfg)
        assert depths == {"token": [0, 3], "sequence": [2]}.get(name, list(range(model.cfg.n_recur + 1)))
        with torch.no_grad():
            p = taken_apart(model, ids_BT)
            for r in depths:
                nats_BT = token_nats(model, p.features(p.states[r]), targets_BT)
                log_p_BTV = model(ids_BT, depth=r).logits.log_softmax(-1)
                wanted = [[0.0 if v == -100 else -log_p_BTV[b, t, v].item() for t, v in enumerate(row)] for b, row in enumerate(targets_BT.tolist())]
                assert nats_BT.dtype == torch.float64 and torch.allclose(nats_BT, torch.tensor(wanted, dtype=torch.float64), atol=1e-9)
    assert evaluation.readable(tiny(n_core=3)) == [0, 1, 2, 3]


# ---- how the state moves


def length(x):
    return math.sqrt(sum(a * a for a in x))


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y)) / (length(x) * length(y))


@pytest.mark.parametrize("name", ["gate", "gated expert", "replace"])
def test_norms_and_cosines_are_those_of_plain_loops(name):
    model, ids_BT = exact(**LOOPS[name]), some_ids(2, 12)
    with torch.no_grad():
        found = movements(taken_apart(model, ids_BT))
    R, wanted = model.cfg.n_recur, {}
    for b in range(2):
        for t, steps in enumerate(told(model, ids_BT[b]).rows):
            moves = [[y - x for x, y in zip(h.tolist(), new.tolist())] for h, _, new, _ in steps]
            for i, (h, o, *_) in enumerate(steps):
                wanted["update_norm", i + 1, b, t] = length(moves[i])
                wanted["relative_update", i + 1, b, t] = length(moves[i]) / length(h.tolist())
                if i:
                    wanted["update_cosine", i + 1, b, t] = cosine(moves[i], moves[i - 1])
                    wanted["proposal_cosine", i + 1, b, t] = cosine(o.tolist(), steps[i - 1][1].tolist())
    told_of = {(name, r, b, t): x_BT[b, t].item() for name, rows in found.items() for r, x_BT, in_BT in rows for b, t in in_BT.nonzero().tolist()}
    assert told_of.keys() == wanted.keys() and all(told_of[key] == pytest.approx(wanted[key], rel=1e-7) for key in wanted)
    assert [r for r, *_ in found["update_norm"]] == list(range(1, R + 1)) and [r for r, *_ in found["update_cosine"]] == list(range(2, R + 1))


def test_sums_are_kept_window_by_window_over_the_tokens_that_count():
    sums = Sums()
    for x, there in (([[1, 2, 9], [4, 9, 9]], [[1, 1, 0], [1, 0, 0]]), ([[9, 9, 9]], [[0, 0, 0]])):
        sums.add("x", 1, torch.tensor(x, dtype=torch.float32) / torch.tensor(there), torch.tensor(there).bool())         # infinite where it does not count
    assert sums["x", 1].tolist() == [[3, 4, 0], [2, 1, 0]] and number_of(sums["x", 1])["value"] == pytest.approx(7 / 3)
    assert math.isnan(evaluation.ratio(np.zeros((2, 3))))


def test_a_change_is_taken_over_the_same_windows():
    rng = np.random.default_rng(0)
    level, counts = rng.normal(0, 100, 50), np.full(50, 8.0)               # windows differ by far more than the two steps do
    first, last = (np.stack((level + x + rng.normal(0, 0.1, 50), counts)) for x in (0.0, 8.0))
    d = change(first, last)
    assert d["value"] == pytest.approx(1, abs=0.01) and 0.99 < d["interval"][0] < d["value"] < d["interval"][1] < 1.01
    assert change(last, first)["value"] == -d["value"]


# ---- CKA


def slow_cka(x_ND, y_ND):
    """By (tokens x tokens) matrices of inner products, centred: tr(K H L H) / sqrt(tr(K H K H) tr(L H L H))."""
    K, L, H = x_ND @ x_ND.T, y_ND @ y_ND.T, np.eye(len(x_ND)) - 1 / len(x_ND)
    hsic = lambda A, B: np.trace(A @ H @ B @ H)  # noqa: E731
    return hsic(K, L) / math.sqrt(hsic(K, K) * hsic(L, L))


def some_states(n_states, B=6, T=5, D=3, seed=0):
    x = torch.randn(n_states, B, T, D, generator=torch.Generator().manual_seed(seed))
    return list((x.cumsum(0) + 100).unbind(0))                # far from 0: what is not centred has a CKA of 1


def test_cka_is_that_of_whole_matrices_over_all_tokens_that_count():
    states, in_BT = some_states(4), torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    cka = Cka(4, 3)
    for part in (slice(0, 4), slice(4, 6)):
        cka.add([x_BTD[part] for x_BTD in states], in_BT[part])
    x = [x_BTD[in_BT].double().numpy() for x_BTD in states]
    wanted = np.array([[slow_cka(a, b) for b in x] for a in x])
    assert cka.matrix() == pytest.approx(wanted, abs=1e-6) and cka.matrix().diagonal() == pytest.approx(1) and wanted[0, 3] < 0.9
    assert cka.neighbours() == pytest.approx((wanted[1, 2] + wanted[2, 3]) / 2, abs=1e-6)                     # without h_0
    assert cka.product_GXX.shape == (20, 12, 12) and cka.count_G.tolist() == [*in_BT.sum(1).tolist(), *14 * [0]]


def test_cka_knows_no_rotation_scale_or_place():
    (x_BTD,), turn_DD = some_states(1, B=40), torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(2)))[0]
    cka = Cka(3, 3)
    cka.add([x_BTD, 7 * (x_BTD - 100) @ turn_DD + 5, torch.randn(40, 5, 3, generator=torch.Generator().manual_seed(3))], torch.ones(40, 5).bool())
    assert cka.matrix()[0, 1] == pytest.approx(1, abs=1e-5) and cka.matrix()[0, 2] < 0.1


def test_states_that_are_too_large_for_memory_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(evaluation, "CKA_BYTES", 8 * 9**2)                 # room for three states of three features, once
    cka, states = Cka(9, 3), some_states(9)
    cka.add(states, torch.ones(6, 5).bool())
    assert cka.kept == [0, 4, 8] and not cka.whole and len(cka.count_G) == 1 and np.isnan(cka.draws()).all()
    assert cka.matrix()[0, 1] == pytest.approx(slow_cka(*(states[i].flatten(0, 1).double().numpy() for i in (0, 4))), abs=1e-6)


def test_the_interval_of_a_cka_draws_groups_of_windows():
    states = some_states(4, B=60)
    cka = Cka(4, 3)
    cka.add(states, torch.ones(60, 5).bool())
    draws = cka.draws()
    assert len(draws) == evaluation.REDRAWN and draws.min() < cka.neighbours() < draws.max() and (draws == cka.draws()).all() and (draws != cka.draws(1)).any()
    few, noise = Cka(4, 12), torch.randn(4, 20, 3, 12, generator=torch.Generator().manual_seed(4))           # 60 tokens, and hardly anything in common
    few.add(list(noise), torch.ones(20, 3).bool())
    low, high = evaluation.interval(few.draws())
    assert low < few.neighbours() < high and few.draws().mean() == pytest.approx(few.neighbours(), abs=1e-12)
    weight_G = np.ones(20)
    weight_G[3:5] = 2, 0                                                  # window b is in group b % 20
    rows = [b for b in range(60) for _ in range(int(weight_G[b % 20]))]
    assert cka.of([(1, 2)], weight_G)[0] == pytest.approx(slow_cka(*(states[i][rows].flatten(0, 1).double().numpy() for i in (1, 2))), abs=1e-6)


# ---- heads


@pytest.mark.parametrize("changes", [layout("1+2x2+1"), dict(layout("1+1x2+1"), block="llama", n_kv_head=2, update="gate"), dict(n_core=3),
                                     dict(layout("1+1x2+1"), lora_rank=2)])
def test_shares_of_attention_are_those_of_the_slow_models_weights(changes):
    model, ids_BT = exact(**changes), some_ids(2, 12)
    watch = HeadWatch(model)
    for row in ids_BT:                                                     # two batches, one sum
        with watch, torch.no_grad():
            taken_apart(model, row[None])
    looks = [told(model, row).looks for row in ids_BT]
    steps, n_steps = watch.numbers()["steps"], model.cfg.n_core if model.cfg.n_recur == 1 else model.cfg.n_recur
    assert len(steps) == n_steps
    for i, step in enumerate(steps):
        assert len(step["heads"]) == 4 * (1 if model.cfg.n_recur == 1 else model.cfg.n_core) and sum(step["counts"].values()) == len(step["heads"])
        for head in step["heads"]:
            place = (0, i) if model.cfg.n_recur == 1 else (i, head["block"])
            rows = [heads[head["head"]] for look in looks for heads in look[place][2:]]
            mean = lambda of: sum(map(of, rows)) / len(rows)  # noqa: E731
            assert len(rows) == 20
            assert head["previous"] == pytest.approx(mean(lambda p: p[-2])) and head["self"] == pytest.approx(mean(lambda p: p[-1]))
            assert head["first"] == pytest.approx(mean(lambda p: p[0]))
            assert head["type"] == head_type(*(head[name] for name in ("previous", "self", "first", "spread")))
            assert head["spread"] == pytest.approx(mean(lambda p: -sum(x * math.log(x) for x in p if x) / math.log(len(p))))


def test_a_head_has_the_type_of_where_it_looks_most():
    looks = ((0.3, 0.2, 0.1, 0.9), (0.31, 0.4, 0.1, 0.3), (0.1, 0.3, 0.6, 0.3), (0.29, 0.2, 0.2, 0.75), (0.29, 0.29, 0.2, 0.74))
    assert [head_type(*look) for look in looks] == [*HEAD_TYPES[:3], "broadcast", "mixed"]
    model = exact(n_core=1)
    with torch.no_grad():
        model.recursion.core[0].attention.query.weight.zero_()             # all scores alike
        with (watch := HeadWatch(model)):
            taken_apart(model, some_ids(1, 12))
    assert watch.numbers()["steps"][0]["counts"] == {"previous token": 0, "self": 0, "broadcast": 4, "mixed": 0}


@pytest.mark.parametrize("name", ["expert", "token", "share"])
def test_heads_that_see_a_part_or_another_steps_keys_are_left_out_and_the_reason_is_told(name):
    model = exact(**LOOPS[name])
    with torch.no_grad(), (watch := HeadWatch(model)):
        taken_apart(model, some_ids(1, 12))
    assert watch.numbers() == {"why": "kv='share'" if name == "share" else f"router={name!r}", "steps": []}


@pytest.mark.parametrize("block_size", [1, 2])
def test_where_there_are_no_three_places_no_head_has_a_type(block_size):
    model = exact(n_core=2, block_size=block_size)
    with torch.no_grad(), (watch := HeadWatch(model)):
        taken_apart(model, some_ids(2, block_size))
    assert watch.numbers() == {"why": "", "steps": []}


# ---- who gains


def some_tokens(n=97, n_windows=7, seed=0):
    rng = np.random.default_rng(seed)
    initial, window = rng.gamma(2, 2, n).round(1), np.sort(rng.integers(n_windows, size=n))                # with ties
    return initial, initial * 0.3 + rng.normal(0, 0.3, n), window


def test_tenths_are_cut_by_rank_and_kept_window_by_window():
    initial, value, window = some_tokens()
    order = sorted(range(97), key=lambda i: (initial[i], i))
    tenths = in_tenths(initial, value, window, 7)
    assert tenths.shape == (10, 2, 7) and set(tenths[:, 1].sum(1)) == {9, 10}
    for d, (sums, counts) in enumerate(tenths):
        mine = [i for place, i in enumerate(order) if place * 10 // 97 == d]
        assert counts.tolist() == [sum(window[i] == w for i in mine) for w in range(7)]
        assert sums.tolist() == pytest.approx([sum(value[i] for i in mine if window[i] == w) for w in range(7)])


def test_improvement_by_tenth_is_counted_as_by_hand():
    initial, final, window = some_tokens()
    final[:4], final[4:8] = initial[:4], initial[4:8] + 0.05              # no better, and a little worse
    n = improvement(initial, final, window, 7)
    order = sorted(range(97), key=lambda i: (initial[i], i))
    groups = [[i for place, i in enumerate(order) if place * 10 // 97 == d] for d in range(10)]
    mean = lambda of, group: sum(of[i] for i in group) / len(group)  # noqa: E731
    assert [t["initial"] for t in n["tenths"]] == pytest.approx([mean(initial, group) for group in groups])
    gains = [mean(initial, group) - mean(final, group) for group in groups]
    assert [t["improvement"] for t in n["tenths"]] == pytest.approx(gains) and n["hardest_minus_easiest"]["value"] == pytest.approx(gains[-1] - gains[0])
    slope, offset = np.polyfit([mean(initial, group) for group in groups], gains, 1)
    rest = sum((gain - offset - slope * mean(initial, group)) ** 2 for gain, group in zip(gains, groups))
    assert n["r2"]["value"] == pytest.approx(1 - rest / sum((gain - np.mean(gains)) ** 2 for gain in gains)) and n["r2"]["value"] > 0.9
    assert n["better"]["value"] == sum(b < a for a, b in zip(initial, final)) / 97
    for name in ("hardest_minus_easiest", "r2", "better"):
        assert n[name]["interval"][0] <= n[name]["value"] <= n[name]["interval"][1]


def test_a_line_explains_all_of_a_line_and_nothing_of_a_hump():
    x = np.arange(10.0)
    assert explained(x, 3 - 2 * x) == pytest.approx(1) and explained(x, (x - 4.5) ** 2) == pytest.approx(0, abs=1e-12)


# ---- the command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/gated, out/dense, out/expert, out/token and out/sequence, trained for some steps."""
    return train_runs(tmp_path_factory.mktemp("steps"), {"dense": DENSE | dict(n_core=3), "sequence": SEQUENCE, "gated": dict(state_noise=0.5),
                          "expert": dict(update="replace", router="expert", depth_sampling="fixed", max_iters=1),
                          "token": dict(update="replace", router="token", depth_sampling="fixed", max_iters=1)})


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(*words, **flags) -> (lines, the part's record, stderr) of eval.py steps; no picture."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(evaluation, "draw_steps", lambda measured: None)

    def go(**changes):
        capsys.readouterr()
        evaluation.main(["steps", *flags(**{"device": "cpu", "eval_tokens": 320, "out_dir": "out/gated", **changes})])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last)["parts"]["steps"], err
    return go


def test_the_table_of_steps_is_that_of_a_pass_over_all_its_windows(go):
    lines, part, _ = go()
    run = open_run("out/gated")
    ids_BT, targets_BT = run.split.batch(train.fixed_windows(run.split, 320))
    with torch.no_grad():
        p = taken_apart(run.model, ids_BT)
        losses = [run.model(ids_BT, targets_BT, depth=r).losses["ce"].item() for r in range(5)]
    assert (part["windows"], part["tokens"], [step["step"] for step in part["steps"]]) == (10, 320, [1, 2, 3, 4])
    for step, old, new in zip(part["steps"], p.states, p.states[1:]):
        r = step["step"]
        assert step["update_norm"]["value"] == pytest.approx((new - old).norm(dim=-1).mean().item(), rel=1e-5) and step["took"] == 1
        assert step["gain"]["value"] == pytest.approx(losses[r - 1] - losses[r], abs=1e-5)
        assert step["nats_per_token"]["value"] == pytest.approx(losses[r], abs=1e-5)
        assert step["gain"]["interval"][0] < step["gain"]["value"] < step["gain"]["interval"][1]
    assert part["steps"][0]["update_cosine"] is None and part["steps"][1]["update_cosine"]["value"] == pytest.approx(
        torch.cosine_similarity(p.states[2] - p.states[1], p.states[1] - p.states[0], dim=-1).mean().item(), abs=1e-5)
    flat = [x_BTD.flatten(0, 1).double().numpy() for x_BTD in p.states]
    assert np.array(part["cka"]["matrix"]) == pytest.approx(np.array([[slow_cka(a, b) for b in flat] for a in flat]), abs=1e-4)
    cells = [line.split() for line in lines if line.startswith("out/gated")]
    assert [row[:4] for row in cells[:4]] == [["out/gated", str(r), "100.0%", f"{part['steps'][r - 1]['update_norm']['value']:.3f}"] for r in range(1, 5)]
    assert f"{part['improvement']['tenths'][-1]['improvement']:+.3f}" in cells[4]


@pytest.mark.slow
def test_the_batch_size_changes_no_number(go):
    one, three = (go(batch_size=n)[1] for n in (1, 3))
    flat = lambda x: [y for v in (x.values() if isinstance(x, dict) else x) for y in (flat(v) if isinstance(v, (dict, list)) else [v])]  # noqa: E731
    for name in ("steps", "cka", "improvement", "heads"):
        for a, b in zip(flat(one[name]), flat(three[name]), strict=True):
            assert a == (pytest.approx(b, abs=2e-4) if isinstance(b, float) else b)


@pytest.mark.slow
def test_the_papers_claims_are_asked_of_a_loop_and_not_of_a_dense_model(go):
    lines, part, _ = go(compare="out/dense")
    dense = part["compare"][0]
    fall, hard, line, alike = part["claims"]
    norms = [step["update_norm"]["value"] for step in part["steps"]]
    assert fall["value"] == pytest.approx(norms[-1] - norms[0]) and fall["below"] == 0
    assert hard["value"] == part["improvement"]["hardest_minus_easiest"]["value"] and hard["above"] == 0
    assert line["value"] == part["improvement"]["r2"]["value"] and line["above"] == 0.9
    assert alike["value"] == pytest.approx(part["cka"]["neighbours"] - dense["cka"]["neighbours"]) and "out/dense" in alike["claim"]
    assert dense["cka"]["neighbours"] == pytest.approx((dense["cka"]["matrix"][1][2] + dense["cka"]["matrix"][2][3]) / 2)
    assert dense["claims"] == [] and len(dense["steps"]) == 3 and any(text.split()[:2] == ["out/dense", "3/3"] for text in lines)
    assert go(out_dir="out/dense", compare="out/gated")[1]["claims"] == []
    for c in part["claims"]:
        there = [edge > c["above"] if "above" in c else edge < c["below"] for edge in c["interval"]]           # both ends of the interval
        assert c["holds"] is (True if all(there) else None if any(there) else False)


def test_routed_runs_and_those_with_one_depth_say_what_they_have_not(go):
    lines, part, _ = go(out_dir="out/expert", compare="out/sequence")
    assert any("out/expert: heads are left out, as with router='expert'" in line for line in lines) and part["heads"]["steps"] == []
    run = open_run("out/expert")
    depth_BT = run.model(run.split.batch(train.fixed_windows(run.split, 320))[0]).depth_BT
    assert [step["took"] for step in part["steps"]] == [(depth_BT > r).double().mean().item() for r in range(4)] and part["steps"][3]["took"] < 1
    assert [c["claim"].split()[0] for c in part["claims"]] == ["harder", "the"] and part["compare"][0]["claims"]
    other = part["compare"][0]
    assert other["improvement"] is None and [step["gain"] for step in other["steps"]] == [None, None] and other["used"]["depth"] == [2]
    assert any("out/sequence: one depth only" in line for line in lines)


def test_a_token_choice_run_has_a_loss_before_all_steps_and_after_them(go):
    lines, part, _ = go(out_dir="out/token")
    run = open_run("out/token")
    ids_BT, targets_BT = run.split.batch(train.fixed_windows(run.split, 320))
    loss = run.model(ids_BT, targets_BT).losses["ce"].item()
    assert [step["gain"] for step in part["steps"]] == 4 * [None] and [step["nats_per_token"] for step in part["steps"][:3]] == 3 * [None]
    assert part["steps"][3]["nats_per_token"]["value"] == pytest.approx(loss, abs=1e-5) and part["used"]["depth"] == [0, 4]
    assert [line.split()[9:] for line in lines if line.split()[:2] == ["out/token", "4"]][0][-2:] == ["-", "-"]


@pytest.mark.slow
def test_the_picture_has_a_line_and_a_map_for_every_run(go, monkeypatch):
    from matplotlib.figure import Figure
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(evaluation, "draw_steps", DRAW)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure) or savefig(figure, *args, **kwargs))
    part = go(compare="out/dense")[1]
    assert part["picture"] == "out/gated/steps.png" and Path(part["picture"]).read_bytes()[:4] == b"\x89PNG"
    norms, cosines, gains, *maps, _ = drawn[0].axes
    assert [text.get_text() for text in norms.get_legend().get_texts()] == ["1+1x4+1 gate (out/gated)", "0+3x1+0 replace (out/dense)"]
    assert norms.get_lines()[0].get_ydata().tolist() == [step["relative_update"]["value"] for step in part["steps"]]
    assert gains.get_lines()[1].get_ydata().tolist() == [tenth["improvement"] for tenth in part["compare"][0]["improvement"]["tenths"]]
    assert [axes.images[0].get_array().tolist() for axes in maps] == [part["cka"]["matrix"], part["compare"][0]["cka"]["matrix"]]
