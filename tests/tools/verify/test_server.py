"""A running server is asked over real sockets; its answers are those that servers of SGLang gave (answers.json)."""

import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.config.layers import ConfigError
from harness.runtime.errors import UnsupportedEnvironment
from harness.tools.verify import command, http_api
from harness.tools.verify.http_api import Api, read_key
from harness.tools.verify.question import Options
from harness.tools.verify.server import Server, ask_server, generate
from harness.tools.verify.verdict import Answer

Answers = dict[str, Any]
RECORDED: Answers = json.loads((Path(__file__).parent / "answers.json").read_text())
INFO, GENERATED = RECORDED["/server_info"], RECORDED["/generate"]
ADAPTED = RECORDED["/v1/models with adapters"]
OF_TWO, WITH_DRAFT = (RECORDED[f"/weights_checker of 0.5.23{what}"] for what in ("", " with a draft model"))
OLD, OF_0_5_17 = (RECORDED[f"/weights_checker of {release}"] for release in ("0.5.12", "0.5.17"))
UPDATED = OF_TWO | {"ranks": [OF_TWO["ranks"][0] | {"checksums": {"a": "0" * 16}}, OF_TWO["ranks"][1]]}
MODEL = {"weight_version": "default", "architectures": ["Qwen2ForCausalLM"]}
ADMIN = "the-admin-key"


def write_model(folder: Path, **sizes: int) -> Path:
    """Write a folder with a config.json and one tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **sizes}))
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@contextmanager
def serving(answer: Callable[[str, dict[str, Any], str], tuple[int, Any]]) -> Iterator[str]:
    """Serve answer(path, body, key) -> (status, JSON value or bytes); yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            key = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, value = answer(self.path, body, key)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def with_answers(answers: Answers, seen: list[tuple[str, dict[str, Any]]] | None = None) -> Any:
    """Serve these values by path; those that are (status, value) with another status than 200, 404 for the rest."""

    def answer(path: str, body: dict[str, Any], _: str) -> tuple[int, Any]:
        if seen is not None:
            seen.append((path, body))
        given = answers.get(path, (404, {"detail": "Not Found"}))
        return given if isinstance(given, tuple) else (200, given)

    return serving(answer)


def a_server(checker: Any, info: Any = INFO) -> Any:
    return with_answers({"/server_info": info, "/model_info": MODEL, "/weights_checker": checker})


def test_a_server_tells_its_arguments_and_each_rank_once_and_only_what_changes_nothing_is_asked_twice() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    answers = {"/server_info": INFO | {"api_key": "hunter2"}, "/model_info": MODEL, "/weights_checker": OF_TWO}
    with with_answers(answers, seen) as url:
        server = ask_server(f"{url}/")
    assert (server.url, server.release, server.on_gpu, server.weight_version) == (url, "0.5.23", False, "default")
    assert server.architectures == ("Qwen2ForCausalLM",)
    assert server.arguments["tp_size"] == 2 and server.arguments["api_key"] != "hunter2"
    assert [(each.role, each.rank, each.tp_rank) for each in server.ranks] == [("target", 0, 0), ("target", 1, 1)]
    assert server.ranks[1].checksums == OF_TWO["ranks"][1]["checksums"] and server.missing == ()
    assert [body for path, body in seen if path == "/weights_checker"] == [{"action": "checksum"}] * 2
    assert {path for path, _ in seen} == {"/server_info", "/model_info", "/v1/models", "/weights_checker"}


def answer_of(server: Server) -> Answer:
    """Return what is found where all is equal."""
    return Answer(
        server=server, weights="step0", predicted_with="0.5.23", ranks=2, equal=17, different=(), unpredicted={}, ignored=(),
        refused=(), part="", unseen=(), computed="", computed_wrong=False,
    )  # fmt: skip


