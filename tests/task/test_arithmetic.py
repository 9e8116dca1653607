import re

from harness.task.arithmetic import OBJECTS, STORIES, make_problems
from harness.task.rewards import extract_answer, gsm8k_reward


def test_same_seed_same_problems_and_a_smaller_count_is_a_prefix():
    problems = make_problems(50, seed=3)
    assert make_problems(50, seed=3) == problems
    assert all(make_problems(count, seed=3) == problems[:count] for count in (0, 1, 20))
    assert make_problems(50, seed=4) != problems


def test_every_worked_line_is_right_and_agrees_with_the_final_number():
    for problem in make_problems(2000, seed=0):
        a, symbol, b, result, final = re.fullmatch(
            r".*<<(\d+)([-+*/])(\d+)=(\d+)>>\4 [\w ]+\.\n#### (\d+)", problem["answer"]
        ).groups()
        a, b, result = int(a), int(b), int(result)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[symbol] == result
        assert final == str(result)
        assert extract_answer(problem["answer"]) == result
        assert re.findall(r"\d+", problem["question"]) == [str(a), str(b)]
        assert "{" not in problem["question"] + problem["answer"]


def test_problems_vary():
    problems = make_problems(500, seed=0)
    assert len({problem["question"] for problem in problems}) > 450
    assert {symbol for p in problems for symbol in re.findall(r"<<\d+(.)", p["answer"])} == {
        symbol for symbol, _, _ in STORIES
    }
    assert all(any(thing in p["question"] for p in problems) for thing in OBJECTS)


def test_a_problem_scores_itself():
    problem = make_problems(1, seed=0)[0]
    number = problem["answer"].rpartition("#### ")[2]
    assert gsm8k_reward(problem["answer"], number) == 1.0
    assert gsm8k_reward(problem["question"], number) == 0.0
