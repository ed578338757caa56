"""The engine: every request writes what it would write alone, streamed, in turn, and in the memory that was declared.

    python -m pytest -q tests/test_serve.py
"""
import contextlib
import functools
import gc
import itertools
import json
import random
from collections import Counter, defaultdict
from unittest.mock import Mock

import pytest
import torch
from config import UserError
from tiny import all_pairs, layout, loud, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import make_config, make_data, refusal

import model as model_py
import sample
import train
from model import GPT, UNIT, draw, generator, lot, make_cache
from sample import Engine
from train import compile_parts

MIDDLE = layout("1+2x3+1")
FAMILIES = {
    "dense": layout("0+3x1+0"), "llama": dict(layout("0+3x1+0"), block="llama", n_kv_head=2), "cycle": MIDDLE, "sequence": dict(layout("0+3x2+1"), sharing="middle_sequence"),
    "rotary": dict(MIDDLE, block="llama", n_kv_head=2), "gate": dict(MIDDLE, update="gate"), "inject": dict(MIDDLE, update="inject", state_init="random", state_std=0.5),
    "norms": dict(layout("1+1x3+0"), loop_norm=True, sandwich_norm=True), "lora": dict(MIDDLE, lora_rank=2), "ouro": dict(layout("1+1x4+1"), loss="every")}
ROUTERS = {"none": {}, "expert": dict(router="expert"), "token": dict(router="token"), "mlp": dict(router="expert", router_kind="mlp"), "aux": dict(router="expert", aux_router=True),
           "lot": dict(router="expert", router_choice="random"), "few": dict(router="expert", capacity=[0.5, 0.5, 0.3]),
           "flat": dict(router="expert", capacity=[1.0, 1.0, 0.5]), "bias": dict(router="token", router_score="sigmoid", router_balance="bias")}
EXITS = [(None, None), ("kl", 0.05), ("kl", 3.0), ("cdf", 0.6)]
SETTINGS = ["cache", "exit", "exit_threshold", "depth"]


def legal(case):
    family, router, kv, exit = case["family"], case["router"], case["kv"], case["exit"][0]
    routed, one = router != "none", family in ("dense", "llama", "sequence")
    return not (one and (routed or kv != "own" or exit or case["depth"] is not None or case["cache"] != "full") or routed and family in ("norms", "ouro")
                or router in ("token", "bias") and family in ("gate", "inject") or router == "few" and kv != "own" or case["cache"] != "full" and (routed or kv != "own")
                or exit and router in ("token", "bias", "few") or (exit == "cdf") != (family == "ouro" and exit is not None) or case["depth"] == 5 and (routed or family == "lora") or case["depthwise"] and family == "sequence")


CHOICES = {"family": list(FAMILIES), "router": list(ROUTERS), "kv": ["own", "share", "share_k", "share_v"], "cache": ["full", "first", "last", "mean"], "exit": EXITS, "depth": [None, 0, 1, 5],
           "depthwise": [True, False]}
MODELS = all_pairs(CHOICES, legal)                                                  # few, in which every two choices meet
PLAIN = dict(family="cycle", router="none", kv="own", cache="full", exit=(None, None), depth=None, depthwise=True)
MIXED = [{**PLAIN, **more} for more in ([dict(family=family) for family in FAMILIES] + [dict(router=router) for router in ROUTERS] + [dict(kv=kv) for kv in CHOICES["kv"]]
                                        + [dict(cache=cache) for cache in CHOICES["cache"]] + [dict(family="ouro", exit=EXITS[3]), dict(exit=EXITS[2]), dict(router="token", kv="share_k")])
         if legal({**PLAIN, **more})]                                               # each of these by itself, with all steps and rows at steps of their own
ENGINES = all_pairs({"slots": [1, 3, 5], "core_rows": [None, 2], "finish_rows": [1, 2], "n_whole": [None, 1, 2], "fixed": [False, True]}, lambda case: True)
APART = dict(slots=4, core_rows=3)


def name(case):
    return "-".join(str(value) for value in case.values())


@functools.lru_cache
def build(family="cycle", router="none", kv="own", dtype=torch.float64, **more):
    return loud(tiny(**{**FAMILIES[family], **ROUTERS[router], "kv": kv, **more})).to(dtype)


def model_of(case):
    return build(case["family"], case["router"], case["kv"])


def options(case):
    return dict(cache=case["cache"], exit=case["exit"][0], exit_threshold=case["exit"][1], depth=case["depth"])


def asks(n, seed=0, most=12, prompts=(1, 1, 2, 5, 9)):
    """n times (prompt, max_new_tokens)."""
    rng = random.Random(seed)
    return [([rng.randrange(61) for _ in range(rng.choice(prompts))], rng.randint(1, most)) for _ in range(n)]


def alone(model, prompt, n, temperature=0, **keys):
    """The text that generate writes by itself."""
    return model.generate([torch.tensor(prompt)], n, temperature, **keys)[0].tolist()[len(prompt):]


def serve(engine, requests, at_once=False, logits=None, **keys):
    """The texts in order, from what was streamed alone. One more request comes with every tick, so that rows stand at steps of their own. logits: takes
    what every token of a request was chosen from."""
    texts, asked, coming = defaultdict(list), [], list(requests)
    while coming or engine.busy:
        for prompt, n in coming if at_once else coming[:1]:
            asked.append(engine.submit(prompt, n, **keys))
            if logits is not None:
                asked[-1].greedy, asked[-1].draw = False, lambda logits_1V, seen=logits[len(asked) - 1]: (seen.append(logits_1V[0].clone()), logits_1V.argmax(-1))[1]
        coming = coming[len(coming) if at_once else 1 :]
        for request, token in engine.tick():
            assert token is not None, request.error
            texts[request].append(token)
            assert request.text[: len(texts[request])] == texts[request]
    assert_idle(engine)
    return [texts[request] for request in asked]


def assert_as_alone(engine, requests, at_once=False, tolerance=1e-6, **keys):
    """Tokens and logits are those of generate(**keys) of each row by itself."""
    together = defaultdict(list)
    texts = serve(engine, requests, at_once, together)
    for i, (prompt, n) in enumerate(requests):
        by_itself, draw = [], model_py.sample
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_py, "sample", lambda logits_1V, *how: by_itself.append(logits_1V[0]) or draw(logits_1V, *how))
            assert texts[i] == alone(engine.model, prompt, n, **keys)
        torch.testing.assert_close(torch.stack(together[i]), torch.stack(by_itself), atol=tolerance, rtol=1e-4)


def assert_idle(engine):
    assert not (engine.busy or engine.flying or engine.waiting or engine.events)
    assert sorted(engine.free) == list(range(engine.slots))
    for space in engine.shelves.spaces.values():
        assert space.free == [(0, space.n_places)] * (space.n_places > 0)            # one run: nothing lost, nothing in pieces


