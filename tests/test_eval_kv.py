"""K and V across steps, in eval.py's part router: against the slow model, which keeps every token's K and V in a dict.

    python -m pytest -q tests/test_eval_kv.py
"""
import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from spec import Sequence
from tiny import layout, loud, some_ids, tiny

from eval import kv_by_step, kv_claims, measure_kv, show_kv, walk_kv


class Windows:
    """A split of these rows, in place of one on the disk."""
    n_windows = 100

    def __init__(self, ids_WT):
        self.ids_WT = ids_WT

    def batch(self, starts, device):
        return self.ids_WT[starts], self.ids_WT[starts]


def a_run(model, ids_WT, batch_size=2):
    return SimpleNamespace(model=model, split=Windows(ids_WT), batch_size=batch_size, device="cpu", autocast=contextlib.nullcontext(), name="loud")


def by_hand(model, row):
    """{(name, step, block): {position: vector}} of one row, by the slow model."""
    sequence = Sequence(model.cfg, model.state_dict())
    for id in row:
        sequence.token(id)
    vectors = {}
    for (step, j), entries in ((place, entries) for place, entries in sequence.memory.items() if isinstance(place[0], int)):
        there = [position for position, taken in enumerate(sequence.all_taken) if taken > step]
        for position, pair in zip(there, entries, strict=True):
            for name, heads in zip("KV", pair):
                vectors.setdefault((name, step, j), {})[position] = torch.cat(list(heads))
    return vectors


CASES = {"expert": dict(router="expert"), "token": dict(router="token"), "gate": dict(update="gate"), "grouped": dict(router="expert", n_kv_head=2)}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_k_and_v_of_every_step_are_those_that_the_slow_model_keeps(changes):
    model, ids_BT = loud(tiny(**{**layout("1+2x3+1"), **changes})).double(), some_ids(2, 9)
    steps = list(kv_by_step(model, ids_BT))
    wanted = [by_hand(model, row.tolist()) for row in ids_BT]
    assert len(steps) == 3
    n_missing = 0
    for step, made in enumerate(steps):
        for (name, j), x_BTW in made.items():
            for b, vectors in enumerate(wanted):
                for t in range(9):
                    if t in vectors.get((name, step, j), {}):
                        torch.testing.assert_close(x_BTW[b, t].double(), vectors[name, step, j][t], rtol=1e-4, atol=1e-4)
                    else:
                        assert x_BTW[b, t].isnan().all()
                        n_missing += 1
    assert bool(n_missing) == ("router" in changes)                      # some stayed behind, or there is nothing to see here


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_norms_and_cosines_of_k_and_v_are_means_over_the_tokens_that_took_both_steps(changes):
    model, ids_WT = loud(tiny(**{**layout("1+2x3+1"), **changes})).double(), some_ids(3, 9)
    rows = [by_hand(model, row.tolist()) for row in ids_WT]
    record = measure_kv(a_run(model, ids_WT), [0, 1, 2])
    mean = lambda values: sum(values) / len(values) if values else None          # noqa: E731
    pooled = {}
    for name in "KV":
        for step in range(3):
            norms = [[float(x.norm()) for v in rows for x in v.get((name, step, j), {}).values()] for j in range(2)]
            assert record[name]["norm"]["blocks"][step] == pytest.approx([mean(block) for block in norms], rel=1e-5)
            assert record[name]["norm"]["by_step"][step] == pytest.approx(mean(sum(norms, [])), rel=1e-5)
        for step in range(2):
            cosines = [[float(x @ v[name, step + 1, j][t] / x.norm() / v[name, step + 1, j][t].norm())
                        for v in rows for t, x in v.get((name, step, j), {}).items() if t in v.get((name, step + 1, j), {})] for j in range(2)]
            assert record[name]["cosine"]["blocks"][step] == pytest.approx([mean(block) for block in cosines], abs=1e-5)
            pooled.setdefault(name, []).extend(sum(cosines, []))
        assert record[name]["cosine"]["all"]["value"] == pytest.approx(mean(pooled[name]), abs=1e-5)
    if record["V_minus_K"]:
        assert record["V_minus_K"]["value"] == pytest.approx(mean(pooled["V"]) - mean(pooled["K"]), abs=1e-5)
        low, high = record["V_minus_K"]["interval"] or (-2, 2)               # none where a draw of three windows may hold nobody
        assert low <= record["V_minus_K"]["value"] <= high


@pytest.mark.parametrize("kv, made_again", [("share", ""), ("share_k", "V"), ("share_v", "K")])
def test_k_and_v_that_the_steps_share_have_no_next_to_compare_with(kv, made_again, capsys):
    model = loud(tiny(**layout("1+2x3+1"), router="token", kv=kv))
    record = measure_kv(a_run(model, some_ids(4, 32)), [0, 1, 2, 3])
    for name in "KV":
        assert record[name]["norm"]["by_step"][0] > 0
        assert (record[name]["cosine"]["by_step"][0] is not None) == (record[name]["norm"]["by_step"][1] is not None) == (name == made_again)
    assert record["V_minus_K"] is None and [c["claim"].split()[0] for c in kv_claims(record)] == {"": [], "K": ["keys"], "V": ["values"]}[made_again]
    show_kv([(SimpleNamespace(name="loud"), {"kv": record, "depth_shares": [0, 0, 0, 1]})])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 and "-" in lines[2].split() and math.isclose(float(lines[2].split()[2]), record["K"]["norm"]["by_step"][0], abs_tol=1e-3)


def test_a_window_in_which_nobody_took_two_steps_leaves_the_others_their_interval(monkeypatch):
    model, ids_WT = loud(tiny(**layout("1+1x3+1"), router="expert")), some_ids(8, 9)
    rows = walk_kv(a_run(model, ids_WT), range(8))
    for (_, what, *_), pair_2W in rows.items():
        pair_2W[:, 3] *= what == "norm"                                  # nobody in window 3
    monkeypatch.setattr("eval.walk_kv", lambda *args: rows)
    record = measure_kv(a_run(model, ids_WT), range(8))
    for found in (record["K"]["cosine"]["all"], record["V"]["cosine"]["all"], record["V_minus_K"]):
        assert found["interval"][0] <= found["value"] <= found["interval"][1]


def test_k_and_v_do_not_depend_on_how_windows_are_batched_and_leave_no_hook_behind():
    model, ids_WT = loud(tiny(**layout("1+2x3+1"), router="expert")), some_ids(5, 32)
    one, all_five = (measure_kv(a_run(model, ids_WT, size), range(5)) for size in (1, 5))
    assert one["V_minus_K"]["value"] == pytest.approx(all_five["V_minus_K"]["value"], abs=1e-6)
    assert np.allclose(one["K"]["norm"]["blocks"], all_five["K"]["norm"]["blocks"])
    assert not any(part._forward_hooks for part in model.modules())


def test_what_the_paper_says_of_k_and_v_is_judged_by_this_runs_intervals():
    cosine = lambda *interval: {"cosine": {"all": {"value": sum(interval) / 2, "interval": list(interval)}}}                # noqa: E731
    verdicts = lambda k, v, less: [c["holds"] for c in kv_claims({"K": cosine(*k), "V": cosine(*v), "V_minus_K": {"value": sum(less) / 2, "interval": less}})]      # noqa: E731
    assert verdicts((0.91, 0.95), (0.7, 0.8), [-0.2, -0.1]) == [True, False, True]
    assert verdicts((0.89, 0.95), (0.91, 0.92), [0.1, 0.2]) == [None, True, False]
