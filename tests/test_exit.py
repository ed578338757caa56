"""Early exit: who leaves the loop, what the others see of it, and what it saves.

    python -m pytest -q tests/test_exit.py
"""
import pytest
import spec
import torch
from tiny import all_pairs, layout, loud, some_ids, tiny

from model import make_cache

NORMS = {"plain": {}, "sandwich": dict(sandwich_norm=True), "loop": dict(loop_norm=True), "both": dict(sandwich_norm=True, loop_norm=True)}
EXITS = [(None, None), ("kl", 0.5), ("kl", 3.0), ("cdf", 0.4), ("cdf", 0.9)]


def config_of(case):
    loss = "every" if case["exit"][0] == "cdf" else "last"
    return tiny(**layout(case["layout"]), **NORMS[case["norms"]], loss=loss, bias=case["block"] == "gpt2", n_kv_head=2, router_alpha=0.7 if case["router"] == "expert" else None,
                **{name: case[name] for name in ("block", "update", "state_init", "lora_rank", "kv", "router")})


def legal(case):
    routed, loops = case["router"] != "none", "loop" in case["norms"] or case["norms"] == "both"
    return not (case["state_init"] == "random" and case["update"] == "replace" or routed and (loops or case["exit"][0] == "cdf")
                or case["depth"] == 5 and (routed or case["lora_rank"]))


# Few models in which every two choices meet.
GRID = all_pairs({
    "layout": ["0+2x3+0", "1+2x3+1", "1+1x3+2"], "block": ["gpt2", "llama"], "update": ["replace", "inject", "gate"], "state_init": ["anchor", "random"],
    "lora_rank": [0, 2], "norms": list(NORMS), "kv": ["own", "share", "share_k", "share_v"], "router": ["none", "expert"], "exit": EXITS,
    "depth": [1, None, 5]}, legal)


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
