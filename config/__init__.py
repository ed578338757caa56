"""Reads settings: config files first, then the command line, each value checked and its origin remembered.

    python train.py config/grt_tiny.py --batch_size=8 --learning_rate 1e-3     (--help lists every key)

A config file is a page of `key = value` lines. It is parsed and never executed: opening a stranger's config is safe.
A value is a literal, a list, arithmetic, or the name of a key, which stands for what that key is at that line: the
value of an earlier line, an earlier file or the default. Later files win over earlier ones and the command line wins
over files wherever it stands. So a file never sees a flag, and a flag may use what the files said: --n_core=n_core+1.
"""
import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import operator
import os
import re
import sys
import textwrap
import typing
from pathlib import Path
from types import NoneType, UnionType

# Scripts import this module before torch: idle OpenMP threads that spin can slow a small model tenfold on a shared
# machine, and only what stands in the environment when torch loads can stop them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

CONSTANTS = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}    # in any case, beside Python's own
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "None"}
FLAG = re.compile("--?[A-Za-z_]")       # not -1 or -.5, which are values
# Names people bring along from elsewhere: a sentence for each, given where the key it speaks of exists.
HINTS = {"n_layer": ("n_core", "depth here is n_prelude + n_core x n_recur + n_coda; 12 plain blocks are n_core=12"),
         "depth": ("recursions", "the depth of inference is --recursions"), "prompt": ("start", "a prompt is --start"),
         "lr": ("learning_rate", "it is --learning_rate"), "steps": ("max_iters", "steps of training are --max_iters, those of the loop n_recur")}


class UserError(Exception):
    """A user's mistake: one line that says where it is, what was found and what to write. Exit code 2."""


class Key(typing.NamedTuple):
    name: str
    kind: type
    default: object
    help: str
    choices: typing.Collection
    group: str


def key(default, help, choices=None):
    """A dataclass field that is a setting: batch_size: int = key(8, "Sequences per step.")"""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Settings:
    """The values in schema order, also as attributes, with `origins` ("config/x.py:7"), `files` and `words`."""

    def __init__(self, keys, files, words):
        self.values = {name: k.default for name, k in keys.items()}
        self.origins = dict.fromkeys(keys, "default")
        self.files, self.words = files, words

    def __getattr__(self, name):
        if name in self.__dict__.get("values", {}):
            return self.values[name]
        raise AttributeError(f"no setting {name!r}")

    def build(self, cls, **overrides):
        """cls(...) from its own fields. A ValueError that says `key=value` is led back to the line that set the key."""
        fields = [f.name for f in dataclasses.fields(cls) if f.name in self.values]
        try:
            return cls(**{name: self.values[name] for name in fields} | overrides)
        except ValueError as error:
            named = [n for n in re.findall(r"\b(\w+)=", str(error)) if n in self.values and n not in overrides]
            origins = [self.origins[n] for n in named if self.origins[n] != "default"]
            raise UserError(": ".join(origins[:1] + [str(error)])) from None

    def dump(self):
        """A config file (to be written as UTF-8) that gives the same values, each with its origin."""
        return "".join(f"{name} = {value!r}  # {self.origins[name]}\n" for name, value in self.values.items())


def parse(argv, schema, doc, words=None):
    """Settings from argv, everything checked; UserError where something is wrong, exit 0 after --help.

    schema: dataclasses whose fields are the keys; a later class replaces the default of an earlier one.
    doc: opens --help. words: what the script takes beside config files and flags. None: nothing else. "NAME ...": any
    arguments that do not end in .py. ("SOURCE", n): the same, and the first n are words even if they end in .py; with
    an empty name --help says nothing of config files.
    """
    keys = read_schema(schema)
    usage, n_words = words if isinstance(words, tuple) else (words, 0)
    if "-h" in argv or "--help" in argv:
        print(help_text(keys, doc, usage), flush=True)
        raise SystemExit(0)
    with at("command line"):
        files, flags, others = split(argv, keys, usage, n_words)
    s = Settings(keys, files, others)
    for path in files:
        read_file(path, keys, s)
    for name, text in flags:
        with at("command line"):
            value = check(keys[name], from_text(text, keys[name], s.values))
        if list[str] in members(keys[name].kind) and s.origins[name] == "command line":     # --start=a --start=b
            value = (s.values[name] or []) + (value or [])
        s.values[name], s.origins[name] = value, "command line"
    return s


