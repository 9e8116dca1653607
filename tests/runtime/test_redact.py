"""What is taken out, what stays, and that no file of a run has it."""

import json
import time
from ast import literal_eval
from pathlib import Path

import pytest

from harness.cluster.world import behaviour
from harness.runtime import redact
from harness.tools.export.program import render
from harness.tools.export.subject import read_subject
from harness.tools.report.write_reports import write_reports
from tests.tools.report.fake_run import fake_run

SECRETS = {
    "SGLANG_API_KEY": "correct horse battery",
    "SGLANG_S3_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
    "TORCH_HUB_TOKEN": "abcdefghijkl",
    "NCCL_WEBHOOK_PASSWORD": "hunter2hunter2",
    "OMP_BASIC_AUTH": "dXNlcjpwYXNz",
    "SGLANG_STORE_APIKEY": "0123456789abcdef",
    "SGLANG_PROXY": "http://alice:s3cr3tpass@proxy.example:3128",
    "CUDA_NOTE": "made with hf_abcdefghijklmnopqrstuv",
    "PYTORCH_INDEX": "https://glpat-abcdefghijklmnopqrst@git.example/simple",
}
"""Each value holds its secret in the words below."""
HIDDEN = (
    "correct horse", "correcthorse", "wJalrXUtnFEMI", "abcdefghijkl", "hunter2", "dXNlcjpwYXNz", "0123456789abcdef", "s3cr3tpass", "hf_abc", "glpat-",
)  # fmt: skip
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false",
    "SGLANG_MAX_NEW_TOKENS": "four thousand",
    "SGLANG_TOKEN": "4096",
    "NCCL_SOCKET_IFNAME": "eth0",
    "SGLANG_CACHE_KEY": "true",
    "SGLANG_DOCS": "https://docs.example/a@b",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_told_from_its_name_or_its_shape(name: str) -> None:
    shown = redact.variable(name, SECRETS[name])
    assert "[redacted " in shown and not any(each in shown for each in HIDDEN)
    assert redact.variable(name, shown) == shown, "redacting twice changes nothing"


def test_other_values_stay() -> None:
    assert redact.variables(PLAIN) == PLAIN


def test_two_secrets_get_different_marks() -> None:
    assert redact.variable("HF_TOKEN", "one-secret") != redact.variable("HF_TOKEN", "two-secrets")


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        ("--engine.args.api_key tops3cret", None),  # no assignment: the config's own text has one
        ('api_key = "tops3cret"', "tops3cret"),
        ("ServerArgs(api_key='tops3cret', tp_size=2)", "tops3cret"),
        ('{"admin_api_key": "tops3cret"}', "tops3cret"),
        ("ssl_keyfile_password: tops3cret", "tops3cret"),
        ('run: "{\\"api_key\\": \\"tops3cret\\"}"', "tops3cret"),
        ("Authorization: Bearer abc.def-ghi12345", "abc.def-ghi12345"),
        ("pip install -i https://me:pa55w0rd@host.example/simple x", "pa55w0rd"),
        ("ValueError: bad AKIAIOSFODNN7EXAMPLE in request", "AKIAIOSFODNN7EXAMPLE"),
    ],
)
def test_free_text_loses_its_secrets(given: str, hidden: str | None) -> None:
    shown = redact.text(given)
    assert shown == given if hidden is None else hidden not in shown and "[redacted " in shown


@pytest.mark.parametrize(
    "given",
    [
        "KeyError: 'model.layers.0'",
        "first token 44.7 s after launch",
        "eos_token = '</s>', pad_token_id: 151643",
        "api_key=None, max_total_tokens=4096",
        "http://localhost:8000/generate",
        "git clone ssh://git@host.example/repo",
    ],
)
def test_free_text_without_secrets_is_left_alone(given: str) -> None:
    assert redact.text(given) == given


def test_no_file_of_a_run_has_a_secret(tmp_path: Path) -> None:
    """environment.json as a run writes it; the reports and the export of a run directory that has secrets in it all the
    same."""
    assert not any(each in json.dumps(behaviour(SECRETS | PLAIN)) for each in HIDDEN)
    folder = fake_run(tmp_path / "run")
    ranks = json.loads((folder / "environment.json").read_text())
    for each in ranks:
        each["environment"] = SECRETS | PLAIN
    (folder / "environment.json").write_text(json.dumps(ranks))
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("[engine.args]", '[engine.args]\napi_key = "correcthorse"'))
    made = [file.read_text() for file in write_reports(folder)] + [render(read_subject([str(folder)]))]
    assert sum("[redacted " in text for text in made) == 3, "report.md, report.html, export"
    for text in made:
        assert not [each for each in HIDDEN if each in text]


@pytest.mark.parametrize(
    "text", ['password="{question}"', "Secret:\n{question}", "it's a \"secret='x\\y\"", 'token: "a\\"']
)
def test_redacted_text_in_quotes_is_still_that_text_in_quotes(text: str) -> None:
    for quoted, read in ((json.dumps(text), json.loads), (repr(text), literal_eval)):
        assert isinstance(read(redact.text(quoted)), str)


def test_a_table_keeps_its_shape() -> None:
    given = {"api_key": 123456789, "hub": {"hf_token": "abcdefgh", "size": 123456789}, "stop_token_ids": [151645]}
    kept = {"speculative_token_map": "/maps/hot_tokens.pt", "eos_token": "<|im_end|>", "sort_key": "length"}
    given |= kept | {"ssl": ["--password=hunter2"], "on": True, "key": None, "text": 'password="{question}"'}
    made = redact.values(given)
    assert (made["hub"]["size"], made["stop_token_ids"], made["on"], made["key"]) == (123456789, [151645], True, None)
    assert made["text"] == given["text"] and {name: made[name] for name in kept} == kept
    for hidden in (made["api_key"], made["hub"]["hf_token"], made["ssl"][0].removeprefix("--password=")):
        assert redact.MARK.fullmatch(hidden)


@pytest.mark.parametrize("part", ["a", "x_", "secret", "eyJ-", "://a:", "token "])
def test_the_time_grows_with_the_length_alone(part: str) -> None:
    """A report redacts what an error quotes, and that may be one word of many kilobytes."""

    def seconds(length: int) -> float:
        started = time.process_time()
        redact.text((part * length)[:length])
        return time.process_time() - started

    assert min(seconds(400_000) for _ in range(3)) < 20 * max(seconds(50_000), 0.005)