NO_ADAPTERS = (
    {"data": ADAPTED["data"][:1]}, {"data": None}, {"data": ["first"]}, {"data": {"parent": "a"}}, [1], b"<html>",
    (404, {"detail": "Not Found"}),
)  # fmt: skip
"""What a server of SGLang tells without an adapter, and what others may."""


@pytest.mark.parametrize(
    ("models", "adapters"), [(ADAPTED, ("first", "second")), *((models, ()) for models in NO_ADAPTERS)]
)
def test_adapters_that_are_loaded_are_named_in_the_verdict_as_not_compared(
    models: Any, adapters: tuple[str, ...]
) -> None:
    """As a server of SGLang with one adapter from its start, and another loaded since, tells them."""
    answers = {"/server_info": INFO, "/model_info": MODEL, "/weights_checker": OF_TWO, "/v1/models": models}
    with with_answers(answers) as url:
        answer = answer_of(ask_server(url))
    said = "LoRA adapters are not compared, though they answer requests: first and second"
    assert answer.verdict().endswith(said if adapters else "on 2 of 2 ranks")
    assert answer.code == 0 and answer.table()["adapters"] == adapters


def test_another_size_of_the_same_architecture_is_another_model(tmp_path: Path) -> None:
    large = write_model(tmp_path / "large", hidden_size=128, num_hidden_layers=2)
    small = write_model(tmp_path / "small", hidden_size=64, num_hidden_layers=2)
    with a_server(OF_TWO, INFO | {"model_path": str(large)}) as url:
        server = ask_server(url)
    assert "hidden_size is 128 there and 64 here" in command.other_sizes(server, small)
    assert not command.other_sizes(server, large)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"ranks": "0,5"}, "tells nothing about rank 5; it tells about 0, 1"),
        ({"was": "small"}, "is --weights itself"),
        ({"was": "empty"}, "has safetensors without any tensor"),
    ],
)
def test_a_command_line_that_compares_nothing_is_refused(words: dict[str, str], said: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "small", hidden_size=64)
    (tmp_path / "empty").mkdir()
    save_file({}, tmp_path / "empty" / "model.safetensors")
    words = {name: str(tmp_path / value) if name == "was" else value for name, value in words.items()}
    with a_server(OF_TWO) as url, pytest.raises(ConfigError, match=re.escape(said)):
        command.run(Options(server=url, weights=str(folder), **words), [])


BOTH = [("target", 0), ("target", 1)]
DRAFT_BEFORE = WITH_DRAFT["ranks"][0] | {"parallelism_info": OF_0_5_17["ranks"][0]["parallelism_info"]}


@pytest.mark.parametrize(
    ("answer", "told", "missing"),
    [
        (WITH_DRAFT, [("target", 0), ("draft", 0)], None),
        (WITH_DRAFT | {"ranks": [DRAFT_BEFORE]}, [("target", 0), ("draft", 0)], None),  # in the older form
        (OF_TWO | {"ranks": OF_TWO["ranks"] * 2}, BOTH, ()),  # each attention rank tells about all
        (OLD, [("target", 0)], (1,)),  # 0.5.12 tells about its first rank alone
    ],
)
def test_each_model_of_each_rank_is_there_once(answer: Any, told: list[tuple[str, int]], missing: Any) -> None:
    with a_server(answer) as url:
        server = ask_server(url)
    assert [(each.role, each.rank) for each in server.ranks] == told and missing in (None, server.missing)
    assert not any(name.startswith("draft.") for each in server.ranks for name in each.checksums)
    assert "model.embed_tokens.weight" in server.ranks[0].checksums
    if told[-1][0] == "draft":
        assert "model.decoder.mlp.experts.w13_weight" in server.ranks[-1].checksums


