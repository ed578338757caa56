"""Benchmarks: what a run answers to lm-evaluation-harness, against sums by hand, and toy tasks through the harness itself.

    python -m pytest -q tests/test_harness.py          (what needs the harness is skipped without it: pip install lm-eval)
"""
import json
import math
import os
import random
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiktoken
import torch
from tiny import layout, loud, tiny
from toy import flags, make_config, make_data, open_run, refusal

import eval as evaluation
import prepare
import train
from eval import Answers, set_means, task_names, text_windows, until_first

needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness is not here")
BYTES = prepare.get_tokenizer("bytes")
END = BYTES.eot_token
MODELS = {"dense": {}, "gated": dict(**layout("1+2x3+1"), update="gate"), "expert": dict(**layout("1+1x3+1"), router="expert"),
          "token": dict(**layout("1+1x3+1"), router="token"), "share": dict(**layout("0+2x3+0"), router="expert", kv="share")}


def run_of(name, batch_size=8, **changes):
    """A loud model with a token per byte, seven ids that no byte has, and a context of 32."""
    model = loud(tiny(vocab_size=264, **{**MODELS[name], **changes}))
    return SimpleNamespace(name=name, model=model, tokenizer=BYTES, batch_size=batch_size, device=torch.device("cpu"),
                           autocast=torch.autocast("cpu", enabled=False))


def random_ids(n, rng):
    return [rng.randrange(256) for _ in range(n)]


def random_pairs(n, rng, longest=24):
    return [(random_ids(rng.randint(1, 40), rng), random_ids(rng.randint(1, longest), rng)) for _ in range(n)]


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


def by_hand(model, ids, n, **how):
    """(nats, greedy) of the last n ids, from the logits of one row in float64; no more than a context before them."""
    logits_TV = model(torch.tensor([ids[-model.cfg.block_size - 1 : -1]]), **how).logits[0].detach().double()[-n:]
    nats = sum(logits_V.log_softmax(-1)[i].item() for logits_V, i in zip(logits_TV, ids[-n:]))
    return nats, [int(logits_V.argmax()) for logits_V in logits_TV] == ids[-n:]


# ---- likelihoods


@pytest.mark.parametrize("name", MODELS)
def test_a_harness_score_is_the_sum_of_log_probabilities(name):
    run, rng = run_of(name), random.Random(name)
    pairs = random_pairs(20, rng)
    for i in range(0, 20, 4):                                    # what greedy decoding says after so much
        context = pairs[i][0][:20]
        pairs[i] = context, run.model.generate(torch.tensor([context]), 5, temperature=0)[0, len(context) :].tolist()
    wanted = [by_hand(run.model, context + continuation, len(continuation)) for context, continuation in pairs]
    told = Answers(run).score(pairs)
    assert [nats for nats, _ in told] == pytest.approx([nats for nats, _ in wanted], abs=1e-4)
    assert [same for _, same in told] == [same for _, same in wanted] and 5 <= sum(same for _, same in told) < 20


@pytest.mark.parametrize("name", MODELS)
def test_a_harness_score_does_not_depend_on_the_batch(name):
    pairs = random_pairs(17, random.Random(0))
    alone, joint, turned = (Answers(run_of(name, batch_size=size)).score(rows) for size, rows in ((1, pairs), (8, pairs), (8, pairs[::-1])))
    assert [nats for nats, _ in alone] == pytest.approx([nats for nats, _ in joint], abs=1e-4)
    assert [nats for nats, _ in joint] == pytest.approx([nats for nats, _ in turned[::-1]], abs=1e-4)
    assert [same for _, same in alone] == [same for _, same in joint]


@pytest.mark.parametrize("name", MODELS)
def test_later_text_does_not_change_a_harness_score(name):
    """A text in one piece is worth what its tokens are worth one by one, each after those before it alone."""
    answers, ids = Answers(run_of(name)), random_ids(33, random.Random(1))
    (whole, _), *single = answers.score([(ids[:3], ids[3:]), *((ids[:t], [ids[t]]) for t in range(3, 33))])
    assert whole == pytest.approx(sum(nats for nats, _ in single), abs=1e-3)