# ----------------------------------------------------------------------------------------------------- the text of a request


def check_texts(case, engine, requests):
    assert_as_alone(Engine(model_of(case), depthwise=case["depthwise"], **engine, **options(case)), requests, **options(case))


@pytest.mark.parametrize("i", range(len(MODELS)), ids=lambda i: name(MODELS[i]))
def test_engine_text_is_that_of_generate_alone(i):
    check_texts(MODELS[i], ENGINES[i % len(ENGINES)], asks(3, seed=i, most=6))


@pytest.mark.parametrize("i", range(len(MIXED)), ids=lambda i: name(MIXED[i]))
def test_rows_of_an_engine_at_steps_of_their_own_do_as_alone(i):
    check_texts(MIXED[i], dict(APART, fixed=i % 3 == 0), asks(5, seed=i, most=5))


@pytest.mark.parametrize("kv", ["share_k", "share_v"])
def test_rows_of_an_engine_at_one_step_share_its_low_rank_additions(kv):
    check_texts(dict(PLAIN, family="lora", kv=kv, depthwise=False), dict(slots=3), asks(4))


@pytest.mark.slow
@pytest.mark.parametrize("family, router", [(family, router) for family, router in itertools.product(FAMILIES, ROUTERS) if legal(dict(family=family, router=router, kv="own", cache="full", exit=(None, None), depth=None, depthwise=False))])
def test_engine_text_is_that_of_generate_alone_in_every_mix(family, router):
    rest = {key: values for key, values in CHOICES.items() if key not in ("family", "router")}
    cases = [dict(family=family, router=router, **dict(zip(rest, values))) for values in itertools.product(*rest.values())]
    for i, case in enumerate(list(filter(legal, cases))[::17]):          # the fast part has all pairs
        check_texts(case, ENGINES[i % len(ENGINES)], asks(6, seed=i))


# Models in which the engine has something to keep apart, by name: the keys of build, and the engine's.
LOT = {"dense": (dict(family="dense"), {}), "gate": (dict(family="gate"), dict(depthwise=True)), "expert": (dict(router="expert"), {}), "token": (dict(router="token", kv="share_k"), {}),
       "shared": (dict(router="expert", kv="share"), {}), "values": (dict(router="expert", kv="share_v"), {}), "mean": (dict(family="gate"), dict(cache="mean", depthwise=True)),
       "kl": (dict(family="rotary"), dict(exit="kl", exit_threshold=0.3)), "cdf": (dict(family="ouro"), dict(exit="cdf", exit_threshold=0.6)),
       "last kl": (dict(family="gate"), dict(exit="kl", exit_threshold=0.3, cache="last")), "expert kl": (dict(router="expert"), dict(exit="kl", exit_threshold=0.3))}
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)  # noqa: E731
NAMES = [name if name in ("gate", "values", "mean", "expert kl") else slow(name) for name in LOT]


def one_of_lot(name, **more):
    """(model, the engine's keys)"""
    keys, serving = LOT[name]
    return build(**keys, **more), serving


def without_batching(serving):
    return {key: value for key, value in serving.items() if key != "depthwise"}


def logits_alone(model, ids, n_prompt, cache="full", **exit):
    """(n, V) after the prompt and after each further token, by feed."""
    store, ids_1T = make_cache(model, 1, len(ids), exit=exit.get("exit")), torch.tensor([ids])
    logits = [model.feed(ids_1T[:, :n_prompt], store, **exit)[0, 0]]
    store = store.compress(cache)
    return torch.stack(logits + [model.feed(ids_1T[:, i, None], store, **exit)[0, 0] for i in range(n_prompt, len(ids))])


