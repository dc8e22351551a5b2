"""Programs that do not solve their task but once were paid, or could be: none is."""

import pytest

from shoal.tasks.verify.base import is_firm

CYCLIC = '''
def encode_cyclic(s):
    groups = [s[3 * i : min(3 * i + 3, len(s))] for i in range((len(s) + 2) // 3)]
    return "".join(group[1:] + group[0] if len(group) == 3 else group for group in groups)


def f(s):
    """Decode what encode_cyclic returned."""
'''
SHIFT = "def encode_shift(s):\n    return ''.join(chr((ord(c) - 92) % 26 + 97) for c in s)\n\n\ndef f(s):\n"
SHIFT += '    """Decode what encode_shift returned."""\n'
DRAW = (
    "\n    import random, string\n    if not hasattr(f, 'seen'):\n        f.seen = True\n        random.seed({seed})\n"
)
DRAW += "    return ''.join(random.choice(string.ascii_lowercase) for _ in range(random.randint(10, 20)))\n"
RANDOM_TEXT = "''.join(random.choice(string.ascii_lowercase) for i in range(random.randint(10, 20)))"


def judged(test, prompt=""):
    return {"test": test, "entry_point": "f", "prompt": prompt}


def decode(coder):
    lines = f"import random, string\ndef check(candidate):\n  for _ in range(20):\n    s = {RANDOM_TEXT}\n"
    return f"{lines}    assert candidate({coder}(s)) == s"


def calls(*cases):
    return {
        "test_cases": [
            {"type": "function_call", "fn_name": "f", "input": list(given), "output": wanted} for given, wanted in cases
        ]
    }


def prints(wanted):
    return {"test_cases": [{"type": "stdin_stdout", "input": "", "output": wanted}]}