def test_a_long_continuation_is_greedy_for_the_harness_if_all_of_it_is():
    run = run_of("gated")
    say = lambda ids: run.model.generate(torch.tensor([ids]), 32, temperature=0)[0, len(ids) :].tolist()
    first, other = say([7]), random_ids(32, random.Random(5))
    pairs = [([7], first + say(first[-1:])), ([7], other + say(other[-1:])), ([7], first + other)]
    assert [same for _, same in Answers(run).score(pairs)] == [True, False, False]


def test_few_logits_at_a_time_give_the_same_harness_scores(monkeypatch):
    pairs, answers = random_pairs(9, random.Random(2)), Answers(run_of("gated"))
    whole = answers.score(pairs)
    monkeypatch.setattr(evaluation, "LOGITS", 264 * 5)
    assert [nats for nats, _ in answers.score(pairs)] == pytest.approx([nats for nats, _ in whole], abs=1e-5)


@pytest.mark.parametrize("name, how", [("gated", dict(depth=0)), ("gated", dict(depth=1)), ("gated", dict(depth=5)), ("expert", dict(depth=2)),
                                       ("expert", dict(threshold=0.0)), ("expert", dict(threshold=1.0)), ("gated", dict(exit="kl", exit_threshold=0.5))], ids=str)
def test_harness_scores_are_taken_at_the_depth_threshold_and_exit_that_were_asked_for(name, how):
    run, pairs = run_of(name), random_pairs(6, random.Random(3))
    told = [nats for nats, _ in Answers(run, **how).score(pairs)]
    assert told != pytest.approx([nats for nats, _ in Answers(run).score(pairs)], abs=1e-2)
    other = run_of(name, **{key: how[key] for key in how if key == "threshold"})                        # for forward it is a setting of the model
    how = {key: how[key] for key in how if key != "threshold"}
    assert told == pytest.approx([by_hand(other.model, context + continuation, len(continuation), **how)[0] for context, continuation in pairs], abs=1e-4)


def test_a_diverged_run_has_no_harness_score():
    run = run_of("dense")
    run.model.norm.weight.data.fill_(math.nan)
    assert "not finite" in refusal(Answers(run).score, [([1], [2])])
    assert "not finite" in refusal(Answers(run).generate_until, requests(("a", {})))


# ---- text and windows

PAIRS = tiktoken.Encoding("pairs", pat_str=r"\s?\w+|\s+|[^\w\s]+", special_tokens={"<|endoftext|>": 300},
                          mergeable_ranks={**{bytes([i]): i for i in range(256)}, b" w": 256, b"or": 257, b"ld": 258, b" wor": 259, b" world": 260, b"  ": 261})
TEXTS = [("hello", " world"), ("hello ", "world"), ("hello  \n", "world"), ("wo", "rld"), ("é\u3000", "ü 🦊"), ("a<|endoftext|>", "b")]


def test_the_harness_splits_text_where_the_context_ends_and_spaces_belong_to_the_continuation():
    answers = Answers(SimpleNamespace(**{**vars(run_of("dense")), "tokenizer": PAIRS}))
    assert answers.split("hello", " world") == answers.split("hello ", "world") == (list(b"hello"), [260])
    assert answers.split("", "wor") == answers.split("", "wor") == ([300], [ord("w"), 257])
    assert answers.split("  ", "wor") == ([300], [261, *PAIRS.encode_ordinary("wor")])                  # nothing but space before it
    assert answers.split(" wo", "rld")[1] == PAIRS.encode_ordinary("rld")                               # one token holds all of it and more
    assert answers.score([answers.split("a", "")]) == [(0.0, True)]


@needs_harness
@pytest.mark.parametrize("context, continuation", TEXTS)
def test_text_is_split_as_the_harness_splits_it(context, continuation):
    from lm_eval.api.model import TemplateLM
    answers = Answers(SimpleNamespace(**{**vars(run_of("dense")), "tokenizer": PAIRS}))
    stand_in = SimpleNamespace(backend="causal", tok_encode=PAIRS.encode_ordinary)
    assert answers.split(context, continuation) == TemplateLM._encode_pair(stand_in, context, continuation)