@pytest.mark.parametrize("name", NAMES)
def test_engine_logits_in_float32_are_those_of_a_row_alone(name):
    model, serving = one_of_lot(name, dtype=torch.float32)
    engine, seen = Engine(model, slots=3, core_rows=2, **serving), defaultdict(list)

    def watched(request):
        request.greedy, request.draw = False, lambda logits_1V: (seen[request].append(logits_1V[0]), logits_1V.argmax(-1))[1]

    for prompt, n in asks(5, seed=3):
        watched(engine.submit(prompt, n))
    list(engine.run())
    assert len(seen) == 5
    for request, logits in seen.items():
        want_TV = logits_alone(model, request.ids[:-1], request.n_prompt, **without_batching(serving))
        torch.testing.assert_close(torch.stack(logits), want_TV, atol=1e-4, rtol=1e-4)
        (best, second), margin = want_TV.topk(2).indices.T, -want_TV.topk(2).values.diff()[:, 0]
        assert all(token == top for token, top, apart in zip(request.text, best, margin) if apart > 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_serve_does_not_let_the_batch_change_a_text(name):
    model, serving = one_of_lot(name)
    wanted, others, draws = asks(4, seed=1), asks(9, seed=2), dict(temperature=1.0, top_k=20, top_p=0.9)
    texts = [alone(model, prompt, n, generator=generator(i), **draws, **without_batching(serving)) for i, (prompt, n) in enumerate(wanted)]
    assert texts != [alone(model, prompt, n, **without_batching(serving)) for prompt, n in wanted]
    for order, neighbours, slots, core_rows in (([0, 1, 2, 3], [], 1, None), ([3, 1, 0, 2], others, 3, 2), ([2, 0, 3, 1], others[4:], 6, None)):
        engine = Engine(model, slots=slots, core_rows=core_rows, **serving)
        mine = {}
        for i, pair in itertools.zip_longest(order, neighbours):
            if i is not None:
                mine[i] = engine.submit(*wanted[i], seed=i, **draws)
            if pair is not None:
                engine.submit(*pair, temperature=0.5 * (len(pair[0]) % 2), seed=7)
        list(engine.run())
        assert [mine[i].text for i in range(4)] == texts


# --------------------------------------------------------------------------------------------------------- streams and turns


def test_serve_streams_each_token_once_in_order_and_a_stop_ends_a_text():
    model, requests = build(router="expert"), asks(8, seed=4)
    stop = Counter(itertools.chain(*(alone(model, prompt, n) for prompt, n in requests))).most_common(1)[0][0]
    engine = Engine(model, slots=3)
    texts = serve(engine, requests, stop=stop)                                        # collect: nothing twice, nothing out of order
    want = [alone(model, prompt, n, stop=stop) for prompt, n in requests]
    assert texts == want and any(len(text) < n and text[-1] == stop for text, (_, n) in zip(want, requests))


def test_a_stop_frees_a_slot_of_the_engine_at_once():
    model = build(family="dense")
    text = alone(model, [5], 9)
    engine = Engine(model, slots=1)
    first, second = engine.submit([5], 9, stop=text[2]), engine.submit([6], 1)
    while first.at != "done":
        engine.tick()
    assert first.text == text[: text.index(text[2]) + 1] and engine.free == [0] and second.at == "waiting"
    engine.tick()
    assert second.slot == 0 and engine.free == []


@pytest.mark.parametrize("serving", [dict(), dict(n_whole=2), dict(threshold=0, n_whole=1)], ids=str)
@pytest.mark.parametrize("slots", [1, 3])
def test_serve_admits_in_turn_and_as_soon_as_there_is_room(serving, slots):
    engine = Engine(build(router="expert"), slots=slots, **serving)
    for prompt, n in asks(12, seed=5, most=20):
        engine.submit(prompt, n)
    began, take = [], engine.shelves.take
    engine.shelves.take = lambda request: take(request) and (began.append(request.number), True)[1]
    while engine.busy:
        room, before = min(len(engine.free), len(engine.waiting)), len(began)
        engine.tick()
        numbers = [request.number for request in engine.waiting]
        assert numbers == sorted(numbers) and max((request.number for request in engine.flying), default=-1) < min(numbers, default=99)      # nobody is overtaken
        if not serving:
            assert len(began) - before >= room                                        # a free slot is taken in the next tick
    assert list(dict.fromkeys(began)) == list(range(12))
    assert (len(began) > 12) == ("threshold" in serving) == (engine.counts["put_aside"] > 0)


def test_a_request_takes_the_ticks_that_its_tokens_need():
    engine = Engine(build(family="dense"), slots=2)
    for n in (2, 5, 1):
        engine.submit([n], n)
    when = defaultdict(list)
    for tick in range(20):
        for request, _ in engine.tick():
            when[request.number].append(tick)
    assert dict(when) == {0: [2, 4], 1: [2, 4, 6, 8, 10], 2: [6]}                     # start, core, finish and start, core ...; the third starts as the first one finishes


# --------------------------------------------------------------------------------------------------------------- no end, no leak


def soak(seed, n, **keys):
    """n short requests through one engine, in two waves: all that it holds is as large after the second as after the first."""
    model, sizes = build(router="expert", dtype=torch.float32), []
    engine = Engine(model, slots=24, core_rows=16, finish_rows=8, n_places=20, **keys)
    allocated, requests = engine.shelves.nbytes(), asks(n, seed=seed, prompts=(1, 1, 1, 2, 8))
    for wave in (requests[: n // 2], requests[n // 2 :]):
        first = engine.number
        texts = serve(engine, wave, at_once=True)
        assert [len(text) for text in texts] == [n for _, n in wave] and engine.number == first + len(wave)
        gc.collect()
        sizes.append((engine.shelves.nbytes(), sum(x.nbytes for x in engine.state.values()), sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())))
    assert sizes[0] == sizes[1] and allocated == sizes[0][0]
    return engine, texts


def test_serve_starves_nobody_and_keeps_nothing():
    soak(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed, keys", [*((seed, dict()) for seed in range(3)), (1, dict(threshold=0, n_whole=6)), (2, dict(exit="kl", exit_threshold=0.3))], ids=str)
def test_five_hundred_requests_of_an_engine_starve_nobody_and_leave_nothing(seed, keys):
    engine, texts = soak(seed, 500, **keys)
    assert engine.counts["put_aside"] > 0 or "n_whole" not in keys
    rest = {key: value for key, value in keys.items() if key != "n_whole"}
    for (prompt, n), text in list(zip(asks(500, seed=seed, prompts=(1, 1, 1, 2, 8))[250:], texts))[::25]:
        assert text == alone(engine.model, prompt, n, **rest)


# ------------------------------------------------------------------------------------------------------------------------ memory


HALVED = dict(layout("1+2x2+1"), router="expert")                                     # whose windows, of 32 and of 16 places, are whole units
MEMORY = {"dense": (FAMILIES["dense"], {}), "grouped": (FAMILIES["llama"], {}), "loop": (FAMILIES["gate"], {}), "halved": (HALVED, {}), "share": (dict(MIDDLE, kv="share"), {}),
          "halved and shared": (dict(HALVED, kv="share"), {}), "depth 1": (MIDDLE, dict(depth=1)), "depth 0": (MIDDLE, dict(depth=0)), "first": (MIDDLE, dict(cache="first")),
          "mean": (FAMILIES["gate"], dict(cache="mean")), "last": (MIDDLE, dict(cache="last")), "exit": (MIDDLE, dict(exit="kl")), "exit and mean": (MIDDLE, dict(exit="kl", cache="mean"))}


@pytest.mark.parametrize("name", MEMORY)
def test_engine_memory_is_what_was_declared_to_the_byte(name):
    keys, serving = MEMORY[name]
    model = build(**keys, dtype=torch.float32)
    shelves = Engine(model, slots=4, n_places=2 * UNIT, **serving).shelves
    assert shelves.nbytes() == model.cfg.kv_bytes(2 * UNIT, 4, torch.float32, **{key: serving[key] for key in serving if key != "exit_threshold"})
    assert shelves.lanes == (1 if model.cfg.kv == "share" or "cache" in serving else serving.get("depth", model.cfg.n_recur))
    half = [Engine(model, slots=4, n_places=2 * UNIT, n_whole=n, **serving).shelves.nbytes() for n in (2, 4, 6)]
    assert half[1] - half[0] == half[2] - half[1] > 0                                 # scratch is for each slot, all else for each whole request


def test_engine_memory_of_fixed_passes_has_a_slot_and_a_unit_more_for_rows_that_only_fill_up():
    model = build(family="gate", dtype=torch.float32)
    plain, fixed = (Engine(model, slots=4, cache="mean", fixed=fixed).shelves.nbytes() for fixed in (False, True))
    assert fixed - plain == model.cfg.kv_bytes(UNIT, 1, torch.float32, "mean")


@pytest.mark.parametrize("kv", ["share_k", "share_v"])
def test_engine_memory_of_a_shared_half_is_that_of_own_and_what_a_token_keeps(kv):
    model = build(**HALVED, kv=kv, dtype=torch.float32)
    one_token = model.cfg.n_core * model.cfg.kv_heads * model.cfg.head_width * 4
    assert Engine(model, slots=3, n_places=2 * UNIT).shelves.nbytes() == model.cfg.kv_bytes(2 * UNIT, 3, torch.float32) + 3 * one_token


def test_engine_memory_is_that_of_the_keys_under_autocast():
    engine = Engine(build(dtype=torch.float32), slots=2, autocast=torch.autocast("cpu", torch.bfloat16))
    assert engine.shelves.nbytes() == engine.model.cfg.kv_bytes(32, 2, torch.bfloat16)
    serve(engine, asks(3))


@pytest.mark.parametrize("slots, how", [(1, "in place"), (3, "moved")])
@pytest.mark.parametrize("kv", ["own", "share_k"])
def test_routed_windows_of_an_engine_grow_by_a_unit_where_they_lie_or_elsewhere(kv, slots, how, monkeypatch):
    grown, grow = Counter(), sample.Space.grow

    def watched(space, span):
        first, size = span.first, span.size
        done = grow(space, span)
        assert span.size - size == (UNIT if done else 0)
        grown["none" if not done else "in place" if span.first == first else "moved"] += 1
        return done

    monkeypatch.setattr(sample.Space, "grow", watched)
    model, requests = build(router="expert", kv=kv), [([i], 26 + i) for i in range(3)]         # of so many tokens steps 1 and 2 are given 32 and 16 places
    engine = Engine(model, slots=slots, n_whole=9, threshold=0)                       # everyone takes every step
    before = engine.shelves.nbytes()
    assert_as_alone(engine, requests, at_once=True, threshold=0)
    assert grown == {how: 3} and engine.shelves.nbytes() == before


def test_in_full_memory_an_engine_lets_requests_wait():
    model, requests = build(family="gate"), [([i, 7], 16 + i) for i in range(4)]
    engine, most = Engine(model, slots=4, n_whole=1), 0
    for prompt, n in requests:
        engine.submit(prompt, n)
    while engine.busy:
        engine.tick()
        most = max(most, len(engine.flying))
    assert most == 1 and engine.number == 4
    assert_as_alone(engine, requests)


@pytest.mark.parametrize("keys, serving", [
    slow(dict(router="expert"), {}), (dict(router="expert", kv="share_v", family="rotary"), {}), (dict(router="expert"), dict(exit="kl", exit_threshold=0.3)),
    slow(dict(router="expert", family="inject"), dict(depthwise=False)), slow(dict(router="mlp", family="gate"), dict(core_rows=2, fixed=True))], ids=str)
def test_who_is_put_aside_by_an_engine_comes_back_as_it_was(keys, serving):
    model, requests, draws = build(**keys), [([i] * (1 + 2 * (i % 3)), 27 - i % 5) for i in range(4)], dict(temperature=0.7, top_k=30)
    engine = Engine(model, slots=4, n_whole=2, threshold=0, **serving)
    rest = {key: value for key, value in serving.items() if "exit" in key}
    assert_as_alone(engine, requests, threshold=0, **rest)
    before = engine.counts["put_aside"]
    texts = serve(engine, requests, **draws)                                          # its own draws go on where they were
    assert texts == [alone(model, prompt, n, threshold=0, generator=generator(0), **draws, **rest) for prompt, n in requests]
    assert engine.counts["put_aside"] > before > 0


def test_a_prompt_that_overflows_its_windows_waits_for_larger_ones_in_an_engine():
    model = build(router="expert")
    requests, waits = [([3] * 18, 9), ([4] * 20, 5)], []                              # the second is given 32 + 16 + 16 places, and 20 tokens take every step
    engine = Engine(model, slots=3, n_whole=2, threshold=0)
    wait = engine.wait
    engine.wait = lambda request, *how: waits.append(request.number) or wait(request, *how)
    assert_as_alone(engine, requests, threshold=0)
    assert waits == [1] and engine.counts["put_aside"] == 0
    assert engine.counts["prompt_tokens"] == 18 + 20                                  # read once


# ---------------------------------------------------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize("keys, ask, line", [
    (dict(n_places=20), ([1] * 12, 10), "a prompt of 12 tokens and max_new_tokens=10 can never fit: that is 21 places of K and V, and a request has n_places=20 at most; ask for less"),
    (dict(), ([1] * 32, 2), "that is 33 places of K and V, and a request has n_places=32 at most"),
    (dict(), ([], 3), "an empty prompt has nothing to continue"), (dict(), ([1], 0), "max_new_tokens=0: a request writes at least one token"), (dict(), ([1], 2.5), "max_new_tokens=2.5: a request writes .* whole number"),
    (dict(), ([3, 61], 3), "the prompt holds tokens 3 to 61, and this model knows 0 to 60"), (dict(), ([3, -1], 3), "the prompt holds tokens -1 to 3"), (dict(), ([1], 3, None, 1.0, None, None, 2**64), "seed=18446744073709551616 does not fit"),
    (dict(), ([1], 3, None, -1.0), "temperature=-1.0 is not 0"), (dict(), ([1], 3, None, 1.0, None, 2.0), "top_p=2.0 is outside")], ids=str)
def test_an_engine_refuses_a_request_with_the_numbers(keys, ask, line):
    engine = Engine(build(), slots=2, **keys)
    with pytest.raises(ValueError, match=line) as error:
        engine.submit(*ask)
    assert "\n" not in str(error.value) and not engine.busy
    assert engine.submit([1], 1).number == 0                                          # a refusal is no request


@pytest.mark.parametrize("keys, serving, line", [
    (dict(), dict(slots=0), "slots=0 is too small; an engine needs at least 1"), (dict(), dict(core_rows=0), "core_rows=0 is too small"),
    (dict(), dict(n_places=0), "n_places=0 is too small"), (dict(), dict(n_places=33), "n_places=33 is more than block_size=32"), (dict(), dict(n_whole=-1), "n_whole=-1 is too small"), (dict(), dict(finish_rows=0), "finish_rows=0 is too small"),
    (dict(family="sequence"), dict(depthwise=True), "depthwise=True does not go with sharing='middle_sequence'"), (dict(router="token"), dict(cache="mean"), "cache='mean' keeps one K and V"),
    (dict(router="token"), dict(exit="kl"), "exit='kl' does not go with this model"), (dict(), dict(depth=-1), "depth=-1 is not a number of steps"),
    (dict(router="expert"), dict(threshold=2), "threshold=2 is not a number"), (dict(), dict(threshold=0.4), "threshold=0.4 given, but this model .router='none'. has no expert-choice router"), (dict(), dict(exit_threshold=0.1), "exit_threshold=0.1 belongs to an exit rule")], ids=str)
def test_an_engine_refuses_what_its_model_cannot_do(keys, serving, line):
    with pytest.raises(ValueError, match=line) as error:
        Engine(build(**keys), **serving)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_with_damaged_logits_fails_alone_and_leaves_its_slot_of_the_engine_clean(name, fixed):
    keys, serving = LOT[name]
    model = loud(tiny(**{**FAMILIES[keys.get("family", "cycle")], **ROUTERS[keys.get("router", "none")], "kv": keys.get("kv", "own")})).double()
    add = model.positions.add
    model.positions.add = lambda x_BTD, position_BT: add(x_BTD, position_BT).masked_fill((position_BT == 6)[..., None], torch.nan)
    # A place of number 6 is read by four of them; for one it is the last token's, whose slot is another's by the time that this is heard.
    requests = [([1, 2], 4), ([3], 9), ([4], 5), ([5] * 8, 3), ([6], 6), ([7], 8), ([8, 9], 3), ([10], 7), ([11], 5), ([12], 5)]
    engine, heard = Engine(model, slots=1 + fixed, fixed=fixed, **serving), defaultdict(list)
    asked = [engine.submit(*request) for request in requests]
    for request, token in engine.run():
        heard[request].append(token)
    assert_idle(engine)
    for request, (prompt, n) in zip(asked, requests):
        if len(prompt) + n > 7:
            assert request.error.startswith("the logits are not finite") and heard[request] == [*request.text, None] and len(request.text) == max(0, 7 - len(prompt))
            n = len(request.text)
        assert request.error is None or n < 8
        assert request.text == (alone(model, prompt, n, **without_batching(serving)) if n else [])


# --------------------------------------------------------------------------------------------------------------- what a tick costs


@pytest.mark.parametrize("going, fixed, name", [(1, False, "values"), (0, False, "mean"), (1, True, "expert kl"), *map(slow, *zip(*itertools.product((1, 0), (False, True), LOT)))])
def test_a_tick_of_an_engine_asks_the_device_for_nothing_but_what_it_hears_in_the_end(going, fixed, name, monkeypatch):
    """On the meta device there are no numbers: whoever wants one, or a size that follows from one, is refused."""
    keys, serving = LOT[name]
    with torch.device("meta"):
        model = GPT(tiny(**{**FAMILIES[keys.get("family", "cycle")], **ROUTERS[keys.get("router", "none")], "kv": keys.get("kv", "own")}))
    heard = []

    def hear(on_A1, token_P, fine_P, on_L1):
        heard.append(1)
        numbers = lambda x, of: [] if x is None else [of(i) for i in range(x.numel())]
        return [numbers(on_A1, lambda i: going or i % 2), numbers(token_P, lambda i: 1), numbers(fine_P, lambda i: 1), numbers(on_L1, lambda i: going or i % 2)]

    monkeypatch.setattr(sample, "hear", hear)
    monkeypatch.setattr(sample, "generator", lambda *where: None)
    monkeypatch.setattr(torch, "multinomial", lambda *args, **keys: pytest.fail("torch.multinomial checks its p, on the host"))
    engine, n_ticks = Engine(model, slots=3, fixed=fixed, **serving), 0
    for i in range(4):
        engine.submit([i], 1 + i, temperature=i % 2, top_p=0.9)
    while engine.busy:
        engine.tick()
        n_ticks += 1
    assert len(heard) == n_ticks and engine.counts["finish_rows"] == 1 + 2 + 3 + 4


def test_hearing_an_engine_is_one_transfer(monkeypatch):
    calls, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: calls.append(x.numel()) or tolist(x))
    assert sample.hear(torch.tensor([[True], [False]]), None, torch.tensor([7, 8, 9]), torch.tensor([True])) == [[1, 0], [], [7, 8, 9], [1]] and calls == [6]


