"""What is taken out, what stays, and that no file of a run has it."""

import json
import os
import re
import shlex
import sys
import time
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

import pytest

from harness.cluster.world import behaviour
from harness.config.layers import redacted, to_toml
from harness.config.run_folder import write_config
from harness.config.schema import Config, Engine
from harness.runtime import processes, redact
from harness.runtime.events import EventLog
from harness.runtime.failure import Failure
from harness.tools.environment_file import command
from harness.tools.export.program import render
from harness.tools.export.subject import read_subject
from harness.tools.report.write_reports import write_reports
from harness.tools.watchdog.failures import Place
from harness.tools.watchdog.verdict import JobView, RunVerdict
from tests.tools.report.fake_run import fake_run

REPOSITORY = Path(__file__).parents[2]
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


def test_a_secret_is_told_from_its_name_or_its_shape_and_other_values_stay() -> None:
    for name, secret in SECRETS.items():
        shown = redact.variable(name, secret)
        assert "[redacted " in shown and not any(each in shown for each in HIDDEN), name
        assert redact.variable(name, shown) == shown, "redacting twice changes nothing"
    assert redact.values(PLAIN) == PLAIN
    assert redact.variable("HF_TOKEN", "one-secret") != redact.variable("HF_TOKEN", "two-secrets")


