"""The papers' claims on a run: a number, its interval over windows, and which side of the claim that lies on.

    python -m pytest -q tests/test_eval_claims.py
"""
import numpy as np
import pytest

import eval as evaluation
from eval import claim, judge, show_claims, statistic

RNG = np.random.default_rng(5)
NATS_3W, COUNTS_W = RNG.normal((64, 60, 59.9), 8, (60, 3)).T.copy(), np.array([32.0] * 59 + [7.0])


def drawn_by_hand(sums, counts, of):
    """`of` the means of 1,000 resamples of the windows, and its middle 95%; counts: a list for each quantity."""
    rng, values = np.random.default_rng(0), []
    for _ in range(1000):
        draw = rng.integers(len(counts[0]), size=len(counts[0]))
        means = []
        for quantity, n in zip(sums, counts):
            total = number = 0.0
            for window in draw:
                total, number = total + quantity[window], number + n[window]
            means.append(total / number)
        values.append(of(means))
    values.sort()
    at = lambda q: values[int(q * 999)] + (q * 999 % 1) * (values[int(q * 999) + 1] - values[int(q * 999)])  # noqa: E731
    return [at(0.025), at(0.975)]


def test_the_number_of_a_claim_and_its_interval_are_those_of_plain_loops():
    found = statistic(NATS_3W, COUNTS_W, lambda m: (m[:-1] - m[1:]).min(0))
    means = [sum(row) / sum(COUNTS_W) for row in NATS_3W]
    assert found["value"] == pytest.approx(min(means[0] - means[1], means[1] - means[2]), abs=1e-12)
    assert found["interval"] == pytest.approx(drawn_by_hand(NATS_3W, [COUNTS_W] * 3, lambda m: min(m[0] - m[1], m[1] - m[2])), abs=1e-9)


def test_every_quantity_of_a_claim_may_have_its_own_counts():
    counts = np.stack([COUNTS_W, np.arange(60) % 7, COUNTS_W + 1.0])                   # as tokens of a decile, which windows hold some of
    ratio = lambda m: m[0] / m[1] - m[2]  # noqa: E731
    found = statistic(NATS_3W, counts, ratio)
    assert found["value"] == pytest.approx(ratio([sum(row) / sum(n) for row, n in zip(NATS_3W, counts)]), abs=1e-12)
    assert found["interval"] == pytest.approx(drawn_by_hand(NATS_3W, counts, ratio), abs=1e-9)


def test_quantities_of_a_claim_see_the_same_draws_of_windows():
    assert statistic(np.stack([NATS_3W[0], NATS_3W[0]]), COUNTS_W, lambda m: m[0] - m[1]) == {"value": 0.0, "interval": [0.0, 0.0]}
    low, high = statistic(np.stack([NATS_3W[0] + COUNTS_W, NATS_3W[0]]), COUNTS_W, lambda m: m[0] - m[1])["interval"]
    assert (low, high) == pytest.approx((1, 1), abs=1e-12)                              # a nat per token more in every window: no doubt at all


@pytest.mark.parametrize("interval, side, holds", [
    ([0.1, 0.3], {}, True), ([-0.3, -0.1], {}, False), ([-0.1, 0.3], {}, None), ([0.0, 0.3], {}, None), (None, {}, None),
    ([0.6, 0.7], dict(above=0.5), True), ([0.4, 0.7], dict(above=0.5), None), ([0.3, 0.4], dict(above=0.5), False),
    ([0.6, 0.7], dict(below=0.5), False), ([0.4, 0.7], dict(below=0.5), None), ([0.3, 0.4], dict(below=0.5), True), ([-2.0, -1.0], dict(below=0.0), True)])
def test_a_claim_holds_where_its_whole_interval_is_on_its_side(interval, side, holds):
    record = judge("x falls", "GRT", 0.2, interval, **side)
    assert record == {"claim": "x falls", "source": "GRT", "value": 0.2, "interval": interval, **(side or {"above": 0.0}), "holds": holds}


def test_a_claim_is_judged_by_the_data_of_the_run():
    clear, unclear = NATS_3W[0] - NATS_3W[1], NATS_3W[1] - NATS_3W[2]
    assert [claim("", "", d, COUNTS_W)["holds"] for d in (clear, unclear, -clear)] == [True, None, False]
    assert claim("", "", clear, COUNTS_W, below=0.0)["holds"] is False and claim("", "", clear, COUNTS_W, above=5.0)["holds"] is False


def test_a_claim_without_an_interval_is_not_decided():
    for sums, counts in ((np.array([64.0]), np.array([32.0])), (np.full(8, np.nan), np.full(8, 32.0))):         # one window; a run that diverged
        record = claim("", "", sums, counts)
        assert record["interval"] is None and record["holds"] is None
    rare = np.zeros((1, 40)), np.array([[0.0] * 39 + [5.0]])                            # what most draws do not contain has none either
    assert claim("", "", *rare)["interval"] is None


def test_the_table_of_claims_has_the_number_the_interval_and_the_verdict(capsys):
    class run:
        name = "out/x"

    show_claims(run, [judge("rises", "GRT", 0.25, [0.125, 0.5]), judge("falls", "MoR", 0.25, [0.125, 0.5], below=0.0), judge("is even", "GRT", 0.25, [-1.0, 0.5]),
                      judge("is there", "GRT", 0.25, None, above=0.5)])
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert "claims on out/x" in title and head.split() == ["claim", "paper", "says", "here", "95%", "interval", "verdict"]
    assert [" ".join(row.split()) for row in rows] == ["rises GRT > 0 0.25 0.125 .. 0.5 holds", "falls MoR < 0 0.25 0.125 .. 0.5 does not hold",
                                                       "is even GRT > 0 0.25 -1 .. 0.5 not separated", "is there GRT > 0.5 0.25 - no interval"]
    assert set(evaluation.VERDICTS) == {True, False, None}
