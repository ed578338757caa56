"""Decoding: the K/V cache gives what the full forward pass gives, and generate does what its docstring says.

    python -m pytest -q tests/test_cache.py
"""
import copy
import itertools
import math

import pytest
import spec
import torch
from tiny import GRID, case_config, case_name, loud, some_ids, tiny

from model import GPT, make_cache, sample

NAMED = {
    "gpt2": dict(n_core=3, bias=True),
    "llama with grouped queries": dict(block="llama", n_core=3, n_kv_head=2),
    "recursive, cycle": dict(n_core=2, n_recur=3),
    "recursive, middle_sequence": dict(n_prelude=1, n_core=2, n_recur=2, n_coda=1, sharing="middle_sequence"),
    "grt": dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate", state_noise=0.1, gate_noise=0.1),
    "inject, llama": dict(block="llama", n_prelude=1, n_core=1, n_recur=4, n_coda=1, update="inject"),
}
GRT = NAMED["grt"]


def full(model, ids_BT, depth=None):
    with torch.no_grad():
        return model(ids_BT, depth=depth).logits


def close(a, b):
    return torch.allclose(a, b, atol=1e-4)


# -------------------------------------------------------------------------------------------------- the cache is the text


@pytest.mark.parametrize("case", GRID, ids=case_name)
def test_cached_logits_equal_the_full_forward(case):
    """Prompts first, the shorter one padded with noise, then token by token."""
    model, ids_BT, depth = loud(case_config(case)), some_ids(2, 16), case["depth"]
    expected = full(model, ids_BT, depth)
    lengths = [6, 6] if case["prompts"] == "equal" else [4, 9]
    cache = make_cache(model, 2, 16, depth)
    prompt_BT = some_ids(2, max(lengths), seed=9)
    for b, n in enumerate(lengths):
        prompt_BT[b, :n] = ids_BT[b, :n]
    logits_BTV = model.feed(prompt_BT, cache, depth, lengths, every=True)
    for b, n in enumerate(lengths):
        assert close(logits_BTV[b, :n], expected[b, :n])
    while max(lengths) < 16:
        new_BT = torch.stack([ids_BT[b, n: n + 1] for b, n in enumerate(lengths)])
        logits_BTV = model.feed(new_BT, cache, depth)
        for b, n in enumerate(lengths):
            assert close(logits_BTV[b, 0], expected[b, n]), f"row {b}, token {n}"
        lengths = [n + 1 for n in lengths]
        assert cache.length_B == lengths                                # as many as were committed


@pytest.mark.parametrize("name", NAMED)
def test_two_hundred_written_tokens_saw_the_logits_of_the_full_forward(name, monkeypatch):
    model, seen = loud(tiny(block_size=256, **NAMED[name])), []
    feed = model.feed
    monkeypatch.setattr(model, "feed", lambda *args: seen.append(feed(*args)) or seen[-1])
    ids_BT = model.generate(some_ids(2, 8), 200, generator=torch.Generator().manual_seed(1))
    assert len(ids_BT[:, 8:].unique()) > 15
    expected, seen_BTV = full(model, ids_BT)[:, 7:-1], torch.cat(seen, 1)
    assert close(seen_BTV, expected)
    top = expected.topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e-3                            # not a tie that rounding may break
    assert clear.float().mean() > 0.9 and (seen_BTV.argmax(-1) == expected.argmax(-1))[clear].all()


@pytest.mark.parametrize("name", ["recursive, cycle", "grt", "inject, llama"])
def test_cached_logits_equal_the_full_forward_at_every_depth(name):
    model, ids_BT = loud(tiny(**NAMED[name])), some_ids(2, 12)
    answers = []
    for depth in range(2 * model.cfg.n_recur + 1):
        cache = make_cache(model, 2, 12, depth)
        logits = [model.feed(ids_BT[:, :4], cache, depth, every=True)]
        logits += [model.feed(ids_BT[:, t: t + 1], cache, depth) for t in range(4, 12)]
        answers.append(torch.cat(logits, 1))
        assert close(answers[-1], full(model, ids_BT, depth)), f"depth {depth}"
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(answers, answers[1:])), "depth changes nothing"


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("pieces", [1, 3, 7])
def test_a_prompt_fed_in_pieces_gives_the_same_logits(name, pieces):
    model, ids_BT = loud(tiny(**NAMED[name])), some_ids(2, 21)
    cache = make_cache(model, 2, 21)
    logits = [model.feed(piece_BT, cache, every=True) for piece_BT in ids_BT.tensor_split(pieces, 1)]
    assert close(torch.cat(logits, 1), full(model, ids_BT))


