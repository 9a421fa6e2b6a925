import json
from decimal import Decimal
from types import SimpleNamespace

import pytest

from mlx_tq.__main__ import main
from mlx_tq.errors import ConfigError
from mlx_tq.evaluate.reasoning import final_number, problem_samples, read_problems, without_thoughts

THINKING = SimpleNamespace(has_thinking=True, think_start="<think>", think_end="</think>")


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234.50 and then 5", "1234.50"),
        ("#### $18", "18"),
        ("so \\boxed{-42} of 50", "-42"),
        ("He has 3 left, no: 4 apples.", "4"),
        ("none", None),
        ("", None),
    ],
)
def test_the_final_number_of_an_answer(answer, number):
    assert final_number(answer) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("a question", "<think>It is 3.</think>It is 4.", "It is 4."),
        ("a question", "It is 4.", "It is 4."),
        ("a question", "<think>It is 3", None),
        ("a question <think>\n", "It is 3", None),
        ("a question <think>\n", "It is 3.</think> 4", " 4"),
    ],
)
def test_thinking_is_removed_from_an_answer(prompt, text, answer):
    assert without_thoughts(THINKING, prompt, text) == answer


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.jsonl"
    lines = [{"question": f"What is {n} and {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_prompt_has_worked_problems_before_the_question(problems, embedded):
    _, tokenizer = embedded
    found = read_problems(str(problems))
    options = {"shots": 5, "count": 3, "seeds": 2, "chat": False}
    samples = problem_samples(tokenizer, found, **options)
    assert [sample.expected for sample in samples] == ["10", "12", "14"] * 2
    text = tokenizer.decode(samples[0].ids)
    assert text.count("Answer: Twice.") == 5
    assert text.rstrip().endswith("What is 5 and 5?\nAnswer:")
    assert samples[0].shared == samples[1].shared > 0
    assert samples[0].ids[: samples[0].shared] != samples[3].ids[: samples[0].shared]  # another order of the shots
    assert [sample.fields["group"] for sample in samples] == ["5-shot, order 1"] * 3 + ["5-shot, order 2"] * 3
    assert [samples[0].judge(answer)[1] for answer in ("5 and 5 is 10.", "11")] == [1, 0]
    chat = problem_samples(tokenizer, found, **{**options, "chat": True})
    assert "Question:" not in tokenizer.decode(chat[0].ids)
    with pytest.raises(ConfigError, match="none is left"):
        problem_samples(tokenizer, found, shots=9, count=1, seeds=1, chat=False)


def test_a_line_ends_only_where_json_lines_end(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"question": "a\u2028b", "answer": "#### 1"}\n', encoding="utf-8")
    assert [problem.question for problem in read_problems(str(path))] == ["a\u2028b"]


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "a"}', '{"question": "a", "answer": "7"}'])
def test_a_line_of_another_format_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + line)
    with pytest.raises(ConfigError, match=r"line 2 of .* is not a problem"):
        read_problems(str(path))


def test_the_command_compares_and_resumes(problems, tmp_path, capsys):
    target = tmp_path / "out.json"
    words = ["evaluate", "reasoning", "--data", str(problems), "--dtype", "float32", "--shots", "5", "--samples", "2"]
    words += ["--max-tokens", "8", "--profiles", "off,tq2/tq2", "--kv-sinks", "16", "--kv-window", "16"]
    words += ["--json", str(target)]
    assert main(words) == 0
    found = json.loads(target.read_text())
    assert set(found["results"]) == {f"{name} 0 {place}" for name in ("off", "tq2/tq2") for place in (0, 1)}
    found["results"]["off 0 0"] |= {"score": 1.0}  # not asked again
    found["results"]["tq2/tq2 0 0"] |= {"score": 0.0}
    target.write_text(json.dumps(found))
    capsys.readouterr()
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["5-shot", "tq2/tq2", "0/2", "0.0", "0.0-65.8", "0.0", "1", "0", "1.000"] in lines
    assert main([*words, "--samples", "0"]) == 2
    assert "--samples is 0" in capsys.readouterr().err
    target.write_text(json.dumps(found | {"versions": {**found["versions"], "mlx": "0.1"}}))
    assert main(words) == 2
    assert "holds results of other versions" in capsys.readouterr().err
    target.write_text(json.dumps(found))
    problems.write_text(problems.read_text().replace("What is 5 and 5", "How much is 5 and 5"))
    assert main(words) == 2
    assert "holds results of other settings" in capsys.readouterr().err