def run(main):
    """The last line of a script. A UserError becomes its one line; a reader who left (`| head`) is no traceback."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()              # a closed pipe shows up here, not at interpreter exit where nobody catches it
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)                   # what a shell reports for Ctrl-C
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # the exit flushes once more
        sys.exit(141)                   # what a shell reports for SIGPIPE


# ---- where things are read ---------------------------------------------------------------------------------------

def read_schema(schema):
    """{name: Key}. A key declared twice keeps its first place and group; the later declaration says the rest."""
    keys = {}
    for cls in schema:
        kinds, group = typing.get_type_hints(cls), (inspect.getdoc(cls) or cls.__name__).splitlines()[0]
        for f in dataclasses.fields(cls):
            old = keys.get(f.name, Key(f.name, None, None, "", (), group))
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            keys[f.name] = old._replace(kind=kinds[f.name], default=None if default is dataclasses.MISSING else default,
                                        help=f.metadata.get("help") or old.help,
                                        choices=f.metadata.get("choices") or old.choices)
    return keys


def split(argv, keys, usage, n_words):
    """argv as config files, (key, text) flags and other words, in the order given."""
    files, flags, words, rest = [], [], [], list(argv)
    while rest:
        arg = rest.pop(0)
        name, equals, text = arg.lstrip("-\u2013\u2014").partition("=")     # also the long dashes of web pages
        if FLAG.match(arg):
            known(name, keys)
            if not arg.startswith("--"):
                raise UserError(f"{arg!r} has one dash; write -{arg}")
            if not equals and rest and not FLAG.match(rest[0]):
                equals, text = "=", rest.pop(0)
            if not equals or not text.strip() and not takes_text(keys[name].kind):
                raise UserError(f"{arg!r} has no value; write {example(keys[name])}")
            flags.append((name, text))
        elif name in keys and (equals or usage is None):
            raise UserError(f"{arg!r} is not a flag; write {f'--{name}={text}' if text else example(keys[name])}")
        elif arg.endswith(".py") and len(words) >= n_words:
            files.append(arg)
        elif usage is not None:
            words.append(arg)
        elif equals:
            known(name, keys)
        else:
            raise UserError(f"{arg!r} is neither --key=value nor a config file (.py){near_path(arg, shipped())}")
    return files, flags, words


def read_file(path, keys, s):
    label = path if path.isprintable() else ascii(path)     # origins are written into one-line comments
    lines = {}
    for node in parse_file(path, label):
        where = f"{label}:{node.lineno}"
        with at(where):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    known(name, keys)
                case _:
                    raise UserError(f"a config file holds only `key = value` lines, not `{show(node)}`")
            if name in lines:
                raise UserError(f"{name!r} is already set on line {lines[name]}; keep one of the two")
            s.values[name] = check(keys[name], value_of(expression, keys[name], s.values))
            s.origins[name], lines[name] = where, node.lineno


def parse_file(path, label):
    """The statements of a config file, without its docstring."""
    data = b""
    try:
        data = Path(path).read_bytes()
        body = ast.parse(data.decode("utf-8-sig"), label).body      # UTF-8 whatever the locale, with or without a BOM
    except FileNotFoundError:
        raise UserError(f"{label}: no such file{near(path, shipped())}") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data[:error.start].count(b"\n") + 1
        raise UserError(f"{label}:{line}: this is not UTF-8 text") from None
    except SyntaxError as error:
        raise UserError(f"{label}:{error.lineno or 1}: {error.msg}: `{(error.text or '').strip()}`") from None
    except (ValueError, RecursionError, MemoryError):               # a zero byte; a thousand brackets
        raise UserError(f"{label}:1: is not a config file") from None
    has_doc = body and isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, "value", None), str)
    return body[1:] if has_doc else body


def from_text(text, k, names):
    """A flag's text as a value. Text keys take it as it is, because the shell has already eaten one pair of quotes."""
    kinds = members(k.kind)
    if not takes_text(k.kind):
        return value_of(parse_expression(text, k), k, names)
    if text == "None" and NoneType in kinds:
        return None
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        literal = ast.literal_eval(text)
        if type(literal) is str and str in kinds:
            return literal
        if type(literal) is list and list[str] in kinds and all(type(item) is str for item in literal):
            return literal
    others = [kind for kind in kinds if kind not in (str, list[str], NoneType)]
    with contextlib.suppress(UserError):                # bool | str: a bool where it reads as one
        if others:
            other = k._replace(kind=typing.Union[tuple(others)], choices=())
            return check(other, value_of(parse_expression(text, other), other, names))
    return text


# ---- what a value may be -----------------------------------------------------------------------------------------

def parse_expression(text, k):
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UserError(f"{k.name} takes {say(k.kind)}, got {text!r}") from None


def value_of(node, k, names):
    """An expression's value. Unknown names come first: in a file they are mostly text without its quotes."""
    for n in ast.walk(node):
        if isinstance(n, ast.Name) and n.id not in names and n.id.lower() not in CONSTANTS:
            if takes_text(k.kind):
                raise UserError(f"{k.name} takes {say(k.kind)}: put quotes around `{show(node)}`")
            raise UserError(f"unknown name {n.id!r}{near(n.id, names) or f'; {k.name} takes {say(k.kind)}'}")
    return evaluate(node, names)


def evaluate(node, names):
    match node:
        case ast.Constant(value=int() | float() | str() | None):
            return node.value
        case ast.Name(id=name):
            return names[name] if name in names else CONSTANTS[name.lower()]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [evaluate(item, names) for item in items]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = number(node.operand, names)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = number(node.left, names), number(node.right, names)
            try:
                return OPERATORS[type(node.op)](left, right)
            except ArithmeticError as error:
                raise UserError(f"cannot compute `{show(node)}`: {error.args[-1]}") from None
    raise UserError(f"`{show(node)}` is not allowed: a value is a literal, a list, arithmetic or the name of a key")


