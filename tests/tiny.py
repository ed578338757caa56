"""Models small enough to run in a millisecond, and loud enough that a mistake shows."""
import itertools
import random

import torch

from model import GPT, GPTConfig


def tiny(**changes):
    """A config with 16 features, 4 heads, 61 tokens and context 32, and the given changes."""
    return GPTConfig(**{"vocab_size": 61, "block_size": 32, "n_embd": 16, "n_head": 4, "n_core": 2, **changes})


def loud(cfg, seed=0):
    """A model in evaluation mode whose logits are far from flat: at N(0, 0.02) every wrong answer looks right."""
    torch.manual_seed(seed)
    model = GPT(cfg).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.3)
            elif name.endswith("gate.down.bias"):
                p.normal_(0, 1)                                       # gates all over (0, 1), not at .982
            else:
                p.add_(0.2 * torch.randn_like(p))                     # norms and biases
        for name, p in model.state_dict().items():
            if name.endswith("bias_R"):
                p.normal_(0, 0.3)                                     # a balancing bias that changes choices
    return model


def some_ids(*shape, vocab_size=61, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def all_pairs(choices, legal, seed=0, tries=40):
    """Dicts with one value per key, few, such that every two values which may meet do meet in one of them."""
    rng, keys = random.Random(seed), list(choices)
    every = [dict(zip(keys, values)) for values in itertools.product(*choices.values())]
    every = [case for case in every if legal(case)]
    pairs = lambda case: set(itertools.combinations(case.items(), 2))  # noqa: E731
    missing, cases = set().union(*map(pairs, every)), []
    while missing:
        pair = min(missing, key=repr)
        fitting = [case for case in every if pair in pairs(case)] if len(missing) < 20 else every
        best = max(rng.sample(fitting, min(tries, len(fitting))), key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append(best)
    return cases


def layout(text):
    """The keys of "1+2x3+1"."""
    prelude, core, coda = text.split("+")
    n_core, n_recur = core.split("x")
    return {"n_prelude": int(prelude), "n_core": int(n_core), "n_recur": int(n_recur), "n_coda": int(coda)}


def case_config(case):
    """The config of one case of GRID."""
    middle = "" if case["layout"].startswith("0") and case["layout"].endswith("0") else "middle_"
    return tiny(**layout(case["layout"]), sharing=middle + case["sharing"],
                **{name: case[name] for name in ("block", "update", "n_kv_head", "bias")})


def legal(case):
    fixed = case["sharing"] == "cycle" or (case["update"] == "replace" and case["depth"] is None)
    return fixed and not (case["block"] == "llama" and case["bias"])


# Few models in which every two choices meet.
GRID = all_pairs({
    "layout": ["0+3x1+0", "0+2x3+0", "1+2x2+0", "0+3x2+1", "1+2x3+1", "2+1x3+2"],
    "block": ["gpt2", "llama"], "sharing": ["cycle", "sequence"], "update": ["replace", "inject", "gate"],
    "n_kv_head": [4, 2, 1], "bias": [False, True], "depth": [None, 0, 1, 5], "prompts": ["equal", "unequal"]}, legal)


def case_name(case):
    words = {"n_kv_head": "kv", "bias": "bias", "depth": "depth"}
    return "-".join(words.get(name, "") + str(value) for name, value in case.items())
