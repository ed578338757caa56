"""How much of what a run writes is Python, line by line: the share of complete lines that Python's `tokenize` accepts.

    python tests/complete_lines.py [--out_dir=out/grt_tiny]       # 50 lines at temperature 0.8, top_k 50, from an empty start

Each line is read alone. `alone`: it tokenizes as it stands. `opens`: its one fault is that it opens a bracket or a triple
quote that a later line would close, as many lines of real code do. The same is counted for real validation text.
"""
import io
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # noqa: E402  (before torch)
from model import generator, stream  # noqa: E402
from sample import SampleConfig, Text, load_run  # noqa: E402


def verdict(line):
    """'alone', 'opens' or 'wrong'."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError) as error:
        return "opens" if "EOF in multi-line" in str(error) or "unterminated triple-quoted" in str(error) else "wrong"
    return "wrong" if any(token.type == tokenize.ERRORTOKEN for token in tokens) else "alone"


def sampled_lines(model, tokenizer, s, n_lines):
    """The first n complete, non-blank lines of one long text; its last, unfinished line is left out."""
    text = Text(tokenizer, None)
    rng = generator(s.seed, model.embed.weight.device)
    for (token,) in stream(model, [[tokenizer.eot_token]], 200 * n_lines, s.temperature, s.top_k, s.top_p, generator=rng):
        text.add(token)
        lines = [line for line in text.text.split("\n")[:-1] if line.strip()]
        if len(lines) >= n_lines:
            return lines[:n_lines]
    return lines


def real_lines(data_dir="data", name="stdlib"):
    text = Path(data_dir, name, "val.bin").read_bytes()[::2].decode("utf-8", errors="replace")         # bytes as uint16
    return [line for line in text.split("\n") if line.strip()][:5000]


def report(name, lines):
    share = {kind: sum(verdict(line) == kind for line in lines) / len(lines) for kind in ("alone", "opens", "wrong")}
    print(f"{name}: {len(lines)} lines: " + ", ".join(f"{kind} {100 * part:.0f}%" for kind, part in share.items())
          + f"; pass {100 * (1 - share['wrong']):.0f}%")


def main(argv):
    s = config.parse(argv, [SampleConfig], __doc__)
    model, tokenizer, about = load_run(s.out_dir, "cpu")
    lines = sampled_lines(model, tokenizer, s, 50)
    for line in lines:
        print(f"{verdict(line):6}{line}")
    report(str(about["folder"]), lines)
    if Path("data/stdlib/val.bin").exists():
        report("real text", real_lines())


if __name__ == "__main__":
    config.run(main)