@pytest.mark.parametrize("fixed", [False, True])
def test_a_step_of_an_engine_computes_its_rows_alone_and_in_fixed_passes_always_as_many(fixed):
    model, sizes = build(router="expert"), []
    hook = model.recursion.core[0].mlp.register_forward_hook(lambda module, args, out: sizes.append(len(out)))
    engine = Engine(model, slots=6, core_rows=4, fixed=fixed)
    serve(engine, asks(8, seed=6, prompts=(1,)))
    hook.remove()
    assert len(sizes) == engine.counts["core_calls"] and set(sizes) == {4} if fixed else sum(sizes) == engine.counts["core_rows"] and len(set(sizes)) > 1


def test_a_fixed_engine_whose_rows_are_in_step_has_them_all_in_it_whatever_core_rows_says():
    model, sizes = build(router="expert"), set()
    hook = model.recursion.core[0].mlp.register_forward_hook(lambda module, args, out: sizes.add(len(out)))
    serve(Engine(model, slots=6, core_rows=4, depthwise=False, fixed=True), asks(8, seed=6, prompts=(1,)), at_once=True)
    hook.remove()
    assert sizes == {6}


# ----------------------------------------------------------------------------------------------------------- what batching saves


def imposed(number, position):
    return 1 + (number + position) % 3