def test_a_context_that_is_too_long_loses_its_beginning_and_is_counted_by_the_harness_model():
    run = run_of("gated")
    answers, texts = Answers(run), [("x" * 40 + "abc", "de"), ("abc" * 10, "de"), ("q" * 31, "de")]
    told = answers.loglikelihood(requests(*texts))
    assert (answers.asked, answers.cut) == (3, 1)
    assert told[0] == pytest.approx(by_hand(run.model, list((b"x" * 28 + b"abcde")), 2), abs=1e-4)


def test_every_token_of_a_long_harness_text_is_predicted_once_as_far_back_as_the_model_sees():
    run, ids = run_of("gated"), random_ids(75, random.Random(4))
    assert list(text_windows([END], ids, 32)) == [([END, *ids[:32]], 32), (ids[31:64], 32), (ids[42:75], 11)]
    text = bytes(b % 128 for b in ids).decode()
    windows = [[END, *text[:32].encode()], list(text[31:64].encode()), list(text[42:].encode())]
    wanted = sum(by_hand(run.model, window, n)[0] for window, n in zip(windows, (32, 32, 11)))
    assert Answers(run).loglikelihood_rolling(requests((text,), ("",))) == pytest.approx([wanted, 0], abs=1e-3)


def test_a_harness_text_that_fits_is_one_long_pass():
    run, text = run_of("gated"), "seven 🦊 and é"
    nats, _ = by_hand(run.model, [END, *text.encode()], len(text.encode()))
    assert Answers(run).loglikelihood_rolling(requests((text,))) == pytest.approx([nats], abs=1e-4)


@needs_harness
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 75])
def test_windows_are_those_of_the_harness(n):
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    theirs = map(make_disjoint_window, get_rolling_token_windows(list(range(n)), END, 32, 1))
    assert [(ids, n) for ids, n in text_windows([END], list(range(n)), 32)] == [(before + asked, len(asked)) for before, asked in theirs]


# ---- text as an answer


@pytest.mark.parametrize("name", MODELS)
def test_a_harness_answer_is_greedy_text_up_to_a_stop_string(name):
    run, contexts = run_of(name), ["def ", "", "a much longer context", "x"]
    rows = [run.model.generate(torch.tensor([list(context.encode()) or [END]]), 10, temperature=0, stop=END)[0, len(context) or 1 :].tolist() for context in contexts]
    texts = [bytes(i for i in row if i < 256).decode("utf-8", "replace") for row in rows]
    stop = next(c for text in texts for c in text[1:] if c.isascii())
    for settings, wanted in (({"max_gen_toks": 10}, texts), ({"until": [stop], "max_gen_toks": 10}, [until_first(text, [stop]) for text in texts]),
                             ({"until": stop, "max_new_tokens": 10, "do_sample": False}, [until_first(text, [stop]) for text in texts])):
        for size in (1, 8):
            answers = Answers(run_of(name, batch_size=size))
            assert answers.generate_until(requests(*((context, settings) for context in contexts))) == wanted
    assert until_first("one, two. three", [". ", ", ", "no"]) == "one" and until_first("one", []) == "one"


def test_no_token_is_made_after_the_stop_string_of_a_harness_answer(monkeypatch):
    run, n_steps, stream = run_of("gated"), [], evaluation.stream
    row = run.model.generate(torch.tensor([list(b"def ")]), 20, temperature=0)[0, 4:].tolist()
    at = next(i for i in range(2, 20) if row[i] < 128 and row[i] not in row[:i])
    monkeypatch.setattr(evaluation, "stream", lambda *args, **kwargs: (n_steps.append(1) or new for new in stream(*args, **kwargs)))
    Answers(run).generate_until(requests(("def ", {"until": [chr(row[at])], "max_gen_toks": 20})))
    assert len(n_steps) == at + 1


def test_a_harness_answer_ends_with_end_of_text_whatever_the_others_do(monkeypatch):
    steps = iter([[ord("a"), ord("b")], [END, ord("c")], [ord("x"), 260], [ord("y"), END], [ord("z"), ord("z")]])
    monkeypatch.setattr(evaluation, "stream", lambda *args, **kwargs: steps)
    assert Answers(run_of("dense")).generate_until(requests(("one", {}), ("two", {}))) == ["a", "bc"]          # 260 is no byte
    assert next(steps) == [ord("z"), ord("z")]


