"""How much of what a run writes is Python, line by line: the share of complete lines that Python's `tokenize` accepts.

    python tests/complete_lines.py [--out_dir=out/grt_tiny]       # 50 lines at temperature 0.8, top_k 50, from an empty start

A line stands alone here, so one that opens a bracket or a triple quote cannot pass; it is counted as a failure too.
"""
import io
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # noqa: E402  (before torch)
from model import generator, stream  # noqa: E402
from sample import SampleConfig, Text, load_run  # noqa: E402


def passes(line):
    """Does `tokenize` read this one line without an error?"""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


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


def main(argv):
    s = config.parse(argv, [SampleConfig], __doc__)
    model, tokenizer, about = load_run(s.out_dir, "cpu")
    lines = sampled_lines(model, tokenizer, s, 50)
    for line in lines:
        print("ok  " if passes(line) else "FAIL", line)
    good = sum(map(passes, lines))
    print(f"{about['folder']}: {good} of {len(lines)} lines pass ({100 * good / len(lines):.0f}%)")


if __name__ == "__main__":
    config.run(main)
