"""Arithmetic word problems in the schema of GSM8K, made from a seed: a data set for machines without network."""

import random

NAMES = ["Ana", "Ben", "Chen", "Dana", "Emeka", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mira", "Noor"]
OBJECTS = ["apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers", "tickets"]
_STORIES = """
+ {name} has {a} {objects} and finds {b} more. How many {objects} does {name} have now?
  {name} has {work} {objects}.
+ {name} has {a} {objects} and {other} has {b} {objects}. How many {objects} do they have together?
  Together they have {work} {objects}.
- {name} has {a} {objects} and gives {b} of them to {other}. How many {objects} does {name} have left?
  {name} has {work} {objects} left.
- {name} has {a} {objects}, {other} has {b}. How many more {objects} does {name} have than {other}?
  {name} has {work} {objects} more.
* {name} has {a} boxes with {b} {objects} in each box. How many {objects} does {name} have?
  The boxes hold {work} {objects}.
/ {name} shares {a} {objects} equally among {b} friends. How many {objects} does each friend get?
  Each friend gets {work} {objects}.
""".strip().splitlines()
STORIES = [
    (question[0], question[2:], answer.strip()) for question, answer in zip(_STORIES[::2], _STORIES[1::2], strict=True)
]
"""(symbol, question, answer) of each kind of problem; the result is a <symbol> b."""


def make_problems(count: int, seed: int) -> list[dict[str, str]]:
    """Return problems {"question", "answer"}. An answer is a worked line and a line "#### N" with N >= 0.

    The same seed gives the same problems, and a smaller count the first of them. Operands and quotients are below 10,
    so a problem may repeat.
    """
    rng = random.Random(seed)
    return [_problem(rng) for _ in range(count)]


def _problem(rng: random.Random) -> dict[str, str]:
    symbol, question, answer = rng.choice(STORIES)
    name, other = rng.sample(NAMES, 2)
    a, b, result = _operands(symbol, rng)
    words = {"name": name, "other": other, "objects": rng.choice(OBJECTS), "a": a, "b": b}
    work = f"{a} {symbol} {b} = <<{a}{symbol}{b}={result}>>{result}"
    return {"question": question.format(**words), "answer": f"{answer.format(work=work, **words)}\n#### {result}"}


def _operands(symbol: str, rng: random.Random) -> tuple[int, int, int]:
    """Return (a, b, a <symbol> b), of which the result is a whole number >= 0."""
    if symbol == "-":
        b = rng.randint(2, 8)
        a = rng.randint(b, 9)
        return a, b, a - b
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if symbol == "/":
        return a * b, a, b
    return a, b, a + b if symbol == "+" else a * b