def test_requests_with_other_settings_are_answered_by_the_harness_model_in_their_order():
    run = run_of("dense")
    texts = [("a", {"max_gen_toks": 3}), ("bcd", {"max_gen_toks": 7}), ("ef", {"max_gen_toks": 3})]
    alone = [Answers(run).generate_until(requests(text))[0] for text in texts]
    assert Answers(run).generate_until(requests(*texts)) == alone and len(set(alone)) == 3


def test_a_long_prompt_of_the_harness_keeps_its_newest_part_beside_the_answer():
    run, text = run_of("gated"), "0123456789" * 4
    answers = Answers(run)
    for n, kept in ((10, 22), (100, 16)):                       # never less than half a context
        wanted = run.model.generate(torch.tensor([list(text[-kept:].encode())]), n, temperature=0)[0, kept:].tolist()
        end = wanted.index(END) if END in wanted else n
        assert answers.generate_until(requests((text, {"max_gen_toks": n}))) == [bytes(i for i in wanted[:end] if i < 256).decode("utf-8", "replace")]
    assert (answers.asked, answers.cut) == (2, 2)


def test_a_task_that_samples_is_refused_by_the_harness_model():
    for settings in ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}):
        assert "greedy" in refusal(Answers(run_of("dense")).generate_until, requests(("a", settings)))


# ---- toy tasks through the harness

CHOICES = [{"question": "return", "options": [" self", " x", " zebra crossing"], "right": 0}, {"question": "for x in", "options": [" y:", " é🦊", " w"], "right": 1},
           {"question": "while ", "options": ["True", "False and not True", "é"], "right": 2}, {"question": "", "options": ["class", "x y z"], "right": 1}]
