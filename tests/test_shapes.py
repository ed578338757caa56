"""Names tell the truth: a tensor called x_BTD in model.py has the axes B, T and D, wherever it stands.

    python -m pytest -q tests/test_shapes.py
"""
import ast
import contextlib
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny import loud, some_ids, tiny

import model as model_py
import sample as sample_py

SHAPE = re.compile(r"_([ABTSCLMNnDGHKFVEPQR1]+)$")
# One Python number per row; and a table whose name happens to end in letters of the alphabet.
LISTS = {"n_new_B", "length_B", "start_B", "stop_B", "last_B", "next_B", "n_L", "n_new_A", "row_A", "start_A", "span_A", "OWN_CACHES"}
CUDA = {"first_n", "y_AHK"}                                        # of a kernel that runs nowhere else


def named_tensors(scope):
    """(name, letters, tensor) of all variables in a dict whose names end in a shape."""
    for name, value in scope.items():
        if isinstance(value, torch.Tensor) and SHAPE.search(name):
            yield name, SHAPE.search(name)[1], value


def lies(scope, cfg):
    """Sentences about names in one function's variables (or one object's fields) that do not fit their tensors."""
    sizes = {"D": cfg.n_embd, "H": cfg.n_head, "G": cfg.kv_heads, "K": cfg.head_width, "F": cfg.ffn_width, "V": cfg.vocab_size,
             "E": 2 * cfg.n_embd, "1": 1}
    for name, letters, tensor in named_tensors(scope):
        if tensor.dim() != len(letters):
            yield f"{name} has shape {tuple(tensor.shape)}"
            continue
        for letter, size in zip(letters, tensor.shape):
            if letter in "AB" and size == 1:
                continue                                                           # one row for all
            if sizes.setdefault(letter, size) != size:
                yield f"{name} has shape {tuple(tensor.shape)}, but {letter} is {sizes[letter]}"


@contextlib.contextmanager
def watch(cfg, seen, found):
    """Look at the variables of every function of model.py and sample.py when it returns, and into the objects that it handles."""
    def look(scope, where):
        seen.update(name for name, _, _ in named_tensors(scope))
        found.update(f"{where}: {lie}" for lie in lies(scope, cfg))

    def profile(frame, event, arg):
        if event == "return" and frame.f_code.co_filename in (model_py.__file__, sample_py.__file__):
            look(frame.f_locals, frame.f_code.co_qualname)
            for value in [*frame.f_locals.values(), arg]:
                if type(value).__module__ == model_py.__name__:                    # Seat, Who, KVCache, Output
                    look(value._asdict() if hasattr(value, "_fields") else vars(value), type(value).__name__)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def run_everything(keys, seen, found):
    cfg = tiny(**keys)
    model, prompts = loud(cfg), [some_ids(9), some_ids(4, seed=2), some_ids(6, seed=3)]
    with watch(cfg, seen, found):
        model.train()(some_ids(2, 7), some_ids(2, 7), seed=(0, 0))
        model.eval()(some_ids(2, 7), some_ids(2, 7))
        model.recursion.router.rebalance(torch.ones(cfg.n_recur), 0.1)
        for cache in ("full", *(model_py.FOLDS if cfg.compressible else ())):
            model.generate(prompts, 3, top_k=5, cache=cache)
        model.generate(some_ids(1, 5), 3)
        for exit in () if cfg.n_recur == 1 or not cfg.any_depth or cfg.router == "token" else ("kl", "cdf")[: 1 + (cfg.loss == "every")]:
            model.generate(prompts, 3, exit=exit, exit_threshold=0.3)
        model.generate(some_ids(2, 5), 3, use_cache=False, temperature=0)
        serve(model)
        cache = model_py.make_cache(model, 2, 12)
        model.feed(some_ids(2, 5), cache, None, [5, 2], every=True)


def serve(model):
    """Requests of several lengths, depth-wise with early exit where the model can do it."""
    able = model.cfg.any_depth and model.cfg.n_recur > 1
    exits = [None] * (not able or model.cfg.loss == "every") + ["kl"] * (able and model.cfg.router != "token") + ["cdf"] * (able and model.cfg.loss == "every")
    for exit, depthwise, fixed in itertools.product(exits or [None], [False, True][: 1 + able], [False, True]):
        engine = sample_py.Engine(model, slots=3, exit=exit, depthwise=depthwise, fixed=fixed, cache="mean" if model.cfg.compressible and able else "full")
        for prompt, n, temperature in (([1], 3, 0), ([2, 3, 4], 2, 0.7), ([5], 4, 0.7), ([6], 2, 0)):
            engine.submit(prompt, n, temperature=temperature)
        assert len(list(engine.run())) == 11


ROUTED = [dict(grt, router=router, kv=kv, **more) for grt in [dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1)] for kv in ("own", "share", "share_k")
          for router, more in (("expert", {}), ("expert", dict(router_kind="mlp", update="gate")), ("expert", dict(router_choice="random")), ("expert", dict(aux_router=True)),
                             ("token", {}))]


def names_in_model():
    """Every variable, argument and field of model.py whose name ends in a shape."""
    names = set()
    for node in ast.walk(ast.parse(Path(model_py.__file__).read_text(encoding="utf-8"))):
        names.add(getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None))
    return {name for name in names if isinstance(name, str) and SHAPE.search(name)}


@pytest.mark.slow
def test_shape_suffixes_tell_the_truth():
    seen, found = set(), set()
    grt = dict(n_prelude=1, n_core=2, n_recur=3, n_coda=1, update="gate", state_noise=0.1, gate_noise=0.1, n_ffn=40)
    for keys in (grt, dict(grt, block="llama", n_kv_head=2), dict(n_recur=2, sharing="sequence"), dict(update="inject", fused_loss=True),
                 dict(grt, lora_rank=3), dict(update="inject", n_recur=2, state_init="random"), dict(grt, loss="every"), *ROUTED):
        run_everything(keys, seen, found)
    assert not found, "\n".join(sorted(found))
    assert names_in_model() - seen == LISTS | CUDA, "names that were never looked at"


def test_a_name_that_lies_is_found():
    cfg, x = tiny(), torch.zeros(2, 5, 16)
    assert list(lies({"x_BTD": x, "y_BT1": x[..., :1], "p_BTD": x[:1]}, cfg)) == []
    assert len(list(lies({"x_BT": x}, cfg))) == len(list(lies({"x_BTV": x}, cfg))) == 1
    assert len(list(lies({"x_BTD": x, "z_BTD": x[:, :4]}, cfg))) == 1