@pytest.mark.parametrize("kv", ["own", "share"])
def test_rows_of_an_engine_at_different_steps_share_a_call(kv, monkeypatch):
    model, requests, c = build(router="token", kv=kv), [([i], 6) for i in range(24)], 4
    rows, step = [], model.recursion.step

    def counted(h_BTD, anchor, who, step_A1, *rest):
        rows.append(step_A1.flatten().tolist() if torch.is_tensor(step_A1) else [step_A1] * len(who.index_AC))
        return step(h_BTD, anchor, who, step_A1, *rest)

    monkeypatch.setattr(model.recursion, "step", counted)
    engine = Engine(model, slots=8, core_rows=c, steps=imposed)
    serve(engine, requests, at_once=True)
    total = sum(imposed(number, position) for number in range(24) for position in range(6))
    assert sum(map(len, rows)) == total and Counter(itertools.chain(*rows)) == {step: sum(imposed(i, j) > step for i in range(24) for j in range(6)) for step in range(3)}
    assert max(map(len, rows)) == c and len(rows) <= 1.1 * total / c and sum(len(set(steps)) > 1 for steps in rows) > len(rows) / 2
    assert (engine.counts["core_calls"], engine.counts["core_rows"]) == (len(rows), total)
    together, rows[:] = len(rows), []
    serve(Engine(model, slots=c, depthwise=False, steps=imposed), requests, at_once=True)           # all rows take each step together: a call is as long as its slowest
    assert sum(map(len, rows)) == total and all(len(set(steps)) == 1 for steps in rows) and len(rows) > 1.2 * together


@pytest.mark.parametrize("kv", ["own", "share", "share_k", "share_v"])
def test_an_engine_makes_shared_keys_and_values_at_step_0_alone(kv):
    model, requests, rows = build(router="token", kv=kv), [([i], 6) for i in range(9)], Counter()
    hooks = [getattr(block.attention, name).register_forward_hook(lambda module, args, out, name=name: rows.update({name: len(out)}))
             for block in model.recursion.core for name in ("query", "key", "value")]
    engine = Engine(model, slots=5, steps=imposed)
    serve(engine, requests)
    for hook in hooks:
        hook.remove()
    first, every = 2 * 9 * 6, 2 * engine.counts["core_rows"]                          # two blocks
    assert every > 1.5 * first and rows == {"query": every, "key": first if kv in ("share", "share_k") else every, "value": first if kv in ("share", "share_v") else every}