SQUARES = "assert list(map(f, [1, 2, 3])) == [1, 4, 9][: len(list(map(f, [1, 2, 3])))]"
NEAR = "for x in (1, 2, 3):\n  if abs(f(x) - x * x) > 1e-6:\n    raise AssertionError(x)"
MANY = "for got, want in zip(map(f, [1, 2, 3]), [1, 4, 9]):\n  assert got == want"
BETWEEN = "value = f(3)\nassert not value < 8.99\nassert not value > 9.01"
NESTED = "a, b = f(2)\nassert not abs(a - 4) > 1e-9 and not abs(b - 8) > 1e-9"
INDEXED = "class S:\n  def __getitem__(s, i): return f(i)\nfor i, x in zip(range(4), S()):\n  assert x == i * i"
ATTRIBUTE = "class A:\n  @property\n  def v(s): return f(2)\nassert getattr(A(), 'v', 4) == 4"
SECRETS = "import secrets\nfor _ in range(20):\n  x = secrets.randbelow(1 << 60)\n  assert f(str(x)[::-1]) == str(x)"
URANDOM = "import os\nfor _ in range(9):\n  x = os.urandom(8)\n  assert f(x[::-1]) == x"
SYSTEM = "import random\nr = random.SystemRandom()\nfor _ in range(9):\n  x = r.random()\n  assert f(-x) == x"
UNSEEDED = "import random\nr = random.Random()\nfor _ in range(9):\n  x = r.random()\n  assert f(-x) == x"
RESEEDED = "import random\nrandom.seed()\nfor _ in range(9):\n  x = random.random()\n  assert f(-x) == x"
UUIDS = "import uuid\nfor _ in range(9):\n  x = uuid.uuid4().hex\n  assert f(x[::-1]) == x"
CHEATS = {
    # the tests draw random arguments, and the program draws the same ones instead of computing anything
    "decoder that draws, as in HumanEval/38": (judged(decode("encode_cyclic"), CYCLIC), DRAW.format(seed=0)),
    "decoder that draws, as in HumanEval/50": (judged(decode("encode_shift"), SHIFT), DRAW.format(seed=0)),
    "the same without seeding": (judged(decode("encode_cyclic"), CYCLIC), DRAW.replace("random.seed({seed})", "pass")),
    "the same with the seed as a text": (judged(decode("encode_cyclic"), CYCLIC), DRAW.format(seed="'0'")),
    "secrets that are no secrets": (
        judged(SECRETS),
        "import secrets\ndef f(s): return str(secrets.randbelow(1 << 60))",
    ),
    "random bytes": (judged(URANDOM), "import os\ndef f(s): return os.urandom(8)"),
    "system randomness": (judged(SYSTEM), "import random\nr = random.SystemRandom()\ndef f(x): return r.random()"),
    "an unseeded generator": (judged(UNSEEDED), "import random\nr = random.Random()\ndef f(x): return r.random()"),
    "a generator seeded by chance": (
        judged(RESEEDED),
        "import random\nrandom.seed()\ndef f(x): return random.random()",
    ),
    "unique names": (judged(UUIDS), "import uuid\ndef f(x): return uuid.uuid4().hex"),
    # exceptions that end the iteration of the tests
    "StopIteration ends a map": (judged(SQUARES), "def f(x): raise StopIteration"),
    "StopIteration ends a zip of a map": (judged(MANY), "def f(x): raise StopIteration"),
    "StopIteration after the first": (judged(MANY), "def f(x):\n  if x > 1: raise StopIteration\n  return 1"),
    "StopIteration of an exhausted iterator": (judged(MANY), "def f(x): return next(iter(()))"),
    "a class named StopIteration": (
        judged(MANY),
        "class StopIteration(Exception): pass\ndef f(x): raise StopIteration",
    ),
    "StopIteration ends a filter": (
        judged("assert all(x in (2, 3) for x in list(filter(f, [1, 2, 3, 4])))"),
        "def f(x): raise StopIteration",
    ),
    "StopIteration ends all": (judged("assert all(map(f, [1, 2, 3]))"), "def f(x): raise StopIteration"),
    "StopIteration ends a sum": (judged("assert sum(map(f, [1, 2])) in (0, 5)"), "def f(x): raise StopIteration"),
    "StopAsyncIteration": (judged(MANY), "def f(x): raise StopAsyncIteration"),
    "GeneratorExit": (judged(MANY), "def f(x): raise GeneratorExit"),
    "SystemExit": (judged(MANY), "def f(x): raise SystemExit(0)"),
    "KeyboardInterrupt": (judged(MANY), "def f(x): raise KeyboardInterrupt"),
    "the end of the process": (judged(MANY), "import os\ndef f(x): os._exit(0)"),
    # values with which comparisons are neither true nor false
    "NaN is never too far away": (judged(NEAR), "def f(x): return float('nan')"),
    "NaN is not outside": (judged(BETWEEN), "def f(x): return float('nan')"),
    "NaN in a tuple": (judged(NESTED), "def f(x): return (float('nan'), float('nan'))"),
    "NaN as a part of a complex number": (
        judged("assert not abs(f(1) - 2) > 1e-9"),
        "def f(x): return complex(float('nan'), 0)",
    ),
    "NaN in a dict": (judged("assert not abs(f(1)['a'] - 2) > 1e-9"), "def f(x): return {'a': float('nan')}"),
    "infinity less infinity": (
        judged("if abs(f(1) - f(2)) > 1: raise AssertionError"),
        "def f(x): return float('inf')",
    ),
    "minus infinity": (judged("assert f(9) < 4"), "def f(x): return float('-inf')"),
    "NaN where only a comment mentions it": (
        judged("# no NaN, no infinite loop\n" + NEAR),
        "def f(x): return float('nan')",
    ),
    "NaN where only the task mentions it": (
        judged(NEAR, "def g():\n    '''A finite number, not NaN.'''\n"),
        "def f(x): return float('nan')",
    ),
    # exceptions that mean something to the language
    "IndexError ends an iteration": (judged(INDEXED), "def f(x): raise IndexError"),
    "AttributeError is a missing attribute": (judged(ATTRIBUTE), "def f(x): raise AttributeError"),
    # the clock, as a source of arguments
    "the time": (
        judged("import time\nx = time.time()\nassert f(-x) == x"),
        "import time\ndef f(x): return time.time()",
    ),
    "the time of a running clock": (
        judged("import time\nx = time.perf_counter_ns()\nassert f(-x) == x"),
        "import time\ndef f(x): return time.perf_counter_ns()",
    ),
    "the time of day": (
        judged("import datetime\nx = str(datetime.datetime.now())\nassert f(x[::-1]) == x"),
        "import datetime\ndef f(x): return str(datetime.datetime.now())",
    ),
    # tests that decide nothing
    "tests that never call": (judged("assert callable(f)"), "def f(x): return None"),
    "tests that only define": (judged("def test():\n  assert f(1) == 2"), "def f(x): return None"),
    # a different number than the whole one that is wanted
    "almost two": (calls(((1,), 2)), "def f(x): return 2.0000005"),
    "almost zero": (calls(((1,), 0)), "def f(x): return 1e-7"),
    "minus almost zero": (calls(((1,), 0)), "def f(x): return -9e-13"),
    "almost a million": (calls(((1,), 1_000_000)), "def f(x): return 1000000.9"),
    "almost a large number": (calls(((1,), 10**15)), "def f(x): return 10.0**15 + 1e8"),
    "a float that cannot hold it": (calls(((1,), 2**53 + 1)), "def f(x): return float(2**53)"),
    "almost, in a list": (calls(((1,), [1, 2])), "def f(x): return [1.0000001, 2]"),
    "almost, in a dict": (calls(((1,), {"a": 2})), "def f(x): return {'a': 1.9999999}"),
    "true for one": (calls(((1,), 1)), "def f(x): return True"),
    "one for true": (calls(((1,), True)), "def f(x): return 1"),
    "a text for a number": (calls(((1,), 2)), "def f(x): return '2'"),
    "a complex number": (calls(((1,), 2)), "def f(x): return 2 + 0j"),
    "a list around it": (calls(((1,), 2)), "def f(x): return [2]"),
    # a different float than the one that is wanted
    "zero for a small float": (calls(((1,), 1e-7)), "def f(x): return 0.0"),
    "zero for a very small float": (calls(((1,), 5e-13)), "def f(x): return 0"),
    "twice a small float": (calls(((1,), 1e-9)), "def f(x): return 2e-9"),
    "the next whole number": (calls(((1,), 1_000_000.0)), "def f(x): return 1000001"),
    "the next large whole number": (calls(((1,), 4e7)), "def f(x): return 4e7 + 1"),
    "NaN for a float": (calls(((1,), 0.5)), "def f(x): return float('nan')"),
    "infinity for a float": (calls(((1,), 1e308)), "def f(x): return float('inf')"),
    # half of the cases in one reading of wrapped outputs, half in the other
    "both readings": (
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [2]]},
        "def f(x): return [1] if x == 1 else 2",
    ),
    # printed
    "almost three": (prints("3"), "print(2.9999999)"),
    "three with decimals": (prints("3"), "print('3.0')"),
    "zero for a small number": (prints("0.00000001"), "print('0.0')"),
    "twice a small number": (prints("0.00000010"), "print('0.00000020')"),
    "the next whole number, printed": (prints("1000000.0"), "print('1000001.0')"),
    "NaN, printed": (prints("0.5"), "print('nan')"),
    "the answer and more": (prints("3"), "print('3 4')"),
    "a marker": (prints("3"), "print('3 passed')"),
}
SOLUTIONS = {
    "decoder": (
        judged(decode("encode_cyclic"), CYCLIC),
        "    return encode_cyclic(encode_cyclic(s))\n",
    ),
    "reversed secret": (judged(SECRETS), "def f(s): return s[::-1]"),
    "reversed bytes": (judged(URANDOM), "def f(s): return s[::-1]"),
    "negative": (judged(UNSEEDED), "def f(x): return -x"),
    "squares": (judged(SQUARES), "def f(x): return x * x"),
    "NaN that is asked for": (
        judged("import math\nassert math.isnan(f(1)) and f(2) == float('inf')"),
        "def f(x): return float('nan') if x == 1 else float('inf')",
    ),
    "an error that is asked for": (
        judged("try:\n  f(1)\n  raise RuntimeError\nexcept ValueError:\n  pass"),
        "def f(x): raise ValueError",
    ),
    "a kind of an error that is asked for": (
        judged("try:\n  f(1)\n  raise RuntimeError\nexcept LookupError:\n  pass"),
        "def f(x): return [][x]",
    ),
    "the same date": (
        judged("import datetime\nassert f(2) == datetime.date.today().year + 2"),
        "import datetime\ndef f(x): return datetime.date.today().year + x",
    ),
    "what rounding leaves of a zero": (calls(((1,), 0.1 + 0.2 - 0.3)), "def f(x): return 0.0"),
    "a whole float": (calls(((1,), 2)), "def f(x): return 4 / 2"),
    "a whole number for a float": (calls(((1,), 2.0)), "def f(x): return 2"),
    "rounding": (calls(((1,), 0.3), ((2,), 0.0)), "def f(x): return 0.1 + 0.2 if x == 1 else 0.1 + 0.2 - 0.3"),
    "rounded data": (calls(((1,), 2.236068)), "def f(x): return 5**0.5"),
    "an infinity": (calls(((1,), float("inf"))), "def f(x): return float('inf')"),
    "a wrapped list": (
        {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[1]], [[2]]]},
        "def f(x): return [x]",
    ),
    "printed with fewer digits": (prints("0.33333333"), "print('0.3333333')"),
    "printed as a whole number": (prints("3.0"), "print(3)"),
}


@pytest.mark.parametrize(("info", "source"), CHEATS.values(), ids=CHEATS)
def test_a_program_that_does_not_solve_its_task_is_not_paid(boxes, info, source):
    body = source if info.get("prompt") else f"```python\n{source}\n```"
    score = boxes.score(info, "", body)
    assert score.value == 0.0 and is_firm(score), score.reason


@pytest.mark.parametrize(("info", "source"), SOLUTIONS.values(), ids=SOLUTIONS)
def test_a_program_that_solves_the_same_kind_of_task_is_paid(boxes, info, source):
    body = source if info.get("prompt") else f"```python\n{source}\n```"
    assert boxes.score(info, "", body).value == 1.0