@pytest.mark.parametrize("n_new", [1, 3])
def test_a_few_new_tokens_see_all_ten_stored_ones(n_new):
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 10 + n_new)
    cache = make_cache(model, 2, 13)
    model.feed(ids_BT[:, :10], cache)
    assert close(model.feed(ids_BT[:, 10:], cache, every=True), full(model, ids_BT)[:, 10:])


def test_feed_answers_after_the_last_real_token_of_each_row():
    model, ids_BT = loud(tiny(**GRT)), some_ids(3, 9)
    every = full(model, ids_BT)
    some = model.feed(ids_BT, make_cache(model, 3, 9), None, [2, 9, 5])
    assert some.shape == (3, 1, 61) and close(some[:, 0], torch.stack([every[0, 1], every[1, 8], every[2, 4]]))
    assert close(model.feed(ids_BT, make_cache(model, 3, 9)), every[:, -1:])


def test_padding_is_never_stored_and_never_spills_into_the_next_row():
    model, ids_BT = loud(tiny(block_size=8, **GRT)), some_ids(2, 8)
    cache = make_cache(model, 2, 8)
    model.feed(ids_BT[:, :6], cache, None, [6, 2])
    for slot in cache.outer + cache.core:
        rows = slot.view(2, 2, 8, 4, 4)                                    # K and V, rows, places, heads, features
        assert (rows[:, 0, 6:] == 0).all() and (rows[:, 1, 2:] == 0).all() and (rows[:, 1, :2] != 0).any(-1).all()
    later_BT = torch.zeros(2, 6, dtype=torch.long)
    later_BT[0, :2], later_BT[1] = ids_BT[0, 6:], ids_BT[1, 2:]          # four tokens of padding in a row that is full
    logits_BTV = model.feed(later_BT, cache, None, [2, 6], every=True)
    expected = full(model, ids_BT)
    assert close(logits_BTV[0, :2], expected[0, 6:]) and close(logits_BTV[1], expected[1, 2:])


@pytest.mark.parametrize("how", ["full", "mean"])
def test_a_call_past_the_caches_end_is_refused_and_changes_nothing(how):
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 6)
    cache = make_cache(model, 2, 6)
    model.feed(ids_BT[:, :5], cache)
    cache = cache.compress(how)
    model.feed(ids_BT[:, 5:], cache)
    before = [slot.clone() for slot in cache.outer + cache.core]
    with pytest.raises(ValueError, match="holds 2 rows of 6 tokens, 6 taken"):
        model.feed(ids_BT[:, :1], cache)
    with pytest.raises(ValueError, match="3 rows of 1 more do not fit"):
        model.feed(some_ids(3, 1), cache)
    assert cache.length_B == [6, 6] and all(torch.equal(a, b) for a, b in zip(before, cache.outer + cache.core))


def test_a_call_that_does_not_fit_the_cache_is_refused():
    model = loud(tiny(**GRT))
    with pytest.raises(ValueError, match="n_places=33 is more than block_size=32"):
        make_cache(model, 2, 33)
    cache = make_cache(model, 2, 12, 2)
    for wrong in ([0, 4], [5, 4]):
        with pytest.raises(ValueError, match="every row brings 1 to 4 new tokens"):
            model.feed(some_ids(2, 4), cache, None, wrong)
    with pytest.raises(ValueError, match="depth=3, but the cache was made for depth 2"):
        model.feed(some_ids(2, 4), cache, 3)
    assert cache.length_B == [0, 0]
    ids_BT = some_ids(2, 4)
    assert close(model.feed(ids_BT, cache, every=True), full(model, ids_BT, 2))             # no depth given: the cache's