@pytest.mark.parametrize("by_arrival", [True, False])
@pytest.mark.parametrize("router", ["none", "expert", "token"])
def test_the_counts_of_an_engine_are_those_of_the_steps_that_its_tokens_took(router, by_arrival):
    model, requests = build(router=router), asks(6, seed=8)
    engine = Engine(model, slots=3, by_arrival=by_arrival, steps=imposed, depthwise=True)
    want = Counter(prompt_tokens=sum(len(prompt) for prompt, _ in requests if len(prompt) > 1))
    asked = [engine.submit(prompt, n) for prompt, n in requests]
    list(engine.run())
    for number, (prompt, n) in enumerate(requests):
        alone_read = len(prompt) if len(prompt) > 1 else 0                            # by a pass of its own, and its first token comes from there
        stepped = [model(torch.tensor([prompt])).depth_BT[0].tolist()] if alone_read else [[]]
        arrived = [sum(steps > step for steps in stepped[0]) for step in range(3)]
        for position in range(alone_read, len(prompt) + n - 1):
            want.update(start_rows=1, start_keys=position + 1, finish_rows=1, finish_keys=position + 1)
            for step in range(imposed(number, position)):
                arrived[step] += 1
                want.update(core_rows=1, core_keys=arrived[step] if by_arrival and router != "none" else position + 1)
    assert len(asked) == 6 and {name: engine.counts[name] for name in want} == want


def test_a_lot_is_the_same_for_a_row_of_an_engine_and_for_a_whole_step():
    position_AC, step_A1 = torch.arange(60)[:, None], torch.arange(60)[:, None] % 3
    for step in range(3):
        assert torch.equal(lot(position_AC, step_A1)[step_A1 == step], lot(position_AC, step)[step_A1 == step])


