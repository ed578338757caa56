"""The engine: every request writes what it would write alone, streamed, in turn, and in the memory that was declared.

    python -m pytest -q tests/test_serve.py
"""
import functools
import gc
import itertools
import random
from collections import Counter, defaultdict

import pytest
import torch
from tiny import all_pairs, layout, loud, tiny

import sample
from model import GPT, generator, make_cache, stream
from sample import UNIT, Engine

MIDDLE = layout("1+2x3+1")
FAMILIES = {
    "dense": layout("0+3x1+0"), "llama": dict(layout("0+3x1+0"), block="llama", n_kv_head=2), "cycle": MIDDLE, "sequence": dict(layout("0+3x2+1"), sharing="middle_sequence"),
    "rotary": dict(MIDDLE, block="llama", n_kv_head=2), "gate": dict(MIDDLE, update="gate"), "inject": dict(MIDDLE, update="inject", state_init="random", state_std=0.5),
    "norms": dict(layout("1+1x3+0"), loop_norm=True, sandwich_norm=True), "lora": dict(MIDDLE, lora_rank=2), "ouro": dict(layout("1+1x4+1"), loss="every")}
ROUTERS = {"none": {}, "expert": dict(router="expert"), "token": dict(router="token"), "mlp": dict(router="expert", router_kind="mlp"), "aux": dict(router="expert", aux_router=True),
           "lot": dict(router="expert", router_choice="random"), "few": dict(router="expert", capacity=[0.5, 0.5, 0.3]),
           "bias": dict(router="token", router_score="sigmoid", router_balance="bias")}
EXITS = [(None, None), ("kl", 0.05), ("kl", 3.0), ("cdf", 0.6)]
SETTINGS = ["cache", "exit", "exit_threshold", "depth"]


def legal(case):
    family, router, kv, exit = case["family"], case["router"], case["kv"], case["exit"][0]
    routed, one = router != "none", family in ("dense", "llama", "sequence")
    return not (one and (routed or kv != "own" or exit or case["depth"] is not None or case["cache"] != "full") or routed and family in ("norms", "ouro")
                or router in ("token", "bias") and family in ("gate", "inject") or router == "few" and kv != "own" or case["cache"] != "full" and (routed or kv != "own")
                or exit and router in ("token", "bias", "few") or (exit == "cdf") != (family == "ouro" and exit is not None) or case["depth"] == 5 and (routed or family == "lora"))


CHOICES = {"family": list(FAMILIES), "router": list(ROUTERS), "kv": ["own", "share", "share_k", "share_v"], "cache": ["full", "first", "last", "mean"], "exit": EXITS, "depth": [None, 0, 1, 5]}
MODELS = all_pairs(CHOICES, legal)                                                  # few, in which every two choices meet
ENGINES = all_pairs({"depthwise": [True, False], "slots": [1, 3, 5], "core_rows": [None, 2], "finish_rows": [1, 2], "n_whole": [None, 1, 2]}, lambda case: True)


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


def serve(engine, requests, **keys):
    for prompt, n in requests:
        engine.submit(prompt, n, **keys)
    return collect(engine)


def collect(engine):
    """The texts in order of the requests' numbers, from what was streamed alone; every promise about an idle engine holds."""
    texts = defaultdict(list)
    for request, token in engine.run():
        assert token is not None, request.error
        texts[request.number].append(token)
        assert request.text[: len(texts[request.number])] == texts[request.number]
    assert_idle(engine)
    return [texts[number] for number in sorted(texts)]


def assert_idle(engine):
    assert not (engine.busy or engine.flying or engine.waiting or engine.events)
    assert sorted(engine.free) == list(range(engine.slots))
    for space in engine.shelves.spaces.values():
        assert space.free == [(0, space.n_places)] * (space.n_places > 0)            # one run: nothing lost, nothing in pieces


# ----------------------------------------------------------------------------------------------------- the text of a request


def check_texts(case, keys, requests):
    model, chosen = model_of(case), dict(keys)
    chosen["depthwise"] = chosen["depthwise"] and model.cfg.any_depth
    engine = Engine(model, **chosen, **options(case))
    assert serve(engine, requests) == [alone(model, prompt, n, **options(case)) for prompt, n in requests]
    return engine