@pytest.mark.parametrize(
    ("given", "hidden"),
    [
        ("--engine.args.api_key tops3cret", "tops3cret"),
        ("CalledProcessError: Command '['x', '--api-key', 'tops3cret']'", "tops3cret"),
        ("https://h.example/x?page=2&access_token=tops3cret#top", "tops3cret"),
        ("postgresql://u:p@tops3cret@h.example/db", "tops3cret"),
        ('password="two tops3cret"', "tops3cret"),
        ('{"user": "me", "pass": "tops3"}', "tops3"),
        ("PGPASSWORD=tops3cret psql", "tops3cret"),
        ("Proxy-Authorization: Basic tops3cret", "tops3cret"),
        ("{'X-Auth-Token': 'tops3cret'}", "tops3cret"),
        ("os.environ['HF_TOKEN'] = 'tops3cret'", "tops3cret"),
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
def test_free_text_loses_its_secrets(given: str, hidden: str) -> None:
    shown = redact.text(given)
    assert hidden not in shown and "[redacted " in shown


@pytest.mark.parametrize(
    "given",
    [
        "KeyError: 'model.layers.0'",
        "first token 44.7 s after launch",
        "eos_token = '</s>', pad_token_id: 151643",
        "api_key=None, max_total_tokens=4096",
        "http://localhost:8000/generate",
        "git clone ssh://git@host.example/repo",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "data.prompt_key=prompt reward_fn_key=data_source --section.key VALUE",
        "missing key: model.layers.0.self_attn.q_proj.weight",
        '{"token": " hello", "logprob": -0.1, "key": "layers.0"}',
        "    api_key=server_args.api_key, token = secrets.token_hex(8)",
        "PWD=/srv python -u launch/ppo.py --config a:b",
        "ssl_keyfile=/etc/ssl/key.pem HF_TOKEN=$HF_TOKEN",
    ],
)
def test_free_text_without_secrets_is_left_alone(given: str) -> None:
    assert redact.text(given) == given


COMMAND = [
    "launch/ppo.py", "configs/cpu/quickstart.toml", "--engine.args.api_key", "pl01anted", "--api-key=pl02anted",
    "--hf-token", "pl03anted", "--wandb.key=pl04anted-1", "HF_TOKEN=pl05anted", "--index", "https://bob:pl06@nted@pypi.example/simple",
    "--engine.args", '{"admin_api_key": "pl07anted", "tp_size": 2}', "-H", "X-Api-Key: pl08anted", "-u", "bob:pl09anted",
    "--ssl-keyfile-password", "pl10anted two",
]  # fmt: skip
VARIABLES = {
    "SGLANG_DB_PASS": "pl11anted two", "NCCL_MYSQL_PWD": "pl12anted", "TORCH_HUB_CREDENTIALS": "pl13anted",
    "SGLANG_STORE": "https://s3.example/x?X-Amz-Signature=pl14anted&X-Amz-Security-Token=pl14anted", "SGLANG_HEADER": "Basic cGwxNWFudGVk==",
}  # fmt: skip
ARGUMENTS = {
    "api_key": "pl16anted", "hub": {"hf_token": "pl17anted", "token": "pl18anted0"}, "credentials": {"name": "pl19anted"},
    "json_model_override_args": '{"headers": {"Authorization": "Token pl20anted"}}', "extra": ["--password", "pl21anted"],
    "storage": "redis://:pl22anted@cache.example:6379/0",
}  # fmt: skip
ERROR = "\n".join(
    [
        "RuntimeError: 401 of https://blob.example/a?sv=2&sig=pl23anted for curl -H 'Authorization: Basic pl24anted' --token pl25anted",
        "Cookie: session=pl26anted; other=pl26anted",
        "environ({'DB_PASS': 'pl27anted', 'GITLAB_TOKEN': 'pl27anted'}), clientSecret: pl28anted, apiKey=pl28anted",
        "AIzaSyApl29antedpl29antedpl29antedpl29a ghp_pl29antedpl29antedpl29 xoxb-pl29anted-123456",
        "https://hooks.slack.com/services/T000/B000/pl30anted",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpl31anted/+\npl31anted=\n-----END RSA PRIVATE KEY-----",
        "WANDB_API_KEY=pl32anted glpat-pl32antedpl32anted eyJpl32antedpl.eyJpl32antedpl.pl32anted AKIAPL32ANTEDPL32ANT",
    ]
)
"""32 secrets, pl01 to pl32, by the ways in which users give them, and in which programs print them."""


def planted_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run directory with the files that a run which failed writes, by what writes them."""
    fake_run(folder)
    config = Config(engine=Engine(args=ARGUMENTS))
    write_config(folder, config, "cpu")
    monkeypatch.setattr(sys, "orig_argv", ["python", *COMMAND])
    rank = json.loads((folder / "environment.json").read_text())[0] | {
        "command": command(),
        "environment": behaviour(VARIABLES),
    }
    (folder / "environment.json").write_text(json.dumps([rank]))
    events = EventLog(folder / "events" / "rank0.jsonl", 0, "host0")
    events.fact("engine", version="0.5.23", device="cpu", preset="sglang", arguments=ARGUMENTS)
    events.say(ERROR)
    with suppress(RuntimeError), events.phase("sync"):
        raise RuntimeError(ERROR)
    monkeypatch.setattr(processes, "hard_exit", lambda code: None)
    monkeypatch.setattr(processes, "end_processes", lambda processes: None)
    told = list[str]()
    processes.end_failed(ERROR, ERROR, ERROR, lambda *said: told.extend(said))
    events.fail(*told)
    events.close()
    failure = Failure(
        kind="exception", time=0.0, host="host0", ranks=(0,), phase="sync", step=1, inside=True, error=told[0],
        traceback=tuple(told[1].split("\n")),
    )  # fmt: skip
    view = JobView(now=0.0, world_size=1, places={0: Place(9, "sync", 1, True)}, hosts={0: "host0"})
    verdict = RunVerdict("host0", folder, [failure], view)
    (tools := folder.with_name("tools")).mkdir()
    (tools / "shown").write_text(ERROR)
    (tools / "py-spy").write_text(f"#!/bin/sh\ncat {tools}/shown\n")
    (tools / "py-spy").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))  # beside which py-spy is looked for
    verdict.begin_to_collect({0: (os.getpid(), None)}, {}).result()
    verdict.keep()
    return folder


def test_no_file_of_a_run_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planted_run(tmp_path / "run", monkeypatch)
    write_reports(folder)
    (folder / "repro.py").write_text(render(read_subject([str(folder)])))
    text = {file.name: file.read_text() for file in folder.rglob("*") if file.is_file()}
    found = {name: sorted(set(re.findall(r"(?i)pl\d\d(?=an|@n)", each))) for name, each in text.items()}
    assert {name: secrets for name, secrets in found.items() if secrets} == {}
    for name in (
        "report.md",
        "report.html",
        "repro.py",
        "config.toml",
        "environment.json",
        "rank0.jsonl",
        "failure-host0.json",
        "stacks-host0-rank0.txt",
    ):
        assert "[redacted " in text[name], name
    compile(text["repro.py"], "repro.py", "exec")


def test_reports_of_a_run_whose_files_have_secrets_have_none(tmp_path: Path) -> None:
    """Earlier versions wrote such files."""
    folder = fake_run(tmp_path / "run", ranks=1)
    rank = json.loads((folder / "environment.json").read_text())[0]
    rank |= {"command": shlex.join(COMMAND), "environment": VARIABLES}
    (folder / "environment.json").write_text(json.dumps([rank]))
    (folder / "config.toml").write_text(to_toml(Config(engine=Engine(args=ARGUMENTS))))
    line = {"time": 0.0, "rank": 0, "host": "host0", "event": "failed", "error": ERROR, "traceback": ERROR}
    with (folder / "events" / "rank0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    made = [file.read_text() for file in write_reports(folder)[:2]] + [render(read_subject([str(folder)]))]
    for text in made:
        assert "[redacted " in text and not re.findall(r"(?i)pl\d\d(?=an|@n)", text)


def test_configs_and_reports_stay_readable(tmp_path: Path) -> None:
    """Nothing of the shipped configs and of a normal run is taken for a secret."""
    folder = fake_run(tmp_path / "run")
    files = [file for pattern in ("*.toml", "*.json", "*.txt") for file in (REPOSITORY / "configs").rglob(pattern)]
    for file in [*files, *write_reports(folder), *folder.rglob("*.json*")]:
        assert "[redacted " not in redact.text(file.read_text()), file
    assert redacted(Config()) == Config()


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


@pytest.mark.parametrize(
    "part", ["a", "a.", "x_", "secret", 'secret="', "eyJ-", "://a:", "@", "token ", "--token ", "-"]
)
def test_the_time_grows_with_the_length_alone(part: str) -> None:
    """A report redacts what an error quotes, and that may be one word of many kilobytes."""

    def seconds(length: int) -> float:
        started = time.process_time()
        redact.text((part * length)[:length])
        return time.process_time() - started

    assert min(seconds(160_000) for _ in range(3)) < 20 * max(seconds(20_000), 0.005)
