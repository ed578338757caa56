"""Mistakes that nobody thought of: changes model.py at random places and lists the changes that no quick test notices.

    python tests/mutate.py                            # 30 mutants, some minutes
    python tests/mutate.py --n 10 --seed 3 --list     # only show them

A survivor is either a change without effect or a test that is missing. Each mutant stands in a copy of the repository.
"""
import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [f"tests/test_{name}.py" for name in ("model", "cache", "counts", "shapes")]
LEFT_OUT = {"describe", "main"}                                     # what `python model.py` prints
SWAPS = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
         ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"),
         ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
         ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
         ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")}
DROPPED = {"transpose", "detach", "clone", "float", "to", "flatten", "clamp", "copy", "reshape", "expand", "squeeze", "roll"}


class Places(ast.NodeVisitor):
    """Collects (from, to, new text) for every change that can be made, as offsets into the source."""

    def __init__(self, source):
        self.source, self.found = source, []
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def at(self, line, column):
        text = self.source[self.line_starts[line - 1]: self.line_starts[line]]
        return self.line_starts[line - 1] + len(text.encode()[:column].decode())

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node):
        return self.source[slice(*self.span(node))]

    def between(self, left, right, op):
        old, new = SWAPS.get(type(op), (None, None))
        if old:
            start = self.source.find(old, self.span(left)[1], self.span(right)[0])
            self.found += [(start, start + len(old), new)] if start >= 0 else []

    def skip(self, node):
        pass

    visit_JoinedStr = visit_Raise = visit_AnnAssign = visit_arg = skip

    def visit_FunctionDef(self, node):
        if node.name not in LEFT_OUT:
            for child in (*node.args.defaults, *node.body):
                self.visit(child)

    def visit_BinOp(self, node):
        self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.between(left, right, op)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, node.op)
        self.generic_visit(node)

    def visit_If(self, node):
        start, end = self.span(node.test)
        self.found.append((start, end, f"not ({self.source[start:end]})"))
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_Constant(self, node):
        start, end = self.span(node)
        if isinstance(node.value, bool):
            self.found.append((start, end, str(not node.value)))
        elif isinstance(node.value, int):
            self.found.append((start, end, str(node.value + 1)))

    def visit_Call(self, node):
        if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
            self.found.append((*self.span(node), self.text(node.func.value)))
        if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            a, b = node.args[:2]
            if self.text(a) != self.text(b):
                middle = self.source[self.span(a)[1]: self.span(b)[0]]
                self.found.append((self.span(a)[0], self.span(b)[1], self.text(b) + middle + self.text(a)))
        self.generic_visit(node)


def mutants(source, n, seed):
    """n times (line number, old line, new line, whole new source), each a program that still compiles."""
    places = Places(source)
    places.visit(ast.parse(source))
    found = sorted(set(places.found))
    random.Random(seed).shuffle(found)
    for start, end, new in found[:n]:
        changed = source[:start] + new + source[end:]
        compile(changed, "model.py", "exec")
        line = source.count("\n", 0, start)
        yield line + 1, source.splitlines()[line].strip(), changed.splitlines()[line].strip(), changed


def survives(changed, timeout):
    """Whether all quick tests pass on this model.py."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "data", "out", "__pycache__"))
        (copy / "model.py").write_text(changed, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
        try:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.run(command, cwd=copy, timeout=timeout, capture_output=True, env=env).returncode == 0
        except subprocess.TimeoutExpired:
            return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=180, help="seconds; a mutant that takes longer counts as noticed")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    options = parser.parse_args()
    survivors = 0
    for line, old, new, changed in mutants((ROOT / "model.py").read_text(encoding="utf-8"), options.n, options.seed):
        alive = not options.list and survives(changed, options.timeout)
        survivors += alive
        verdict = "SURVIVES" if alive else "mutant" if options.list else "noticed"
        print(f"{verdict}  model.py:{line}\n    - {old}\n    + {new}", flush=True)
    if not options.list:
        print(f"{survivors} of {options.n} survive")


if __name__ == "__main__":
    main()
