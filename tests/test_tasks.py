"""Synthetic sets, where depth has to pay: what the answers are, who sees which examples, what counts, and how it is told.

    python -m pytest -q tests/test_tasks.py
"""
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import loud, tiny
from toy import DENSE, flags, make_config, make_data, refusal

import eval as evaluation
import prepare
import sample
import train
from train import Marks, Rows, Split, evaluate, fixed_windows, get_batch, open_split

SIZE = 24_000                                                         # tokens of a set: quick to make, and a few dozen validation rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data/phop, data/addition and data/toy, a text."""
    folder = tmp_path_factory.mktemp("tasks")
    for name in prepare.TASKS:
        prepare.prepare(name, data_dir=folder / "data", max_tokens=SIZE, quiet=True)
    make_data(folder)
    return folder


@pytest.fixture
def go(place, tmp_path, monkeypatch):
    """go(**flags) -> the folder of a finished run on phop, in a current folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(place / "data")
    make_config(tmp_path, dataset="phop", block_size=64)

    def go(**changes):
        train.main(["toy.py", *flags(**changes)])
        return Path(changes.get("out_dir", "out/toy"))
    return go


def rows_of(data, name, split):
    """(text, answers with a space where none is asked) of every row."""
    pairs = np.fromfile(data / name / f"{split}.bin", "<u2").reshape(-1, prepare.ROW)
    return [("".join(map(chr, row & 255)), "".join(chr(answer or ord(" ")) for answer in row >> 8)) for row in pairs]


def opened(place, name="phop", split="val", block_size=64):
    return open_split(place / "data", name, split, prepare.load_meta(place / "data", name), block_size)


# ---- what is asked, and what is right


def hop(text, i):
    """One place on from the last occurrence before i of the letter at i; None where there is none."""
    last = text.rfind(text[i], 1, i)                                  # the first place holds the number of hops
    return None if last < 0 else last + 1


def test_phop_answers_are_those_of_a_walk_letter_by_letter(place):
    for split in prepare.SPLITS:
        for text, answers in rows_of(place / "data", "phop", split):
            assert not re.search(r"(.)\1", text) and answers[0] == " "
            for i in range(1, len(text)):
                at = i
                for _ in range(int(text[0])):
                    at = None if at is None else hop(text, at)
                assert answers[i] == (" " if at is None else text[at]), (text, i)


def test_addition_asks_for_the_digits_of_the_sum_units_first_each_before_it_stands_there(place):
    for split in prepare.SPLITS:
        for text, answers in rows_of(place / "data", "addition", split):
            wanted, found = [" "] * len(text), list(re.finditer(r"(\d+)\+(\d+)=(\d+);", text))
            assert found and "".join(m[0] for m in found) == text.rstrip(";") + ";"
            for m in found:
                a, b, total = m.groups()
                assert len(a) == len(b) == len(total) - 1 and int(a) + int(b) == int(total[::-1])
                wanted[m.start(3) - 1 : m.end(3) - 1] = total
            assert answers == "".join(wanted)


@pytest.mark.parametrize("name", prepare.TASKS)
def test_validation_rows_of_a_task_stand_group_by_group(place, name):
    meta = prepare.load_meta(place / "data", name)
    levels = {"phop": lambda text: int(text[0]), "addition": lambda text: text.index("+")}[name]
    found = [levels(text) for text, _ in rows_of(place / "data", name, "val")]
    assert found == sorted(found) and [found.count(level) for level in range(prepare.TASKS[name].first, 5)] == list(meta["groups"].values())
    assert [*meta["groups"]][:2] == {"phop": ["1 hop", "2 hops"], "addition": ["2 digits", "3 digits"]}[name]


def test_different_validation_examples_of_a_task_are_counted_by_group(place, tmp_path, capsys):
    prepare.prepare("addition", data_dir=tmp_path, max_tokens=4 * SIZE, digits=2)                  # many of its sums come twice
    for data, name, pattern in ((place / "data", "phop", r"[a-d]+"), (tmp_path, "addition", r"\d+\+\d+")):
        meta, found, n = prepare.load_meta(data, name), {}, 0
        for group, (text, _) in zip([group for group, n in meta["groups"].items() for _ in range(n)], rows_of(data, name, "val")):
            found.setdefault(group, set()).update(examples := re.findall(pattern, text))
            n += len(examples)
        assert meta["different"] == {group: len(some) for group, some in found.items()}
    assert meta["different"]["2 digits"] < n - 50 and f"different examples in val: 2 digits: {meta['different']['2 digits']}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", prepare.TASKS)
def test_the_baselines_of_a_task_are_guesses_learned_in_training(place, name):
    train_pairs, val_pairs = ([(text[i], answer) for text, answers in rows_of(place / "data", name, split) for i, answer in enumerate(answers)
                               if answer != " "] for split in prepare.SPLITS)
    meta, commonest = prepare.load_meta(place / "data", name), Counter(answer for _, answer in train_pairs).most_common(1)[0][0]
    after = {token: Counter(answer for t, answer in train_pairs if t == token).most_common(1)[0][0] for token in dict(train_pairs)}
    assert meta["val"]["answers"] == len(val_pairs)
    assert meta["baselines"]["commonest"] == pytest.approx(sum(answer == commonest for _, answer in val_pairs) / len(val_pairs))
    assert meta["baselines"]["by token"] == pytest.approx(sum(answer == after[token] for token, answer in val_pairs) / len(val_pairs))


@pytest.mark.parametrize("name", prepare.TASKS)
def test_a_table_of_a_task_guesses_what_was_commonest_in_training_where_it_saw_the_same(place, name):
    meta = prepare.load_meta(place / "data", name)
    level = {"phop": lambda text: text[0], "addition": lambda text: text.index("+")}[name]

    def asked(split, back, by_place):
        for text, answers in rows_of(place / "data", name, split):
            width = text.index(";") + 1 if name == "addition" else len(text)
            for i, answer in enumerate(answers):
                if answer != " ":
                    yield level(text), (i % width if by_place else None, text[max(0, i + 1 - back) : i + 1]), answer

    for guess, (back, by_place) in prepare.TASKS[name].tables.items():
        met, hits = {}, {}
        for group, saw, answer in asked("train", back, by_place):
            met.setdefault(group, {}).setdefault(saw, Counter())[answer] += 1
        best = lambda count: min(count, key=lambda answer: (-count[answer], answer))              # of equals the first, as in the alphabet
        for group, saw, answer in asked("val", back, by_place):
            count = met[group].get(saw) or sum(met[group].values(), Counter())
            hits.setdefault(group, []).append(answer == best(count))
        assert list(meta["baselines_by_group"][guess].values()) == pytest.approx([np.mean(some) for some in hits.values()]), guess
        assert meta["baselines"][guess] == pytest.approx(np.mean(sum(hits.values(), []))) and len(hits) == len(meta["groups"])


def test_a_table_says_the_commonest_of_all_where_it_has_seen_nothing():
    rows = lambda text, answers: prepare.packed(*(np.frombuffer(s.ljust(prepare.ROW, fill).encode(), np.uint8)[None].astype(int)
                                                  for s, fill in ((text, ";"), (answers, "\0"))))
    seen, asked, yes, no = rows("abacab", "babcba"), rows("abcba", "bacbb"), True, False
    assert prepare.table_hits(seen, asked, 1).tolist() == [yes, yes, yes, no, yes]               # a: b, b: a, c: c
    assert prepare.table_hits(seen, asked, 2).tolist() == [yes, yes, no, yes, yes]               # bc and cb are new, so b
    assert prepare.table_hits(seen, asked, 0, 2).tolist() == [yes, yes, no, no, yes]             # b in even places, a in odd ones


def test_a_letter_is_guessed_better_by_a_table_that_knows_more(place):
    share = [*prepare.load_meta(place / "data", "phop")["baselines"].values()]
    assert share[0] < share[2] - 0.05 < share[3] - 0.1


# ---- who sees what


def examples(data, name, split):
    pattern = {"phop": r"[a-z]+", "addition": r"\d+\+\d+"}[name]
    return {example for text, _ in rows_of(data, name, split) for example in re.findall(pattern, text)}


@pytest.mark.parametrize("name", prepare.TASKS)
def test_no_example_of_a_task_is_in_both_splits_under_any_seed(place, tmp_path, name):
    prepare.prepare(name, data_dir=tmp_path, max_tokens=SIZE, seed=1, quiet=True)
    mine, other = ([examples(data, name, split) for split in prepare.SPLITS] for data in (place / "data", tmp_path))
    assert mine[0] and mine[1] and mine[0] != other[0]
    assert not (mine[0] | other[0]) & (mine[1] | other[1])


def test_a_task_follows_from_its_seed_and_is_made_once(tmp_path, capsys):
    made = lambda folder, **keys: prepare.prepare("phop", data_dir=tmp_path / folder, max_tokens=SIZE, **keys)
    first, second = made("a"), made("b")
    assert all((first / f"{split}.bin").read_bytes() == (second / f"{split}.bin").read_bytes() for split in prepare.SPLITS)
    capsys.readouterr()
    made("a")
    assert "up to date" in capsys.readouterr().out
    meta = prepare.load_meta(tmp_path / "a", "phop")
    (first / "meta.json").write_text(json.dumps(meta | {"made": {k: v for k, v in meta["made"].items() if k != "tables"}}), "utf-8")
    assert "changed: made" in (made("a"), capsys.readouterr().out)[1]                    # it has fewer guesses, and the same rows
    assert (first / "train.bin").read_bytes() == (second / "train.bin").read_bytes()
    assert "changed: made" in (made("a", seed=3), capsys.readouterr().out)[1]
    assert [*prepare.load_meta(tmp_path / "a", (made("a", hops=2)).name)["groups"]] == ["1 hop", "2 hops"]
    assert (first / "train.bin").read_bytes() != (second / "train.bin").read_bytes()


# ---- what counts


def test_targets_of_a_task_are_its_answers_and_nothing_else(place):
    split, written = opened(place), rows_of(place / "data", "phop", "val")
    numbers = [0, 7, split.n_windows - 1]
    ids_BT, targets_BT = split.batch(numbers)
    for row, ids_T, targets_T in zip(numbers, ids_BT.tolist(), targets_BT.tolist()):
        text, answers = written[row]
        assert ids_T == [ord(c) for c in text] and targets_T == [-100 if c == " " else ord(c) for c in answers]
    assert len(written) == split.n_windows and ids_BT.shape == (3, prepare.ROW)


def test_batches_of_a_task_are_whole_rows_and_evaluation_takes_some_of_every_group(place):
    split = opened(place)
    ids_BT, _ = get_batch(opened(place, split="train"), 50, seed=1)
    assert all(chr(first) in "1234" for first in ids_BT[:, 0].tolist())
    few = fixed_windows(split, 12 * prepare.ROW)
    assert len(few) == 12 and set(split.group_of(few).tolist()) == {0, 1, 2, 3}
    assert split.group_of(range(split.n_windows)).bincount().tolist() == list(split.groups.values())
    assert list(split.consecutive()) == list(range(split.n_windows))


def test_a_text_is_read_as_before(place):
    split = opened(place, "toy")
    assert type(split) is Split and type(opened(place)) is Rows
    raw = np.fromfile(split.path, "<u2").astype(np.int64)
    ids_BT, targets_BT = split.batch([5])
    assert ids_BT[0].tolist() == raw[5:69].tolist() and targets_BT[0].tolist() == raw[6:70].tolist()


def test_the_loss_of_a_task_is_the_mean_over_answers_and_accuracy_counts_them_by_group(place):
    split, model, depths = opened(place), loud(tiny(vocab_size=320, block_size=64, n_recur=3)), [1, 3]
    starts = fixed_windows(split, 10**9)
    marks = Marks(split, depths)
    losses = evaluate(model, split, starts, depths, batch_size=7, device="cpu", mark=marks)
    ids_BT, targets_BT = split.batch(starts)
    for (share, by_group), depth in zip(marks.shares(), depths):
        logits_BTV = model(ids_BT, depth=depth).logits
        assert losses[depth] == pytest.approx(F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()).item(), rel=1e-5)
        hits, asked = logits_BTV.argmax(-1) == targets_BT, targets_BT != -100
        assert share == pytest.approx((hits.sum() / asked.sum()).item())
        for name, first in zip(split.groups, np.cumsum([0, *split.groups.values()])):
            rows = slice(first, first + split.groups[name])
            assert by_group[name] == pytest.approx((hits[rows].sum() / asked[rows].sum()).item()), name


def test_who_knows_all_answers_of_a_task_is_always_right_and_the_last_depth_speaks_for_a_run(place):
    split = opened(place, "addition")
    marks, starts = Marks(split, [1, 2]), torch.arange(split.n_windows)
    _, targets_BT = split.batch(starts)
    marks(1, starts, F.one_hot(targets_BT.clamp(min=0) + 1, 320), targets_BT)           # never right
    marks(2, starts, F.one_hot(targets_BT.clamp(min=0), 320), targets_BT)
    assert marks.shares()[1] == (1.0, dict.fromkeys(split.groups, 1.0))
    assert marks.asked.sum(1).tolist() == [prepare.load_meta(place / "data", "addition")["val"]["answers"]] * 2
    told = train.answer_numbers(marks, train.ALONE)
    assert told == {"accuracy": 1.0, "accuracy_by_group": dict.fromkeys(split.groups, 1.0), "accuracy_by_depth": {1: 0.0, 2: 1.0}}


# ---- a run


def test_a_run_on_a_task_tells_right_answers_and_no_bits(go, capsys):
    folder = go(eval_tokens=SIZE, sample_tokens=1)
    out = capsys.readouterr().out
    assert f"block_size     = {prepare.ROW}           fits phop" in out and "bits/byte" not in out
    guesses = prepare.load_meta("data", "phop")["baselines_by_group"]["by hops and 4 letters"]
    assert "share of the validation answers right without a model" in out and f"| 1 hop: {guesses['1 hop']:.3f}  2 hops: {guesses['2 hops']:.3f}" in out
    last = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()][-1]
    assert last["event"] == "eval" and "bits_per_byte" not in last and [*last["accuracy_by_depth"]] == ["1", "2", "4"]
    assert last["accuracy"] == last["accuracy_by_depth"]["4"] and [*last["accuracy_by_group"]] == ["1 hop", "2 hops", "3 hops", "4 hops"]
    assert f"right answers {last['accuracy']:.3f} | 1 hop: {last['accuracy_by_group']['1 hop']:.3f}" in out
    shown = out.split("where it is wrong\n")[1].splitlines()
    texts, answers, wrong = ([line[8:] for line in shown[k::3]] for k in range(3))
    right = dict(rows_of(Path("data"), "phop", "val"))
    for text, said, marks in zip(texts, answers, wrong):
        asked, said = right[text].ljust(prepare.ROW), said.ljust(prepare.ROW)
        assert [i for i, c in enumerate(marks) if c == "^"] == [i for i in range(prepare.ROW) if asked[i] != said[i]]
    assert len(texts) == 4 and all(" " <= c <= "~" for line in shown for c in line)

    train.main([str(folder / "config.py"), "--init_from=resume", f"--out_dir={folder}", "--max_iters=5", "--sample_tokens=0"])
    assert "resume: max_iters was 4, now 5" in (out := capsys.readouterr().out) and "block_size was" not in out


@pytest.mark.slow
def test_eval_answers_are_those_of_training_at_every_depth_and_by_group(go, capsys):
    folder = go(eval_tokens=SIZE, learning_rate=0.3)                  # wild, so that each depth has an opinion of its own
    last = json.loads((folder / "log.jsonl").read_text("utf-8").splitlines()[-1])
    dense = go(out_dir="out/dense", eval_tokens=SIZE, **DENSE)
    capsys.readouterr()
    evaluation.main(["answers", f"--out_dir={folder}", f"--compare={dense}", f"--eval_tokens={SIZE}"])
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])["parts"]["answers"]
    at = {p["depth"]: p for p in record["points"]}
    assert {str(d): pytest.approx(at[d]["accuracy"]) for d in (1, 2, 4)} == last["accuracy_by_depth"] and at[0]["accuracy"] != at[1]["accuracy"]
    assert at[4]["accuracy_by_group"] == pytest.approx(last["accuracy_by_group"]) and max(at) == 8
    assert [p["depth"] for p in record["compare"][0]["points"]] == [0, 0.5, 1] and lines[1].split()[3:5] == ["all", "1"]
    meta = prepare.load_meta("data", "phop")
    assert [line.split("  ")[0] for line in lines[2:7]] == [*meta["baselines"], str(folder)] and lines[5].split()[-2:] == ["no", "model"]
    assert lines[5].split()[7:9] == [f"{meta['baselines']['by hops and 4 letters']:.3f}", f"{meta['baselines_by_group']['by hops and 4 letters']['1 hop']:.3f}"]
    assert record["no_model"]["by token"]["accuracy"] == meta["baselines"]["by token"]
    evaluation.main([f"--out_dir={folder}", f"--eval_tokens={SIZE // 10}", "--exit_tokens=0"])
    out = capsys.readouterr().out
    parts = json.loads(out.splitlines()[-1])["parts"]
    assert {*parts} >= {"loss", "depth", "answers"} and parts["loss"]["bits_per_byte"] == "NaN" and "nan" not in out.lower().replace('"nan"', "")


@pytest.mark.slow
def test_sampling_answers_the_prompt_of_a_task(go, capsysbinary):
    folder = go()
    capsysbinary.readouterr()
    sample.main(["--start=1abcab", "--max_new_tokens=1", "--temperature=0", f"--out_dir={folder}"])
    model, _, _ = sample.load_run(folder, "cpu")
    best, (out, err) = model(torch.tensor([list(b"1abcab")])).logits[0, -1].argmax().item(), capsysbinary.readouterr()
    assert out == b"1abcab" + (bytes([best]) if best < 128 else b"\xef\xbf\xbd") + b"\n" and b"note" not in err
    sample.main(["--max_new_tokens=1", f"--out_dir={folder}"])
    note = f"note: {prepare.TASKS['phop'].hint}\n".encode()
    assert b"--start=1abcab --max_new_tokens=1" in note and note in capsysbinary.readouterr().err
    Path("data").unlink()                                                                # the name of its set tells as well
    sample.main(["--max_new_tokens=1", f"--out_dir={folder}"])
    assert note in capsysbinary.readouterr().err


def test_a_text_has_no_hint_and_no_prompt_of_a_hint_goes_unanswered(place):
    settings = {"data_dir": str(place / "data"), "dataset": "toy"}
    assert sample.task_hint(settings) is None and sample.task_hint({"dataset": "gone", "data_dir": "none"}) is None
    prompt, n = re.search(r"--start=(\S+) --max_new_tokens=(\d)", prepare.TASKS["addition"].hint).groups()
    assert (prompt, n) == ("17+25=", "3") and hop("1abcab", 5) == 3


def test_a_set_made_before_its_guesses_were_counted_still_works(place, go, capsys):
    made = prepare.prepare("phop", data_dir="old", max_tokens=SIZE, quiet=True)
    meta = json.loads((made / "meta.json").read_text("utf-8"))
    del meta["baselines_by_group"], meta["different"], meta["made"]["tables"]
    (made / "meta.json").write_text(json.dumps(meta | {"baselines": {"commonest": 0.25, "by token": 0.125}}), "utf-8")
    folder = go(data_dir="old", eval_tokens=SIZE // 10, sample_tokens=0, max_iters=1)
    assert re.search(r"commonest 0.250\n +by token  0.125\n", capsys.readouterr().out)
    evaluation.main(["answers", f"--out_dir={folder}", f"--eval_tokens={SIZE // 10}"])
    assert re.search(r"by token +- +- +0.125 +- .*no model", capsys.readouterr().out)


def test_an_answer_that_no_terminal_should_see_is_a_question_mark(go, monkeypatch):
    folder, split = go(sample_tokens=0, max_iters=1), opened(Path("."))
    for token, shown in ((27, "?"), (155, "?"), (300, "?"), (32, "?"), (ord("b"), "b")):
        monkeypatch.setattr(train.GPT, "forward", lambda self, ids_BT: SimpleNamespace(logits=F.one_hot(0 * ids_BT + token, 320)))
        assert {*train.show_answers(folder, split).splitlines()[1][8:]} == {" ", shown}, token


def test_a_task_is_made_on_first_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "EXAMPLE_TOKENS", SIZE)
    train.main([make_config(tmp_path, dataset="addition", max_iters=1, block_size=64)])
    assert prepare.load_meta("data", "addition")["made"]["source"] == "addition" and Path("out/toy/ckpt.pt").is_file()


# ---- a user's mistakes


def test_mistakes_about_a_task_are_one_line(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make = lambda source="phop", **keys: refusal(prepare.prepare, source, data_dir=tmp_path, quiet=True, **keys)
    assert make(hops=10) == "hops=10 is out of range; choose 1 to 9" and "digits=0" in make("addition", digits=0)
    assert make("stdlib", hops=3) == "hops=3 means nothing to stdlib; it belongs to phop"
    assert "belongs to phop and addition" in make("stdlib", seed=3) and "digits=3 means nothing to phop" in make(digits=3)
    assert make(seed=-1) == "seed=-1 is negative; choose 0 or more" and "single characters" in make(tokenizer="gpt2")
    assert make(max_tokens=10**12) == "max_tokens=1000000000000: phop is made in memory; choose up to 100000000"
    assert "field='x' means nothing to addition" in make("addition", field="x") and make("addition", digits=1) == "digits=1 is out of range; choose 2 to 9"
    assert "; give more max_tokens, or a val_fraction nearer" in make(max_tokens=500) and not list(tmp_path.glob("phop*"))
    assert refusal(opened, place, block_size=20) == f"block_size=20 is shorter than a row of phop; use --block_size={prepare.ROW}"
    assert "python prepare.py phop;" in refusal(prepare.load_meta, tmp_path, "phop")


def test_groups_that_do_not_add_up_are_damage_and_a_text_has_no_answers(place, go):
    made = prepare.prepare("phop", data_dir="other", max_tokens=SIZE, quiet=True)
    meta = json.loads((made / "meta.json").read_text("utf-8"))
    (made / "meta.json").write_text(json.dumps({**meta, "groups": {"1 hop": 1}}), "utf-8")
    assert "groups and rows do not add up" in refusal(prepare.load_meta, "other", "phop")
    folder = go(dataset="toy", out_dir="out/text")
    assert "asks for no answers" in refusal(evaluation.main, ["answers", f"--out_dir={folder}"])
