"""A data set of twelve short files, and settings that train on it in a tenth of a second."""
import os
import random
from pathlib import Path

import prepare
import pytest
import torch
from config import UserError

WORDS = "def return class import for in while if else yield self None True é 🦊 x y z".split()
SETTINGS = dict(n_prelude=1, n_core=1, n_recur=4, n_coda=1, n_embd=16, n_head=2, block_size=32, update="gate", gate_bias=0.0,
                depth_sampling="uniform", state_noise=0.1, gate_noise=0.1, batch_size=4, max_iters=4, warmup_iters=2,
                learning_rate=1e-2, eval_interval=0, eval_tokens=128, log_interval=1, sample_tokens=0, dataset="toy", device="cpu",
                compile=False)
DENSE = dict(n_prelude=0, n_core=2, n_recur=1, n_coda=0, update="replace", depth_sampling="fixed")
SEQUENCE = dict(n_core=2, n_recur=2, sharing="middle_sequence", update="replace", depth_sampling="fixed")


def make_data(folder, name="toy"):
    """`folder`/data/`name`, of about 20,000 tokens (bytes)."""
    rng, corpus = random.Random(0), folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i in range(12):
        lines = (" ".join(rng.choices(WORDS, k=8)) for _ in range(50))
        (corpus / f"{i}.txt").write_text("\n".join(lines), encoding="utf-8")
    return prepare.prepare(corpus, name=name, data_dir=folder / "data", quiet=True)


def make_config(folder, **changes):
    """A config file of SETTINGS; train.py writes to out/toy."""
    path = folder / "toy.py"
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in {**SETTINGS, **changes}.items()), encoding="utf-8")
    return str(path)


def train_runs(folder, runs):
    """`folder`, with the data set and out/NAME of each of `runs`, {name: changes}, trained for eight steps where they do not say otherwise."""
    import train
    here = os.getcwd()
    make_data(folder)
    os.chdir(folder)
    for name, changes in runs.items():
        make_config(folder, **{"max_iters": 8, "eval_tokens": 64, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
    os.chdir(here)
    return folder


def open_run(folder, **changes):
    """A run as eval.py opens it, on the CPU in float32."""
    import eval as evaluation
    s = evaluation.parse(flags(**changes))
    return evaluation.open_run(Path(folder), evaluation.read_state(Path(folder)), s, torch.device("cpu"), torch.autocast("cpu", enabled=False))


def flags(**changes):
    return [f"--{name}={value}" for name, value in changes.items()]


def refusal(call, *args, **kwargs):
    """The one line that a call is refused with."""
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)