@pytest.mark.parametrize("name", ["grt", "llama with grouped queries"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_the_cache_has_the_dtype_of_the_keys(name, precision):
    model, keys = loud(tiny(**NAMED[name])), []
    model = model.bfloat16() if precision == "bfloat16" else model
    model.recursion.core[0].attention.key.register_forward_hook(lambda module, args, k: keys.append(k))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        cache = make_cache(model, 1, 8)
        model.feed(some_ids(1, 5), cache)
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        assert {slot.dtype for slot in cache.outer + cache.core} == {k.dtype for k in keys} == {dtype}
        for how in ("full", *([] if "llama" in name else ["first", "last", "mean"])):
            assert model.generate(some_ids(1, 5), 3, cache=how).shape == (1, 8)


# ------------------------------------------------------------------------------------------------------ compressed caches

COMPRESSIBLE = [case for case in GRID if case["sharing"] == "cycle" and case["depth"] != 0]


@pytest.mark.parametrize("case", COMPRESSIBLE, ids=case_name)
def test_compressed_caches_equal_the_specification(case):
    model, ids_BT, depth = loud(case_config(case)), some_ids(2, 9), case["depth"]
    lengths = [4, 4] if case["prompts"] == "equal" else [2, 6]
    exact = make_cache(model, 2, 9, depth)
    model.feed(ids_BT[:, :max(lengths)], exact, depth, lengths)
    prompts = [spec.Sequence(model.cfg, model.state_dict(), depth) for _ in lengths]
    for b, n in enumerate(lengths):
        for id in ids_BT[b, :n]:
            prompts[b].token(id)
    for how in ("first", "last", "mean"):
        cache, rows = copy.deepcopy(exact).compress(how), copy.deepcopy(prompts)
        for row in rows:
            row.compress(how)
        for i in range(3):
            new_BT = torch.stack([ids_BT[b, n + i: n + i + 1] for b, n in enumerate(lengths)])
            logits_BTV = model.feed(new_BT, cache, depth)
            for b, n in enumerate(lengths):
                assert close(logits_BTV[b, 0], rows[b].token(new_BT[b, 0])), f"{how}, row {b}, token {n + i}"


def test_compressed_caches_differ_from_the_full_one_and_from_each_other():
    model, ids_BT, answers = loud(tiny(**GRT)), some_ids(1, 12), []
    for how in ("full", "first", "last", "mean"):
        cache = make_cache(model, 1, 12)
        model.feed(ids_BT[:, :8], cache)
        cache = cache.compress(how)
        answers.append(torch.cat([model.feed(ids_BT[:, t: t + 1], cache) for t in range(8, 12)], 1))
    assert all((a - b).abs().max() > 1e-2 for i, a in enumerate(answers) for b in answers[:i])


@pytest.mark.parametrize("how", ["first", "last", "mean"])
@pytest.mark.parametrize("name", ["recursive, cycle", "grt", "inject, llama", "gpt2"])
def test_at_depth_one_every_cache_is_exact(name, how):
    model = loud(tiny(**NAMED[name]))
    exact = model.generate(some_ids(2, 5), 20, temperature=0, depth=1)
    assert torch.equal(model.generate(some_ids(2, 5), 20, temperature=0, depth=1, cache=how), exact)


def test_a_compressed_cache_takes_one_token_at_a_time():
    model = loud(tiny(**GRT))
    cache = make_cache(model, 2, 12)
    model.feed(some_ids(2, 6), cache)
    cache = cache.compress("mean")
    with pytest.raises(ValueError, match="one new token per row, not 2"):
        model.feed(some_ids(2, 2), cache)
    assert cache.length_B == [6, 6]


def test_a_block_that_runs_twice_in_a_step_cannot_be_compressed():
    model = loud(tiny(**NAMED["recursive, middle_sequence"]))
    for how in ("first", "last", "mean"):
        with pytest.raises(ValueError, match=f"cache='{how}' keeps one K and V per block"):
            model.generate(some_ids(1, 4), 2, cache=how)
    with pytest.raises(ValueError, match="cache='half' is not one of full, first, last, mean"):
        model.generate(some_ids(1, 4), 2, cache="half")


# --------------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.slow
def test_generating_with_and_without_a_cache_gives_the_same_tokens(name, temperature):
    """Unequal prompts, past the context's end, greedy and drawn."""
    model = loud(tiny(block_size=20, **NAMED[name]))
    prompts = [some_ids(9), some_ids(3, seed=2), some_ids(6, seed=3)]

    def write(use_cache):
        return model.generate(prompts, 40, temperature, use_cache=use_cache, generator=torch.Generator().manual_seed(4))

    for cached, slow, prompt in zip(write(True), write(False), prompts):
        assert torch.equal(cached, slow) and torch.equal(cached[: len(prompt)], prompt) and len(cached) == len(prompt) + 40
        assert temperature == 0 or len(cached[len(prompt):].unique()) > 10


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_row_that_outgrows_the_context_drops_its_older_half(use_cache):
    model, ids_BT = loud(tiny(block_size=8, **GRT)), some_ids(2, 5)
    longer_BT = model.generate(ids_BT, 15, temperature=0, use_cache=use_cache)
    for row, prompt in zip(longer_BT.tolist(), ids_BT.tolist()):
        context = prompt
        for new in row[5:]:
            context = context[-4:] if len(context) > 8 else context
            assert new == full(model, torch.tensor([context]))[0, -1].argmax()
            context = context + [new]


def test_a_prompt_longer_than_the_context_is_read_from_its_newer_half():
    model, ids_BT = loud(tiny(block_size=8, **GRT)), some_ids(2, 13)
    longer_BT = model.generate(ids_BT, 3, temperature=0)
    assert torch.equal(longer_BT[:, :13], ids_BT)
    assert torch.equal(longer_BT[:, 9:], model.generate(ids_BT[:, 9:], 3, temperature=0))


@pytest.mark.parametrize("cache", ["full", "first", "last", "mean"])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_ten_contexts_of_new_tokens_are_written(cache, block_size):
    model = loud(tiny(block_size=block_size, **GRT))
    assert model.generate(some_ids(2, 1), 10 * block_size, cache=cache).shape == (2, 1 + 10 * block_size)


def test_calls_do_not_remember_each_other():
    model, cfg = loud(tiny(block_size=128, **GRT)), tiny(block_size=128, **GRT)
    for n_rows, n_tokens in ((1, 5), (4, 50), (1, 5), (2, 50), (1, 5)):
        prompt_BT = some_ids(n_rows, n_tokens)
        again = model.generate(prompt_BT, 12, temperature=0)
        assert torch.equal(again, loud(cfg).generate(prompt_BT, 12, temperature=0))
        assert torch.equal(again, model.generate(prompt_BT, 12, temperature=0))


def test_a_row_is_continued_as_if_it_were_alone():
    model, prompts = loud(tiny(**GRT)), [some_ids(3), some_ids(9, seed=2), some_ids(5, seed=3)]
    together = model.generate(prompts, 15, temperature=0)
    for row, prompt in zip(together, prompts):
        assert torch.equal(row, model.generate([prompt], 15, temperature=0)[0])


def test_the_same_generator_gives_the_same_text_and_leaves_torchs_own_alone():
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 5)
    draw = lambda seed: model.generate(ids_BT, 12, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_depth_of_generation_is_the_depth_asked_for():
    model, ids_BT = loud(tiny(**GRT)), some_ids(1, 5)
    for depth in (0, 1, 3, 5):
        new = model.generate(ids_BT, 1, temperature=0, depth=depth)[0, -1]
        assert new == full(model, ids_BT, depth)[0, -1].argmax()
    assert torch.equal(model.generate(ids_BT, 8, temperature=0), model.generate(ids_BT, 8, temperature=0, depth=3))
    with pytest.raises(ValueError, match="always n_recur=2"):
        loud(tiny(**NAMED["recursive, middle_sequence"])).generate(ids_BT, 1, depth=1)


def stopping(temperature):
    """(model, prompts, output without a stop, a token that row 0 writes before its end and row 1 never)."""
    model, ids_BT = loud(tiny(**GRT)), some_ids(2, 5)
    free_BT = model.generate(ids_BT, 20, temperature, generator=torch.Generator().manual_seed(3))
    first, second = free_BT[:, 5:].tolist()
    stop = next(id for id in first[2:15] if id not in second and id not in first[:2])
    return model, ids_BT, free_BT, stop, 5 + first.index(stop) + 1


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_stopped_row_is_padded_with_its_stop_token_and_the_other_goes_on(temperature):
    model, ids_BT, free_BT, stop, end = stopping(temperature)
    out_BT = model.generate(ids_BT, 20, temperature, stop=stop, generator=torch.Generator().manual_seed(3))
    assert out_BT.shape == (2, 25) and torch.equal(out_BT[1], free_BT[1])
    assert torch.equal(out_BT[0, :end], free_BT[0, :end]) and (out_BT[0, end:] == stop).all()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_list_gives_a_list_cut_after_the_stop_token(temperature):
    model, ids_BT, free_BT, stop, end = stopping(temperature)
    rows = model.generate(list(ids_BT), 20, temperature, stop=stop, generator=torch.Generator().manual_seed(3))
    assert torch.equal(rows[0], free_BT[0, :end]) and torch.equal(rows[1], free_BT[1])


def test_when_all_rows_have_stopped_nothing_more_is_computed(monkeypatch):
    model, ids_BT, free_BT, stop, end = stopping(0)
    calls, feed = [], model.feed
    monkeypatch.setattr(model, "feed", lambda *args: calls.append(1) or feed(*args))
    out_BT = model.generate(ids_BT[:1], 20, temperature=0, stop=stop)
    assert len(calls) == end - 5 and out_BT.shape == (1, 25) and (out_BT[0, end:] == stop).all()


def test_a_stop_token_in_the_prompt_stops_nothing():
    model, ids_BT = loud(tiny(**GRT)), some_ids(1, 5)
    free_BT = model.generate(ids_BT, 6, temperature=0)
    unsaid = next(id for id in ids_BT[0].tolist() if id not in free_BT[0, 5:])
    assert torch.equal(model.generate(ids_BT, 6, temperature=0, stop=unsaid), free_BT)


def test_temperature_zero_is_the_likeliest_token_and_wrong_ones_are_refused():
    model, ids_BT = loud(tiny()), some_ids(2, 5)
    assert torch.equal(model.generate(ids_BT, 1, temperature=0)[:, -1], full(model, ids_BT)[:, -1].argmax(-1))
    assert torch.equal(model.generate(ids_BT, 9, temperature=0), model.generate(ids_BT, 9, temperature=0))
    assert torch.equal(model.generate(ids_BT, 9, temperature=1e-4), model.generate(ids_BT, 9, temperature=0))
    for wrong in (-1, -0.001, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature="):
            model.generate(ids_BT, 1, temperature=wrong)


def shares(probabilities, n=4000, **options):
    """How often each token is drawn, between 0 and 1."""
    logits = torch.tensor(probabilities).log()
    ids = sample(logits.expand(n, -1), generator=torch.Generator().manual_seed(0), **options)
    return pytest.approx([ids.count(id) / n for id in range(len(logits))], abs=0.03)


def test_temperature_divides_the_logits():
    assert [0.5, 0.3, 0.2] == shares([0.5, 0.3, 0.2])
    assert [0.66, 0.24, 0.11] == shares([0.5, 0.3, 0.2], temperature=0.5)               # .25, .09, .04 over .38
    assert [0.33, 0.33, 0.33] == shares([0.5, 0.3, 0.2], temperature=100.0)


def test_top_k_keeps_the_k_likeliest():
    p = [0.1, 0.3, 0.2, 0.4]
    assert [0, 0, 0, 1] == shares(p, top_k=1)
    assert [0, 0.43, 0, 0.57] == shares(p, top_k=2)
    for off in (None, 0, 4, 5):
        assert p == shares(p, top_k=off)
    assert [0.5, 0.5, 0] == shares([1.0, 1.0, 1.0], top_k=2)                            # two of three equals, not all
    model, ids_BT = loud(tiny()), some_ids(2, 5)
    assert torch.equal(model.generate(ids_BT, 9, top_k=1), model.generate(ids_BT, 9, temperature=0))
    assert model.generate(ids_BT, 9, top_k=61).shape == model.generate(ids_BT, 9, top_k=62).shape == (2, 14)
    with pytest.raises(ValueError, match="top_k=-1 is negative"):
        model.generate(ids_BT, 1, top_k=-1)


def test_top_p_keeps_the_smallest_set_that_holds_p():
    p = [0.1, 0.3, 0.2, 0.4]
    for top_p, kept in ((0.001, [0, 0, 0, 1]), (0.39, [0, 0, 0, 1]), (0.41, [0, 0.43, 0, 0.57]), (0.69, [0, 0.43, 0, 0.57]),
                        (0.71, [0, 0.33, 0.22, 0.44]), (0.91, p), (1, p), (None, p)):
        assert kept == shares(p, top_p=top_p), f"top_p={top_p}"
    assert [0, 0, 0, 1] == shares(p, top_k=2, top_p=0.5)                                # of the two kept, the first holds .57
    for wrong in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="top_p="):
            loud(tiny()).generate(some_ids(1, 5), 1, top_p=wrong)


def test_samples_of_one_prompt_begin_with_many_different_tokens():
    torch.manual_seed(0)
    flat = GPT(tiny(**GRT)).eval()
    first_B = flat.generate(some_ids(1, 5).expand(64, 5), 1)[:, -1]
    assert len(first_B.unique()) > 25


def test_an_empty_prompt_is_refused():
    model = loud(tiny())
    for empty in (torch.zeros(2, 0, dtype=torch.long), [some_ids(3), some_ids(0)], []):
        with pytest.raises(ValueError, match="an empty prompt has nothing to continue"):
            model.generate(empty, 2)
    with pytest.raises(ValueError, match="takes \\(B, T\\) or a list of 1-D tensors"):
        model.generate(some_ids(5), 2)


def test_no_new_tokens_give_the_prompt_back_and_fewer_are_refused():
    model, ids_BT = loud(tiny()), some_ids(2, 5)
    assert torch.equal(model.generate(ids_BT, 0), ids_BT)
    assert [row.tolist() for row in model.generate(list(ids_BT), 0)] == ids_BT.tolist()
    with pytest.raises(ValueError, match="max_new_tokens=-1 is negative"):
        model.generate(ids_BT, -1)


@pytest.mark.parametrize("training", [True, False])
def test_generate_runs_in_evaluation_mode_and_restores_the_mode(training):
    model, ids_BT, modes = loud(tiny(**GRT, dropout=0.5)).train(training), some_ids(1, 5), []
    model.recursion.core[0].register_forward_hook(lambda *_: modes.append(model.training))
    model.generate(ids_BT, 2)
    assert model.training == model.coda[0].mlp.training == training and set(modes) == {False}
    with pytest.raises(IndexError):
        model.generate(ids_BT + 61, 2)
    assert model.training == training, "the mode must come back after an error too"


def test_damaged_weights_give_one_clear_error():
    for damage, temperature in itertools.product((math.nan, math.inf), (0, 1.0)):
        everywhere, one_row = loud(tiny()), loud(tiny())
        with torch.no_grad():
            everywhere.norm.weight.fill_(damage)
            one_row.embed.weight[60] = damage                           # of a token that the prompt does not hold
        for model in (everywhere, one_row):
            with pytest.raises(ValueError, match="the logits are not finite"):
                model.generate(torch.tensor([[1, 2, 3]]), 2, temperature)


def test_options_of_models_with_routers_or_exits_are_refused():
    model = loud(tiny(**GRT))
    for option, why in ((dict(threshold=0.5), "no expert-choice router"), (dict(exit="cdf"), "no exit gate"), (dict(exit="luck"), "not one of"),
                        (dict(exit_threshold=0.1), "give exit='kl'"), (dict(exit="kl", exit_threshold=-1), "0 or more")):
        with pytest.raises(ValueError, match=why):
            model.generate(some_ids(1, 4), 2, **option)