@pytest.mark.parametrize("i", range(len(MODELS)), ids=lambda i: name(MODELS[i]))
def test_engine_text_is_that_of_generate_alone(i):
    check_texts(MODELS[i], ENGINES[i % len(ENGINES)], asks(4, seed=i, most=9))


@pytest.mark.slow
@pytest.mark.parametrize("family, router", [(family, router) for family, router in itertools.product(FAMILIES, ROUTERS) if legal(dict(family=family, router=router, kv="own", cache="full", exit=(None, None), depth=None))])
def test_engine_text_is_that_of_generate_alone_in_every_mix(family, router):
    rest = {key: values for key, values in CHOICES.items() if key not in ("family", "router")}
    cases = [dict(family=family, router=router, **dict(zip(rest, values))) for values in itertools.product(*rest.values())]
    for i, case in enumerate(list(filter(legal, cases))[::3]):
        check_texts(case, ENGINES[i % len(ENGINES)], asks(6, seed=i))


# Models in which the engine has something to keep apart, by name: the keys of build, and the engine's.
LOT = {"dense": (dict(family="dense"), {}), "gate": (dict(family="gate"), dict(depthwise=True)), "expert": (dict(router="expert"), {}), "token": (dict(router="token", kv="share_k"), {}),
       "shared": (dict(router="expert", kv="share"), {}), "values": (dict(router="expert", kv="share_v"), {}), "mean": (dict(family="gate"), dict(cache="mean", depthwise=True)),
       "kl": (dict(family="rotary"), dict(exit="kl", exit_threshold=0.3)), "cdf": (dict(family="ouro"), dict(exit="cdf", exit_threshold=0.6)),
       "last kl": (dict(family="gate"), dict(exit="kl", exit_threshold=0.3, cache="last")), "expert kl": (dict(router="expert"), dict(exit="kl", exit_threshold=0.3))}


def lot(name, **more):
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


@pytest.mark.parametrize("name", LOT)
def test_engine_logits_in_float32_are_those_of_a_row_alone(name):
    model, serving = lot(name, dtype=torch.float32)
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


@pytest.mark.parametrize("name", LOT)
def test_serve_does_not_let_the_batch_change_a_text(name):
    model, serving = lot(name)
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
    assert second.slot == 0


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
    assert dict(when) == {0: [2, 4], 1: [2, 4, 6, 8, 10], 2: [8]}                     # start, core, finish and start, core ...; the third starts with a finish of the second


# --------------------------------------------------------------------------------------------------------------- no end, no leak


def soak(seed, n, **keys):
    """n short requests through one engine, in two waves: all that it holds is as large after the second as after the first."""
    model, sizes = build(router="expert", dtype=torch.float32), []
    engine = Engine(model, slots=24, core_rows=16, finish_rows=8, n_places=20, **keys)
    allocated, requests = engine.shelves.nbytes(), asks(n, seed=seed, prompts=(1, 1, 1, 2, 8))
    for wave in (requests[: n // 2], requests[n // 2 :]):
        first = engine.number
        texts = serve(engine, wave)
        assert [len(text) for text in texts] == [n for _, n in wave] and engine.number == first + len(wave)
        gc.collect()
        sizes.append((engine.shelves.nbytes(), sum(x.nbytes for x in engine.state.values()), sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())))
    assert sizes[0] == sizes[1] and allocated == sizes[0][0]
    return engine, texts


def test_serve_starves_nobody_and_keeps_nothing():
    soak(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [dict(), dict(threshold=0, n_whole=6), dict(exit="kl", exit_threshold=0.3)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_five_hundred_requests_of_an_engine_starve_nobody_and_leave_nothing(seed, keys):
    engine, texts = soak(seed, 500, **keys)
    assert engine.counts["put_aside"] > 0 or "n_whole" not in keys
    rest = {key: value for key, value in keys.items() if key != "n_whole"}
    for (prompt, n), text in list(zip(asks(500, seed=seed, prompts=(1, 1, 1, 2, 8))[250:], texts))[::25]:
        assert text == alone(engine.model, prompt, n, **rest)