WORDS = [{"prompt": "def "}, {"prompt": "class x while"}]
LINES = [{"text": "def return class é 🦊 x y z"}, {"text": "import for in while if else yield self None True " * 4}]
TASKS = {"toy_choice": ("multiple_choice", 'doc_to_text: "{{question}}"\ndoc_to_choice: options\ndoc_to_target: right',
                        ["acc", "acc_norm", "acc_bytes"], "target_delimiter: ''\nfewshot_split: test"),
         "toy_text": ("loglikelihood_rolling", 'doc_to_text: ""\ndoc_to_target: "{{text}}"', ["bits_per_byte", "byte_perplexity"], ""),
         "toy_answer": ("generate_until", 'doc_to_text: "{{prompt}}"\ndoc_to_target: "{{answer}}"', ["exact_match"], "generation_kwargs: {max_gen_toks: 5, until: ['Q']}")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with out/gated and out/expert, trained for some steps, and tasks/: three toy tasks, with answers that out/gated gives to the
    first of two prompts."""
    folder, here = tmp_path_factory.mktemp("harness"), os.getcwd()
    make_data(folder)
    os.chdir(folder)
    for name, changes in {"expert": dict(router="expert", depth_sampling="fixed"), "gated": {}}.items():
        make_config(folder, **{"max_iters": 8, "eval_tokens": 256, **changes})
        train.main(["toy.py", f"--out_dir=out/{name}"])
        os.utime(f"out/{name}/ckpt.pt", (1e9, 1e9 + (name == "gated")))
    (folder / "tasks").mkdir()
    texts = Answers(open_run("out/gated")).generate_until(requests(*((doc["prompt"], {"max_gen_toks": 5, "until": ["Q"]}) for doc in WORDS)))
    docs = {"toy_choice": CHOICES, "toy_text": LINES, "toy_answer": [{**WORDS[0], "answer": texts[0]}, {**WORDS[1], "answer": texts[1] + "!"}]}
    for name, (kind, lines, metrics, more) in TASKS.items():
        (folder / f"tasks/{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs[name]), encoding="utf-8")
        (folder / f"tasks/{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/tasks/{name}.jsonl}}, cache_dir: {folder}/cache}}\ntest_split: test\n"
            f"output_type: {kind}\n{lines}\nmetric_list:\n" + "".join(f"  - metric: {metric}\n" for metric in metrics) + more + "\n", encoding="utf-8")
    os.chdir(here)
    return folder


@pytest.fixture
def go(place, monkeypatch, capsys):
    """go(tasks, **flags) -> (lines, the record) of eval.py benchmarks."""
    monkeypatch.chdir(place)

    def go(tasks, **changes):
        capsys.readouterr()
        evaluation.main(["benchmarks", *flags(**{"tasks": tasks, "include_path": "tasks", "device": "cpu", **changes})])
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)["parts"]["benchmarks"]
    return go


def choice_metrics(run, docs, **how):
    """acc, acc_norm and acc_bytes of toy_choice, by hand."""
    right = []
    for doc in docs:
        nats = [by_hand(run.model, [*(doc["question"].rstrip().encode() or [END]), *f"{doc['question'][len(doc['question'].rstrip()) :]}{option}".encode()],
                        len(doc["question"].encode()) - len(doc["question"].rstrip().encode()) + len(option.encode()), **how)[0] for option in doc["options"]]
        for values in ([1] * len(nats), [len(option) for option in doc["options"]], [len(option.encode()) for option in doc["options"]]):
            scores = [n / size for n, size in zip(nats, values)]
            right.append(scores.index(max(scores)) == doc["right"])
    return [sum(right[i::3]) / len(docs) for i in range(3)]


def values(record, task):
    return {metric: m["value"] for metric, m in record["tasks"][task]["metrics"].items()}


@pytest.mark.slow
@needs_harness
def test_toy_tasks_of_every_kind_through_the_harness_give_what_the_model_says(go):
    lines, record = go(",".join(TASKS), compare="out/expert")
    run = open_run("out/gated")
    assert values(record, "toy_choice") == dict(zip(("acc", "acc_norm", "acc_bytes"), choice_metrics(run, CHOICES)))
    assert values(record["compare"][0], "toy_choice") == dict(zip(("acc", "acc_norm", "acc_bytes"), choice_metrics(open_run("out/expert"), CHOICES)))
    nats = [sum(by_hand(run.model, window, n)[0] for window, n in text_windows([END], list(doc["text"].encode()), 32)) for doc in LINES]
    bits = -sum(nats) / sum(len(doc["text"].encode()) for doc in LINES) / math.log(2)
    assert values(record, "toy_text") == pytest.approx({"bits_per_byte": bits, "byte_perplexity": 2**bits}, rel=1e-5)
    assert values(record, "toy_answer") == {"exact_match": 0.5}
    assert [record["tasks"][name]["n"] for name in TASKS] == [4, 2, 2] and record["shown"] == list(TASKS)
    assert record["harness"] and record["limit"] is None
    assert [(n["used"]["depth"], n["used"]["routing"], n["used"]["threshold"]) for n in (record, *record["compare"])] == [(4, None, None), (4, "causal", 0.5)]
    assert record["tasks"]["toy_choice"]["metrics"]["acc"]["stderr"] is not None
    rows = [line.split()[:3] for line in lines if line.startswith("out/")]
    metrics = {"toy_choice": ("acc", "acc_norm", "acc_bytes"), "toy_text": ("byte_perplexity", "bits_per_byte"), "toy_answer": ("exact_match",)}
    assert rows[:6] == [["out/gated", task, metric] for task in TASKS for metric in metrics[task]]


@pytest.mark.slow
@needs_harness
def test_the_harness_keeps_to_limit_depth_and_shots(go, monkeypatch):
    monkeypatch.setattr(evaluation, "TASK_SETS", {"mine": {"A": {"toy_choice": "acc_bytes"}, "B": {"toy_answer": "exact_match"}}})
    lines, record = go("mine", limit=1, depth=1, batch_size=1)
    acc, _, acc_bytes = choice_metrics(open_run("out/gated"), CHOICES[:1], depth=1)
    assert values(record, "toy_choice")["acc_bytes"] == acc_bytes and values(record, "toy_choice")["acc"] == acc
    assert [record["tasks"][name]["n"] for name in ("toy_choice", "toy_answer")] == [1, 1] and (record["used"]["depth"], record["limit"]) == (1, 1)
    means = {"A": acc_bytes, "B": values(record, "toy_answer")["exact_match"]}
    assert record["sets"] == {"mine": {"columns": means, "mean": sum(means.values()) / 2}}
    assert "a try" in lines[0] and any(line.startswith("mine: ") for line in lines)
    _, record = go("toy_choice", num_fewshot=1)
    assert record["tasks"]["toy_choice"]["shots"] == 1


@pytest.mark.slow
@needs_harness
def test_the_harness_gives_the_same_by_its_own_door(go):
    """lm_eval.simple_evaluate, with the examples that it draws for one shot."""
    _, record = go("toy_choice", num_fewshot=1)
    run, manager = open_run("out/gated"), evaluation.task_manager({"toy_choice": None}, "tasks")
    results = evaluation.harness().simple_evaluate(evaluation.harness_model(run), tasks=["toy_choice"], task_manager=manager, num_fewshot=1, bootstrap_iters=0)
    scores = [[nats for nats, _ in sample["filtered_resps"]] for sample in results["samples"]["toy_choice"]]
    answers = Answers(run)
    asked = [answers.loglikelihood(requests(*sample["arguments"])) for sample in results["samples"]["toy_choice"]]
    assert scores == [pytest.approx([nats for nats, _ in told], abs=1e-4) for told in asked]
    assert {metric: results["results"]["toy_choice"][f"{metric},none"] for metric in values(record, "toy_choice")} == values(record, "toy_choice")
    assert record["cut_contexts"] == answers.cut > 0 and record["contexts"] == answers.asked == sum(map(len, scores))


@needs_harness
def test_a_task_without_its_data_is_one_line_from_the_harness(place, monkeypatch):
    import datasets
    monkeypatch.chdir(place)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: (_ for _ in ()).throw(ConnectionError("no route\nto the Hub")))
    names = {"toy_choice": None}
    error = refusal(evaluation.load_task, "toy_choice", None, evaluation.task_manager(names, "tasks"))
    assert "'toy_choice'" in error and "ConnectionError: no route to the Hub" in error and "connect" in error


@needs_harness
def test_a_run_whose_data_are_elsewhere_answers_the_harness(place, tmp_path, monkeypatch, capsys):
    """As imported weights, which have none."""
    monkeypatch.chdir(tmp_path)
    there = flags(out_dir=place / "out/gated", tasks="toy_choice", include_path=place / "tasks", device="cpu")
    assert "no data set 'toy'" in refusal(evaluation.main, ["loss", "benchmarks", *there]) and "no data set 'toy'" in refusal(evaluation.main, ["benchmarks", "--data_dir=data", *there])
    evaluation.main(["benchmarks", *there])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]["benchmarks"]
    monkeypatch.chdir(place)
    assert record["data"] is None and values(record, "toy_choice")["acc"] == choice_metrics(open_run("out/gated"), CHOICES)[0]


@needs_harness
def test_a_task_that_fails_costs_the_harness_no_other(place, tmp_path, monkeypatch, capsys):
    for name in ("toy_choice", "toy_answer", "toy_text"):
        (tmp_path / f"{name}.yaml").write_text((place / f"tasks/{name}.yaml").read_text("utf-8").replace("{max", "{do_sample: true, max"), "utf-8")
    shutil.copytree(place / "out/gated", tmp_path / "run", ignore=shutil.ignore_patterns("*.jsonl"))
    monkeypatch.chdir(tmp_path)
    line = refusal(evaluation.main, ["benchmarks", *flags(out_dir="run", tasks="toy_choice,toy_answer,toy_text", include_path=".", device="cpu")])
    assert "not all could be run: toy_answer: a task asks for sampled text" in line
    record, kept = json.loads(Path("run/eval.json").read_text("utf-8"))["parts"]["benchmarks"], list(map(json.loads, open("run/benchmarks.jsonl", encoding="utf-8")))
    assert record["shown"] == ["toy_choice", "toy_text"] == [name for each in kept for name in each["shown"]] and list(record["failed"]) == ["toy_answer"]
    assert {**kept[0]["tasks"], **kept[1]["tasks"]} == record["tasks"] and kept[0]["checkpoint"] == kept[1]["checkpoint"] and "toy_choice" in capsys.readouterr().out
    assert "no task could be run: toy_answer: " in refusal(evaluation.main, ["benchmarks", *flags(out_dir="run", tasks="toy_answer", include_path=".", device="cpu")])


@needs_harness
def test_tasks_that_are_done_are_kept_when_the_harness_is_stopped(place, tmp_path, monkeypatch):
    shutil.copytree(place / "out/gated", tmp_path / "run", ignore=shutil.ignore_patterns("*.jsonl"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Answers, "loglikelihood_rolling", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        evaluation.main(["benchmarks", *flags(out_dir="run", tasks="toy_choice,toy_text", include_path=place / "tasks", device="cpu")])
    assert [json.loads(line)["shown"] for line in open("run/benchmarks.jsonl", encoding="utf-8")] == [["toy_choice"]]


@pytest.mark.slow
@needs_harness
def test_all_tasks_of_a_set_are_known_to_the_harness_and_an_unknown_one_is_told_its_neighbour(monkeypatch):
    import lm_eval.tasks
    every = lm_eval.tasks.TaskManager()                          # thousands of files: read once
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_defaults=True, include_path=None: every)
    names = task_names(list(evaluation.TASK_SETS))
    assert len(names) == 7 and evaluation.task_manager(names, None) is every
    assert "did you mean 'hellaswag'?" in refusal(evaluation.task_manager, {"helaswag": None}, None)
    assert "lm-eval ls tasks" in refusal(evaluation.task_manager, {"qqqqqqqq": None}, None)


# ---- what is asked for


def test_the_mean_of_a_set_counts_arc_once_for_the_harness():
    names = task_names(["mor"])
    tasks = {name: {"metrics": {"acc": {"value": 0.9}, "acc_bytes": {"value": 0.1 if name == "arc_easy" else 0.3}}} for name in names}
    found = set_means(names, tasks)["mor"]
    assert found["columns"] == pytest.approx({"LAMBADA": 0.9, "HellaSwag": 0.3, "PIQA": 0.3, "WinoGrande": 0.9, "ARC": 0.2, "MMLU": 0.9})
    assert found["mean"] == pytest.approx((0.9 * 3 + 0.3 * 2 + 0.2) / 6)
    assert set_means(task_names(["hellaswag"]), tasks) == {} and "mor" in set_means(task_names(["mor,hellaswag", "piqa"]), tasks)


def test_the_harness_runs_by_name_alone():
    run = SimpleNamespace(name="x", model=run_of("gated").model, dataset="toy", meta={})
    assert "benchmarks" not in evaluation.parts_for([], run) and evaluation.parts_for(["benchmarks"], run) == ["benchmarks"]
    assert "--tasks=" in refusal(evaluation.parse, ["benchmarks"]) and "by name alone" in refusal(evaluation.parse, ["--tasks=mor"])
    for name, value in dict(depth=1, threshold=0.5, exit="kl", exit_threshold=0.1, limit=3, num_fewshot=1, include_path=".").items():
        assert f"--{name}={value} is for the part benchmarks" in refusal(evaluation.parse, ["loss", f"--{name}={value}"])
    assert "not known here" in refusal(evaluation.parse, ["benchmarks", "--tasks=grt"])
    assert "limit=0" in refusal(evaluation.parse, ["benchmarks", "--tasks=mor", "--limit=0"])


def test_without_the_harness_or_with_an_old_one_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "which is not here" in refusal(evaluation.harness_model, run_of("dense")) and "pip install 'lm-eval>=" in refusal(evaluation.harness)
    old = SimpleNamespace(__version__="0.4.2", tasks=SimpleNamespace(TaskManager=dict))
    monkeypatch.setitem(sys.modules, "lm_eval", old), monkeypatch.setitem(sys.modules, "lm_eval.tasks", old.tasks)
    assert "lm-evaluation-harness 0.4.2 finds its tasks in another way than is known here; pip install 'lm-eval>=" in refusal(evaluation.harness)


@needs_harness
def test_settings_that_a_run_does_not_know_are_refused_before_the_harness_starts(place, monkeypatch):
    monkeypatch.chdir(place)
    for changes, words in ((dict(threshold=0.3), "no expert-choice router"), (dict(depth=-1), "depth=-1"), (dict(exit_threshold=0.3), "exit_threshold=0.3"),
                           (dict(include_path="nowhere"), "'nowhere'"), (dict(out_dir="out/expert", threshold=1.5), "threshold=1.5")):
        assert words in refusal(evaluation.main, ["benchmarks", *flags(**{"tasks": "toy_choice", "include_path": "tasks", "device": "cpu", **changes})])