def test_who_is_cancelled_leaves_the_engine_and_the_others_write_on():
    model, engine = build(router="expert"), Engine(build(router="expert"), slots=2)
    asked = [engine.submit([i], 8) for i in range(4)]
    while len(asked[0].text) < 3:
        engine.tick()
    for request in (asked[0], asked[3]):                                              # in flight, and waiting
        engine.cancel(request)
    assert asked[0].at == asked[3].at == "done" and len(engine.free) == 1
    streamed = {request for request, _ in engine.run()}
    assert streamed == {asked[1], asked[2]} and [request.text for request in asked] == [alone(model, [i], n) if n else [] for i, n in enumerate((3, 8, 8, 0))]
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family, router, most", [("llama", "none", 1), ("gate", "none", 5), ("rotary", "expert", 3)])
def test_fifty_compiled_tokens_of_a_fixed_engine_need_no_graph_that_the_first_did_not_make(family, router, most):
    """Of the block three at most, for the core's rows and those of finish and start, and of a gate's read and write one each."""
    torch._dynamo.reset()
    model, graphs, after = loud(tiny(**{**FAMILIES[family], **ROUTERS[router], "block_size": 64})), [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_parts(model, backend=backend)
    engine = Engine(model, slots=4, fixed=True)
    asked = [engine.submit([i], 50) for i in range(4)]
    while engine.busy:
        engine.tick()
        if all(request.text for request in asked):
            after.append(len(graphs))
    torch._dynamo.reset()
    assert 1 <= after[0] == after[-1] <= most and not torch._dynamo.utils.counters["graph_break"]


# ------------------------------------------------------------------------------------------------------------- on a GPU, as far as a CPU can tell


class Tape(TorchDispatchMode):
    """A CUDA graph's ways on a CPU: what runs is noted with the tensors that it reads and writes, and runs again on just these. What Python does beside it
    is not done again, and whoever sends numbers over or asks for one is refused."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masked = func in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1])        # as many as are true
        assert func not in REFUSED and not masked, f"{func} while a graph is captured"
        out = func(*args, **(kwargs or {}))
        self.notes.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.notes:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():         # else it was written in place, or is a view
                    old.copy_(new)

    @contextlib.contextmanager
    def capture(self, stream=None):
        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("tensor", "as_tensor", "multinomial"):
                patch.setattr(torch, name, lambda *args, name=name, **keys: pytest.fail(f"torch.{name} while a graph is captured"))
            yield


ATEN = torch.ops.aten
REFUSED = {ATEN._local_scalar_dense.default, ATEN.item.default, ATEN.is_nonzero.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.lift_fresh.default}
INDEXED = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default}


def taped(engine, monkeypatch):
    """The engine, its passes given over to Replay, with stand-ins for CUDA's graphs and streams."""
    stand_ins = {"CUDAGraph": Tape, "graph": lambda graph, stream=None: graph.capture(), "Stream": lambda device: Mock(), "current_stream": lambda device: Mock(),
                 "stream": lambda stream: contextlib.nullcontext()}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    engine.passes = {name: sample.Replay(call, engine.fill[name]) for name, call in engine.passes.items()}
    return engine


REPLAYED = {**LOT, "rotary": (dict(family="rotary"), {}), "lora": (dict(family="lora"), dict(depthwise=True)), "norms": (dict(family="norms"), {}), "lot": (dict(router="lot"), {}),
            "first state": (dict(family="inject"), dict(depth=2)), "in step": (dict(router="expert", kv="share_k"), dict(depthwise=False))}


@pytest.mark.parametrize("name", [name if name in ("rotary", "values", "last kl", "mean", "in step") else slow(name) for name in REPLAYED])
def test_what_an_engine_replays_writes_what_it_wrote_when_captured(name, monkeypatch):
    keys, serving = REPLAYED[name]
    model = build(**keys)
    engine = taped(Engine(model, slots=3, fixed=True, **serving), monkeypatch)
    assert_as_alone(engine, asks(6, seed=2, most=6), **without_batching(serving))
    cases = {name: len(replay.graphs) for name, replay in engine.passes.items()}
    assert cases["finish"] == cases["start"] == 1 and cases["core"] == (1 if engine.depthwise else engine.depth)
    draws = dict(temperature=1.0, top_k=20, top_p=0.9)
    texts = serve(engine, asks(4, seed=5), seed=3, **draws)
    assert texts == [alone(model, prompt, n, generator=generator(3), **draws, **without_batching(serving)) for prompt, n in asks(4, seed=5)]
    assert cases == {name: len(replay.graphs) for name, replay in engine.passes.items()}                     # nothing is captured twice


def test_a_graph_of_an_engine_reads_no_weights_that_autocast_keeps(monkeypatch):
    model = build(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        engine = taped(Engine(model, slots=2, fixed=True), monkeypatch)
        engine.submit([1], 3)
        list(engine.run())
    cast = {args[0].data_ptr() for replay in engine.passes.values() for _, graph, _ in replay.graphs.values() for func, args, _, _ in graph.notes if func in (ATEN._to_copy.default, ATEN.to.dtype)}
    assert {weight.data_ptr() for weight in model.recursion.core.parameters() if weight.dim() == 2} <= cast       # by the graph itself


def test_an_engine_sends_a_table_over_without_waiting(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "tensor", lambda rows, pin_memory: asked.append(pin_memory) or Mock(to=lambda device, non_blocking: asked.append(non_blocking)))
    for device in ("cuda", "cpu"):
        sample.sent([[1]], torch.device(device))
    assert asked == [True, True, False, False]


def test_a_draw_of_an_engine_is_multinomials_without_asking_the_device():
    logits_BV = torch.randn(4, 61, generator=generator(1))
    for seed in range(20):
        p_BV = (logits_BV / 0.7).softmax(-1)
        assert torch.equal(draw(logits_BV, 0.7, generator=generator(seed)), torch.multinomial(p_BV, 1, generator=generator(seed))[:, 0])


# What the kernels of an engine are asked for, by the libraries' documentation: a stand-in for each reads its arguments so, one row at a time.


def attended(q_HK, k_SGK, v_SGK):
    k_SHK, v_SHK = (x.repeat_interleave(len(q_HK) // x.size(1), 1) for x in (k_SGK, v_SGK))
    p_HS = (torch.einsum("hk,shk->hs", q_HK, k_SHK) / q_HK.size(-1) ** 0.5).softmax(-1)
    return torch.einsum("hs,shk->hk", p_HS, v_SHK)


def flash_decoding(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, causal):
    assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32 and causal and k_cache.stride(-1) == 1
    return torch.stack([attended(q[i, 0], k_cache[row, :n], v_cache[row, :n])[None] for i, (row, n) in enumerate(zip(cache_batch_idx, cache_seqlens))])


def flash_varlen(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, seqused_k):
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32 and len(cum_seq_q) == len(cum_seq_k) == len(query) + 1 == len(seqused_k) + 1
    assert (max_q, dropout_p, return_debug_mask) == (1, 0.0, False) and cum_seq_q.tolist() == list(range(len(query) + 1)) and max(seqused_k) <= max_k
    return [torch.stack([attended(q_HK, key[first : first + n], value[first : first + n]) for q_HK, first, n in zip(query, cum_seq_k, seqused_k)])]


@pytest.mark.parametrize("fill", [0, 1])
def test_all_kernels_of_an_engine_read_the_same_places(fill, monkeypatch):
    for module in (model_py, sample):                                                 # for its windows the store has to reach further
        monkeypatch.setattr(module, "flash_attn_with_kvcache", flash_decoding)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_varlen)
    shelves = sample.Shelves(build(family="rotary"), 3, 29, 3, 2, None, "full", fixed=True)
    store, rng = shelves.spaces["core"].stores[0].normal_(generator=generator(0)), generator(1)
    end = shelves.nowhere("core")[0]                                                  # the last window is that of rows which fill up
    first_A, n_A = torch.tensor([0, UNIT, 3 * UNIT, *[end] * fill]), torch.tensor([29, 1, 7, *[1] * fill])
    q_A1HK = torch.randn(3 + fill, 1, 4, store.size(-1), generator=rng, dtype=store.dtype)
    want_A1HK, *others = (read(q_A1HK, *store, first_A, n_A, 29) for read in model_py.READERS.values())
    assert len(others) == 2
    for got_A1HK in others:
        torch.testing.assert_close(got_A1HK, want_A1HK)


def test_torchs_kernel_takes_what_an_engine_hands_it():
    of = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16, device="meta")  # noqa: E731
    numbers = torch.empty(3, dtype=torch.long, device="meta")
    assert model_py.read_torch(of(3, 1, 4, 16), of(64, 2, 16), of(64, 2, 16), numbers, numbers, 32).shape == (3, 1, 4, 16)


@pytest.mark.parametrize("width, dtype, fits", [(64, torch.bfloat16, True), (256, torch.float16, True), (64, torch.float32, False), (12, torch.bfloat16, False), (264, torch.bfloat16, False)])
def test_an_engine_asks_flash_kernels_only_for_heads_that_they_have(width, dtype, fits):
    q = Mock(is_cuda=True, dtype=dtype, size=lambda axis: width)
    assert model_py.flash_fits(q) == fits and not model_py.flash_fits(torch.zeros(1, 1, 1, width, dtype=dtype))


# ------------------------------------------------------------------------------------------------------------------- users


def test_who_leaves_the_run_of_an_engine_in_the_midst_misses_nothing_in_the_next():
    model, requests, heard = build(), asks(7, seed=9), defaultdict(list)
    engine = Engine(model, slots=4)
    asked = [engine.submit(*request) for request in requests]
    while engine.busy or engine.untold:
        for request, token in engine.run():                                           # one, and away
            heard[request].append(token)
            break
    assert [heard[request] for request in asked] == [alone(model, *request) for request in requests]


def test_an_engine_serves_in_evaluation_mode_whoever_trains_in_between():
    model = loud(tiny(**MIDDLE, router="expert", dropout=0.5)).double()
    engine, texts = Engine(model, slots=2), []
    asked = [engine.submit(*request) for request in asks(3)]
    while engine.busy:
        model.train()
        engine.tick()
    assert [request.text for request in asked] == [alone(model, *request) for request in asks(3)]


@pytest.mark.parametrize("fixed", [False, True])
def test_two_engines_and_generate_share_a_model_and_nothing_else(fixed):
    model, requests = build(router="expert", kv="share_v"), [asks(4, seed=seed) for seed in (1, 2)]
    engines = [Engine(model, slots=2, fixed=fixed, **keys) for keys in (dict(exit="kl", exit_threshold=0.3), dict(core_rows=1))]
    asked = [[engine.submit(*request) for request in some] for engine, some in zip(engines, requests)]
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.tick()
        alone(model, [1, 2], 2)
    for texts, some, keys in zip(asked, requests, (dict(exit="kl", exit_threshold=0.3), {})):
        assert [request.text for request in texts] == [alone(model, *request, **keys) for request in some]


def test_who_is_put_aside_by_an_engine_whose_rows_are_in_step_waits_for_his_own():
    requests = [([47, 51], 12), ([38, 13, 38], 8), (list(range(16)), 8)]              # the third comes back in the midst of its loop, while the others begin
    engine = Engine(build(router="expert"), slots=4, n_whole=2, threshold=0, depthwise=False)
    assert_as_alone(engine, requests, threshold=0)
    assert engine.counts["put_aside"] > 0


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_data(place)
        make_config(place, router="expert", update="replace", depth_sampling="fixed", state_noise=0.0, gate_noise=0.0, max_iters=0)
        train.main(["toy.py", "--out_dir=out/expert"])
    return place


def served(place, monkeypatch, capsys, lines, *argv, stdin=False):
    """The answers of sample.py --requests to these lines, {id: answer}."""
    text = "".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    monkeypatch.chdir(place)
    (place / "asked.jsonl").write_text(text, encoding="utf-8", newline="")
    capsys.readouterr()
    failure = None
    try:
        sample.main(["--requests=asked.jsonl", "--device=cpu", "--max_new_tokens=5", *argv])
    except UserError as error:
        failure = str(error)
    return {answer["id"]: answer for answer in map(json.loads, capsys.readouterr().out.split("\n")[:-1])}, failure


def test_requests_from_a_file_are_served_with_their_own_settings(run_folder, monkeypatch, capsys):
    model, tokenizer, _ = sample.load_run("out/expert" if monkeypatch.chdir(run_folder) else run_folder / "out/expert", "cpu")
    asked = [{"prompt": "def x", "temperature": 0, "max_new_tokens": 4}, {"prompt": "self\u2028\x85 y", "id": "two", "temperature": 1, "seed": 5, "top_k": 7}, {"prompt": "", "top_p": 0.5}, "\n", "  \r\n",
             {"prompt": "x", "id": "off", "top_k": None}]
    got, failure = served(run_folder, monkeypatch, capsys, asked, "--slots=2", "--seed=3")
    assert failure is None and set(got) == {0, "two", 2, "off"}
    for key, draws, n, seed in ((0, dict(temperature=0, top_k=50), 4, 3), ("two", dict(temperature=1, top_k=7), 5, 5), (2, dict(temperature=0.8, top_k=50, top_p=0.5), 5, 5),
                                ("off", dict(temperature=0.8, top_k=50), 5, 6)):
        prompt = {0: "def x", "two": "self\u2028\x85 y", 2: "", "off": "x"}[key]
        ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
        text = sample.Text(tokenizer, None)
        for token in model.generate([torch.tensor(ids)], n, generator=generator(seed), **draws)[0].tolist()[len(ids):]:
            text.add(token)
        text.end()
        assert got[key] == {"id": key, "text": text.text, "tokens": n, "ended": "length"}


def test_a_request_that_cannot_be_served_is_answered_with_its_reason_and_the_others_are_served(run_folder, monkeypatch, capsys):
    asked = [{"prompt": "x", "max_new_tokens": 10**30}, {"prompt": "x", "seed": 2**64}, {"prompt": "x", "temperature": -1}, {"prompt": "x", "top_k": -3}, {"prompt": "x", "top_p": 2}, '{"prompt": "x", "temperature": NaN}\n',
             {"prompt": "x" * 40}, {"prompt": "x", "max_new_tokens": 0}, {"prompt": "x", "top_k": 10**30, "temperature": 1e300, "seed": -1}]
    got, failure = served(run_folder, monkeypatch, capsys, asked)
    assert failure == "8 of 9 requests failed; their answers say why" and got[8]["tokens"] == 5
    words = ["can never fit", "does not fit into 64 bits", "temperature=-1.0", "top_k=-3", "top_p=2.0", "temperature=nan", "can never fit", "at least one token"]
    assert all(word in got[i]["error"] and "\n" not in got[i]["error"] for i, word in enumerate(words))


@pytest.mark.parametrize("line, words", [
    ("no json", "line 2 is no JSON"), ("[" * 100_000, "line 2 is no JSON"), ("[1]", "line 2 is no request"), ('"text"', "line 2 is no request"), ("{}", "line 2 is no request"), ('{"promt": "x"}', "line 2: a request has no 'promt', did you mean 'prompt'?"), ('{"prompt": 3}', "line 2 is no request"),
    ('{"prompt": null}', "line 2 is no request"), ('{"prompt": "x", "seed": true}', "line 2: {'seed': True"), ('{"prompt": "x", "seed": 1.5}', "line 2: {'seed': 1.5"), ('{"prompt": "x", "top_k": "5"}', "line 2: {'top_k': '5'"),
    ('{"prompt": "x", "max_new_tokens": Infinity}', "line 2: {'max_new_tokens': inf"), ('{"prompt": "x", "max_new_tokens": {"n": 1}}', "line 2: {'max_new_tokens': {"), ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "line 2: {'temperature': 1000"),
    ('{"prompt": "x", "promt": "x"}', "line 2: a request has no 'promt', did you mean 'prompt'?"), ('{"prompt": "x", "id": []}', "line 2: {'id': []"), ('{"prompt": "x", "a\\nb": 1}', r"line 2: a request has no 'a\nb'; it has prompt"),
    ('{"prompt": "x", "stop": ' + '"' + "y" * 10_000 + '", "seed": "' + "z" * 10_000 + '"}', "line 2: {'seed': 'zzz")], ids=lambda value: value[:40])
def test_serve_refuses_a_line_that_is_no_request_by_its_number(line, words, run_folder, monkeypatch, capsys):
    got, failure = served(run_folder, monkeypatch, capsys, ['{"prompt": "x"}\n', line + "\n"])
    assert not got and words in failure and "\n" not in failure and len(failure) < 300 and failure.startswith("--requests=asked.jsonl: line 2")


@pytest.mark.parametrize("argv, words", [
    (["--requests=none.jsonl"], "--requests=none.jsonl: cannot be read as UTF-8 text (No such file"), (["--requests=."], "--requests=.: cannot be read"), (["--requests=out/expert/ckpt.pt"], "--requests=out/expert/ckpt.pt: cannot be read"),
    (["--requests=empty.jsonl"], "holds no request"), (["--requests=one.jsonl", "--slots=0"], "slots=0 is out of range"), (["--requests=one.jsonl", "--num_samples=2"], "--num_samples does not go with --requests"),
    (["--requests=one.jsonl", "--use_cache=False"], "--use_cache does not go with --requests"), (["--requests=one.jsonl", "--start=x"], "--start does not go with --requests")], ids=lambda value: str(value)[:50])
def test_serve_refuses_flags_and_files_that_it_cannot_use(argv, words, run_folder, monkeypatch):
    monkeypatch.chdir(run_folder)
    (run_folder / "empty.jsonl").write_text(" \n\n"), (run_folder / "one.jsonl").write_text('{"prompt": "x"}')
    assert words in refusal(sample.main, [*argv, "--device=cpu"])


def test_serve_leaves_autocast_as_it_was_and_answers_in_bfloat16_too(run_folder, monkeypatch, capsys):
    got, failure = served(run_folder, monkeypatch, capsys, [{"prompt": "x"}, {"prompt": "def y"}], "--dtype=bfloat16", "--slots=99")
    assert failure is None and [got[i]["tokens"] for i in (0, 1)] == [5, 5]
    assert not torch.is_autocast_enabled("cpu")