def number(node, names):
    value = evaluate(node, names)
    if type(value) not in (int, float):
        raise UserError(f"cannot compute with `{show(node)}`: it is {value!r} here, not a number")
    return value


def power(base, exponent):
    if type(base) is type(exponent) is int and base.bit_length() * exponent > 256:      # 10**10**10 fills the memory
        raise OverflowError("the number is too large")
    value = base ** exponent
    if isinstance(value, complex):
        raise ArithmeticError("a negative number has no such power")
    return value


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: power}


def check(k, value):
    """`value` as the declared kind and among the choices."""
    try:
        value = cast(value, k.kind)
    except (ValueError, OverflowError):
        quotes = "; put quotes around it" if takes_text(k.kind) and type(value) in (int, float, bool) else ""
        raise UserError(f"{k.name} takes {say(k.kind)}, got {value!r}{quotes}") from None
    for item in value if isinstance(value, list) else [value]:
        if k.choices and item is not None and item not in k.choices:
            hint = near(str(item), k.choices) or f"; it is one of {', '.join(map(str, k.choices))}"
            raise UserError(f"{k.name} has no choice {item!r}{hint}")
    return value


def cast(value, kind):
    """`value` as `kind`, ValueError where that would change what was said: 1e3 is an int, 1.5 and True are not."""
    for option in sorted(members(kind), key=lambda option: option is not type(value)):      # an exact match first
        if typing.get_origin(option) is list:
            return [cast(item, *typing.get_args(option)) for item in (value if isinstance(value, list) else [value])]
        elif type(value) is option:
            return value
        elif (option, type(value)) in ((int, float), (float, int)) and option(value) == value:
            return option(value)
        elif option is bool and type(value) is int and value in (0, 1):
            return bool(value)
    raise ValueError


# ---- words -------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def at(where):
    """Errors raised inside begin with the place of the mistake."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except RecursionError:
        raise UserError(f"{where}: the value is nested too deeply") from None


def known(name, keys):
    if name in keys:
        return
    needs, sentence = HINTS.get(name, (None, ""))
    if needs in keys:
        raise UserError(f"unknown key {name!r}: {sentence}")
    raise UserError(f"unknown key {name!r}{near(name, keys) or '; --help lists the keys'}")


def near(word, options):
    options = {str(option).lower(): str(option) for option in options}
    found = difflib.get_close_matches(word.lower(), options, 1)
    return f", did you mean {options[found[0]]!r}?" if found else ""


def near_path(word, paths):
    """The path that ends in that very name, else the nearest: `rivals` is config/ladder/rivals, however long the way there."""
    named = [path for path in paths if Path(path).stem == word]
    return f", did you mean {named[0]!r}?" if named else near(word, paths)


def shipped():
    """The config files of this folder, as one would type them."""
    return [os.path.relpath(path) for path in sorted(Path(__file__).parent.rglob("[!_]*.py"))]


def members(kind):
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)


def takes_text(kind):
    return str in members(kind) or list[str] in members(kind)


def say(kind):
    """A type in words: `int | None` is "a whole number or None"."""
    return " or ".join(KINDS.get(member) or f"a list, each item {say(*typing.get_args(member))}"
                       for member in members(kind))


def show(node):
    return clip(" ".join(ast.unparse(node).split()), 60)


def clip(text, width):
    return text if len(text) <= width else text[:width - 3] + "..."


def example(k):
    return f"--{k.name}={k.default if type(k.default) in (int, float, bool, str) and k.default != '' else 'VALUE'}"


def help_text(keys, doc, usage):
    columns = {name: (f"--{name}", k.kind.__name__ if k.kind in KINDS else str(k.kind).replace("typing.", ""),
                      clip(repr(k.default), 24)) for name, k in keys.items()}
    widths = [min(max(map(len, column)), 28) for column in zip(*columns.values())]
    script = " ".join(["usage: python", os.path.basename(sys.argv[0])] + [usage] * bool(usage))
    lines = [(doc or "").strip(), "", f"{script} {'' if usage == '' else '[config/FILE.py ...] '}[--key=value ...]"]
    if usage != "":
        lines.append("Later files win over earlier ones, the command line wins over files; values may use other keys.")
    for group in dict.fromkeys(k.group for k in keys.values()):
        lines += ["", group]
        for name, k in keys.items():
            if k.group == group:
                head = "  " + "  ".join(text.ljust(width) for text, width in zip(columns[name], widths)) + "  "
                choices = f"[{' | '.join(map(str, k.choices))}] " if k.choices else ""
                lines += textwrap.wrap(choices + k.help, 112, initial_indent=head, break_on_hyphens=False,
                                       subsequent_indent=" " * (sum(widths) + 8)) or [head.rstrip()]
    return "\n".join(lines)