@pytest.mark.parametrize("changing", ["/weights_checker", "/model_info", ""])
def test_a_server_that_is_updated_meanwhile_is_refused(changing: str) -> None:
    """It gives another answer the second time, or in one answer two that differ of one rank."""
    values = {"/weights_checker": [OF_TWO, UPDATED], "/model_info": [MODEL, {"weight_version": "8"}]}
    checker = OF_TWO if changing else OF_TWO | {"ranks": [*OF_TWO["ranks"], *UPDATED["ranks"]]}
    answers = {"/server_info": INFO, "/model_info": MODEL, "/weights_checker": checker, "/v1/models": {}}

    def answer(path: str, *_: Any) -> tuple[int, Any]:
        return 200, values[path].pop(0) if path == changing else answers[path]

    with serving(answer) as url, pytest.raises(UnsupportedEnvironment, match="updated meanwhile"):
        ask_server(url)


@pytest.mark.parametrize(
    ("checker", "said"),
    [
        ((404, {"detail": "Not Found"}), "has no /weights_checker: releases have it since 0.5.6"),
        ((400, {"success": False, "message": "Unsupported action='checksum'"}), "without checksums.*since 0.5.12"),
        ({"success": True, "message": "Success."}, "without checksums"),
        (
            (400, {"success": False, "message": "no\x1b[31m\nmemory"}),
            r"did not compute its checksums: no\\x1b\[31m memory",
        ),
        ((500, b"Internal Server Error"), "HTTP 500"),
        ({"success": True, "ranks": [{"checksums": {}}]}, "in a form that is not known"),
        ({"success": True, "ranks": [7]}, "in a form that is not known"),
        (
            OF_TWO | {"ranks": [OF_TWO["ranks"][0] | {"checksums": {"a\x1b[2J": "0" * 16}}]},
            "in a form that is not known",
        ),
    ],
)
def test_a_server_without_checksums_is_named_with_its_release(checker: Any, said: str) -> None:
    with a_server(checker) as url, pytest.raises(UnsupportedEnvironment, match=said) as error:
        ask_server(url)
    assert "sglang 0.5.23" in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("url", "said"),
    [(url, "is not the address of a server; give it as http://HOST:PORT") for url in ("", "localhost:30000", "ftp://a", "http://", "http://a:b", "http://a b", "http://a\n/")]
    + [("http://me:hunter2@host:1", "--api-key-file")],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_a_login_in_it_is_not_repeated(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        ask_server(url)
    assert "hunter2" not in str(error.value)


def test_nobody_there() -> None:
    with with_answers({}) as url:
        pass
    with pytest.raises(ConfigError, match=r"No server answers at .*Connection refused"):
        ask_server(url)


@pytest.mark.parametrize(
    ("info", "said"),
    [(info, "is not an SGLang server") for info in ((404, {"detail": "Not Found"}), {"hello": 1}, [1], b"<html>", b"[" * 100_000)]
    + [((307, {}), "redirects /server_info")],
)  # fmt: skip
def test_a_server_of_something_else_is_named_and_a_redirect_is_not_followed(info: Any, said: str) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    with with_answers({"/server_info": info}, seen) as url, pytest.raises(ConfigError, match=said):
        ask_server(url, "secret-key")
    assert {path for path, _ in seen} <= {"/server_info", "/get_server_info"}


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "LARGEST_ANSWER", 2**20)
    with a_server(b" " * 2**22) as url, pytest.raises(ConfigError, match="^http://[^ ]* sends more than 1 MiB"):
        ask_server(url)


def test_a_checker_and_a_paused_server_that_never_answer_are_given_up() -> None:
    over = threading.Event()

    def answer(path: str, *_: Any) -> tuple[int, Any]:
        if path in ("/weights_checker", "/generate"):
            over.wait(30)
        return 200, INFO if path == "/server_info" else MODEL

    began = time.monotonic()
    with serving(answer) as url:
        with pytest.raises(UnsupportedEnvironment, match="did not answer /weights_checker within 0.3 s"):
            ask_server(url, seconds=0.3)
        with pytest.raises(UnsupportedEnvironment, match="did not answer /generate within 0.3 s"):
            generate(url, "", [[1, 2]], 1, seconds=0.3)
        over.set()
    assert time.monotonic() - began < 20


