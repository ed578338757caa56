"""eval.py's part gate: what the gate keeps, whom it opens for and what it listens to, against plain loops over the slow model.

    python -m pytest -q tests/test_eval_gate.py
"""
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from spec import Sequence
from test_eval_steps import some_tokens
from tiny import layout, loud, some_ids, tiny
from toy import DENSE, flags, open_run, refusal, train_runs

import eval as evaluation
import train
from eval import BINS, correlation, difficulty, gate_values, gate_weights, taken_apart

DRAW = evaluation.draw_gate


class Gates(Sequence):
    """The slow model, which tells (state, proposal, gate) of each token at every step that it takes."""

    def __init__(self, cfg, weights):
        super().__init__(cfg, weights)
        self.rows = []

    def token(self, id):
        self.rows.append([])
        super().token(id)

    def write(self, h, y, e, noise):
        g = super().write(h, torch.zeros_like(y), e, noise) / h                # of g h + (1 - g) y
        self.rows[-1].append((h.tolist(), y.tolist(), g.tolist()))
        return super().write(h, y, e, noise)


def slow_values(steps):
    """{name: value} of one token at each step."""
    length = lambda x: math.sqrt(sum(a * a for a in x))  # noqa: E731
    for h, o, g in steps:
        yield {"gate": sum(g) / len(g), "square": sum(a * a for a in g) / len(g), "shut": sum(a > 0.95 for a in g) / len(g),
               "open": sum(a < 0.05 for a in g) / len(g), "openness": length([(1 - c) * (b - a) for a, b, c in zip(h, o, g)]) / length(o)}


@pytest.mark.parametrize("changes", [dict(layout("1+1x4+1"), gate_bias=0.0), dict(layout("1+2x3+0"), router="expert", block="llama")],
                         ids=["all tokens", "routed"])
def test_what_the_gate_does_is_counted_as_by_plain_loops(changes):
    model, ids_BT = loud(tiny(update="gate", **changes)).double(), some_ids(2, 12)
    with torch.no_grad():
        model.recursion.update.gate.down.weight.mul_(4)                    # gates at both ends too
        found = gate_values(taken_apart(model, ids_BT))
    wanted = {}
    for b in range(2):
        slow = Gates(model.cfg, model.state_dict())
        for id in ids_BT[b].tolist():
            slow.token(id)
        for t, steps in enumerate(slow.rows):
            for r, values in enumerate(slow_values(steps), 1):
                wanted.update({(name, r, b, t): value for name, value in values.items()})
    told = {(name, r, b, t): x_BT[b, t].item() for name, rows in found.items() for r, x_BT, in_BT in rows for b, t in in_BT.nonzero().tolist()}
    assert told.keys() == wanted.keys() and all(told[key] == pytest.approx(wanted[key], abs=1e-6) for key in wanted)
    assert max(told[key] for key in told if key[0] == "shut") > 0 < max(told[key] for key in told if key[0] == "open")


def test_a_correlation_and_its_interval_are_those_over_tokens():
    x, y, window = some_tokens(n=2000, n_windows=40)
    c = correlation(1000 + x, y, window, 40)
    assert c["value"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12) and c["interval"][0] < c["value"] < c["interval"][1]
    rng = np.random.default_rng(0)                                         # the draws of bootstrap
    draws = [np.concatenate([np.flatnonzero(window == w) for w in rng.integers(40, size=40)]) for _ in range(1000)]
    assert c["interval"] == pytest.approx(np.quantile([np.corrcoef(x[draw], y[draw])[0, 1] for draw in draws], (0.025, 0.975)).tolist(), abs=1e-9)
    assert correlation(x, -2 * x, window, 40)["value"] == pytest.approx(-1)


def test_the_gate_against_difficulty_is_a_mean_for_each_tenth_of_the_tokens():
    initial, opened, window = some_tokens()
    d, order = difficulty(initial, opened, window, 7), sorted(range(97), key=lambda i: (initial[i], i))
    groups = [[i for place, i in enumerate(order) if place * 10 // 97 == tenth] for tenth in range(10)]
    assert d["tenths"] == pytest.approx([sum(opened[i] for i in group) / len(group) for group in groups]) and d["tenths"][9] > d["tenths"][0]
    assert d["value"] == pytest.approx(np.corrcoef(initial, opened)[0, 1])


def test_the_weights_are_taken_apart_into_state_and_anchor():
    update = loud(tiny(**layout("1+1x2+1"), update="gate")).recursion.update
    w = gate_weights(update)
    up = update.gate.up.weight.detach().double().numpy()                   # (D, 2 D), state first, as GateUnit joins them
    for name, half in (("state", up[:, :16]), ("anchor", up[:, 16:])):
        squares = np.linalg.eigvalsh(half.T @ half)[::-1]
        assert w["singular_values"][name] == pytest.approx(np.sqrt(squares[: evaluation.TOP_VALUES]).tolist(), rel=1e-6)
        assert w["frobenius"][name] == pytest.approx(math.sqrt(sum(float(a) ** 2 for row in half for a in row)))
    assert w["frobenius"]["state_over_anchor"] == pytest.approx(w["frobenius"]["state"] / w["frobenius"]["anchor"])
    pairs = zip(update.from_state.weight.tolist(), update.from_anchor.weight.tolist())
    rows = [sum(a * b for a, b in zip(x, y)) / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y)) for x, y in pairs]
    assert w["projection_row_cosine"]["mean"] == pytest.approx(sum(rows) / 16) and w["projection_row_cosine"]["std"] == pytest.approx(np.std(rows))
    with torch.no_grad():
        update.from_anchor.weight.copy_(-3 * update.from_state.weight)
        update.gate.up.weight[:, 16:] = 0
    w = gate_weights(update)
    assert w["projection_row_cosine"]["mean"] == pytest.approx(-1) and w["frobenius"]["anchor"] == 0 and w["frobenius"]["state"] > 1
    with torch.no_grad():
        update.gate.up.weight[3, 3] = math.nan                             # a run that diverged has no singular values
    assert np.isnan(gate_weights(update)["singular_values"]["state"]).all() and gate_weights(update)["singular_values"]["anchor"] == 8 * [0]


