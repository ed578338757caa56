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

import model as model_py
import sample
from model import GPT, UNIT, generator, lot, make_cache
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
                asked[-1].greedy, asked[-1].draw = False, lambda logits_1V, seen=logits[len(asked) - 1]: (seen.append(logits_1V[0]), logits_1V.argmax(-1))[1]
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
    for i, case in enumerate(list(filter(legal, cases))[::5]):
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
@pytest.mark.parametrize("keys", [dict(), dict(threshold=0, n_whole=6), dict(exit="kl", exit_threshold=0.3)], ids=str)
@pytest.mark.parametrize("seed", range(3))
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
    (dict(), ([], 3), "an empty prompt has nothing to continue"), (dict(), ([1], 0), "max_new_tokens=0: a request writes at least one token"),
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
    (dict(router="expert"), dict(threshold=2), "threshold=2 is not a number"), (dict(), dict(exit_threshold=0.1), "exit_threshold=0.1 belongs to an exit rule")], ids=str)
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