def test_an_answer_that_comes_drop_by_drop_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    connection.sendall(b" ")
                    time.sleep(0.02)

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(UnsupportedEnvironment, match="did not answer /server_info within 0.3 s"):
            Api(f"http://127.0.0.1:{listening.getsockname()[1]}").ask("/server_info", 0.3)
        thread.join()


def keyed(path: str, _: dict[str, Any], key: str) -> tuple[int, Any]:
    """Answer as a server with --api-key the-key --admin-api-key the-admin-key does (srt/utils/auth.py)."""
    if key != (ADMIN if path == "/weights_checker" else "the-key"):
        return 401, {"error": "Unauthorized"}
    return 200, {"/server_info": INFO, "/model_info": MODEL, "/v1/models": {}, "/weights_checker": OF_TWO}[path]


def test_a_key_is_asked_for_and_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    with serving(keyed) as url:
        with pytest.raises(ConfigError, match="wants a key for /server_info.*--api-key-file FILE"):
            ask_server(url)
        file.write_text("the-key\n")
        with pytest.raises(ConfigError, match="does not take the key.*for /weights_checker.*--admin-api-key") as error:
            ask_server(url, read_key(str(file)))
        assert "the-key" not in str(error.value)
        file.write_text(f"the-key\n{ADMIN}\n")
        assert len(ask_server(url, read_key(str(file))).ranks) == 2


@pytest.mark.parametrize("content", [None, b"", b" \n", "caf\u00e9".encode(), b"a\x00b"])
def test_a_file_that_holds_no_key(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file"):
        read_key(str(file))


def test_proxies_are_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with a_server(OF_TWO) as url:
        assert ask_server(url).release == "0.5.23"


def test_the_proxy_of_the_environment_is_used_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with with_answers({"http://a-server.invalid:1/server_info": INFO}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.removeprefix("http://"))
        monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
        assert Api("http://a-server.invalid:1").ask("/server_info", 5).table == INFO
        monkeypatch.setenv("no_proxy", "a-server.invalid")
        with pytest.raises(ConfigError, match="No server answers"):
            Api("http://a-server.invalid:1").ask("/server_info", 5)


def test_prompts_are_scored_by_prefill_and_continued() -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    with with_answers({"/generate": GENERATED}, seen) as url:
        first, second = generate(url, "", [[5, 6, 7, 8], [9, 10]], new_tokens=1)
    assert (first.tokens, second.tokens) == ((5, 6, 7, 8, 68), (9, 10, 386))
    assert first.log_probs == pytest.approx((-6.8539, -7.7723, -6.1450, -4.5017), abs=1e-4)
    assert (seen[0][1]["logprob_start_len"], seen[0][1]["sampling_params"]["max_new_tokens"]) == (0, 1)


def test_log_probs_of_other_tokens_are_refused_and_nan_is_nan() -> None:
    said = {"input_token_logprobs": [[None, 5, None], [None, 6, None]], "output_token_logprobs": []}
    with with_answers({"/generate": [{"meta_info": said}]}) as url:
        assert math.isnan(generate(url, "", [[5, 6]], 1)[0].log_probs[0])
        for prompts in ([[5, 7]], [[5, 6, 7]], [[5, 6], [5, 6]]):
            with pytest.raises(UnsupportedEnvironment, match="did not answer the"):
                generate(url, "", prompts, 1)
    for answer in (
        [{}],
        [{"meta_info": said | {"output_token_logprobs": [[]]}}],
        (400, {"error": {"message": "long"}}),
    ):
        with (
            with_answers({"/generate": answer}) as url,
            pytest.raises(UnsupportedEnvironment, match="did not answer the"),
        ):
            generate(url, "", [[5, 6]], 1)