# ---- the command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/gated, out/routed, a gate beside a router, and, without a gate, out/dense, trained for some steps."""
    return train_runs(tmp_path_factory.mktemp("gate"), {"dense": DENSE, "routed": dict(router="expert", depth_sampling="fixed", max_iters=1), "gated": {}})


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(**flags) -> (lines, the part's record, stderr) of eval.py gate; no picture."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(evaluation, "draw_gate", lambda measured: None)

    def go(**changes):
        capsys.readouterr()
        evaluation.main(["gate", *flags(**{"device": "cpu", "eval_tokens": 320, "out_dir": "out/gated", **changes})])
        out, err = capsys.readouterr()
        *lines, last = out.splitlines()
        return lines, json.loads(last)["parts"]["gate"], err
    return go


def passed(folder):
    """(a Pass over the windows of `go`, losses at depth 0 (W, T)) of a run."""
    run = open_run(folder)
    ids_BT, targets_BT = run.split.batch(train.fixed_windows(run.split, 320))
    with torch.no_grad():
        logits_BTV = run.model(ids_BT, depth=0).logits
        return taken_apart(run.model, ids_BT), torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none").double().numpy()


@pytest.mark.parametrize("name", ["gated", "routed"])
def test_the_table_of_the_gate_is_that_of_a_pass_over_all_its_windows(go, name):
    lines, part, _ = go(out_dir=f"out/{name}")
    p, nats_WT = passed(f"out/{name}")
    opens, tooks = [], []
    for step, g_BTD, o_BTD, h_BTD, took_BT in zip(part["steps"], p.gates, p.proposals, p.states, p.took):
        g, o, h = (x_BTD[took_BT].double() for x_BTD in (g_BTD, o_BTD, h_BTD))
        assert step["gate"]["value"] == pytest.approx(g.mean().item(), abs=1e-6) and step["std"] == pytest.approx(g.std(correction=0).item(), abs=1e-6)
        for end, share in (("shut", g > 0.95), ("open", g < 0.05)):
            assert step[end]["value"] == pytest.approx(share.double().mean().item())
        assert step["openness"]["value"] == pytest.approx((((1 - g) * (o - h)).norm(dim=-1) / o.norm(dim=-1)).mean().item(), rel=1e-6)
        assert step["histogram"] == np.histogram(g.numpy(), BINS, (0, 1))[0].tolist() and sum(step["histogram"]) == g.numel() > 0
        opened, here = 1 - g_BTD.double().mean(-1).numpy(), took_BT.numpy()
        assert step["difficulty"]["value"] == pytest.approx(np.corrcoef(opened[here], nats_WT[here])[0, 1], abs=1e-5)
        opens.append(np.where(here, opened, np.nan))
        tooks.append(here.mean())
    assert part["difficulty"]["value"] == pytest.approx(np.corrcoef(np.nanmean(opens, 0).flatten(), nats_WT.flatten())[0, 1], abs=1e-5)
    assert (part["windows"], part["tokens"]) == (10, 320) and (min(tooks) < 1) == (name == "routed")
    cells = [line.split() for line in lines if line.startswith("out/")]
    assert [row[:3] for row in cells[:4]] == [[f"out/{name}", str(r), f"{part['steps'][r - 1]['gate']['value']:.4f}"] for r in range(1, 5)]


def test_the_papers_claims_are_the_last_step_minus_the_first(go):
    part = go()[1]
    rises, shuts, falls = part["claims"]
    assert go(out_dir="out/routed")[1]["claims"] == []                     # others take the last step than the first
    first, last = part["steps"][0], part["steps"][-1]
    for c, name, side in ((rises, "gate", "above"), (shuts, "shut", "above"), (falls, "openness", "below")):
        assert c["value"] == pytest.approx(last[name]["value"] - first[name]["value"], abs=1e-12) and c[side] == 0
        assert c["interval"][0] <= c["value"] <= c["interval"][1]


def test_a_run_without_a_gate_is_refused_or_left_out(go):
    assert "out/dense has no gate" in refusal(evaluation.main, ["gate", "--out_dir=out/dense", "--device=cpu"])
    part, err = go(compare="out/dense")[1:]
    assert part["compare"] == [] and "note: out/dense has no gate" in err


@pytest.mark.slow
def test_the_picture_shows_every_steps_gates_and_a_line_for_every_run(go, monkeypatch):
    from matplotlib.figure import Figure
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(evaluation, "draw_gate", DRAW)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure) or savefig(figure, *args, **kwargs))
    part = go(compare="out/routed")[1]
    assert part["picture"] == "out/gated/gate.png" and Path(part["picture"]).read_bytes()[:4] == b"\x89PNG"
    spread, means, opens, hard = drawn[0].axes
    assert [(patch.get_data().values * 16 * 320).round().tolist() for patch in spread.patches] == [step["histogram"] for step in part["steps"]]
    assert means.get_lines()[0].get_ydata().tolist() == [step["gate"]["value"] for step in part["steps"]]
    assert [line.get_ydata().tolist() for line in opens.get_lines()] == [[step["openness"]["value"] for step in n["steps"]] for n in (part, *part["compare"])]
    assert hard.get_lines()[1].get_ydata().tolist() == part["compare"][0]["difficulty"]["tenths"]
