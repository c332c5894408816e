"""`hotexperts serve` as its users meet it: a process, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.conftest import Cli
from hotexperts.cli.serve import DEMO_NAME
from hotexperts.demo import demo_model_path

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

KEY = "sk-test"
NAME = "served"
PROMPT = "def read_file(path):"
NUM_NEW, CONTEXT, BODY_NBYTES, NUM_REQUESTS = 24, 200, 20_000, 3
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
NUM_LAYERS = 6


class Server(NamedTuple):
    url: str
    process: subprocess.Popen[str]
    folder: Path

    def client(self, api_key: str = KEY, **options: Any) -> Any:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60, **options
        )

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        """Without OpenAI's client: status, headers, JSON."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        return answer.status, dict(answer.getheaders()), found

    def num_calls(self) -> int:
        """Layer calls so far, by the metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.search(r'^hotexperts_calls_total\{rank="0"\} (\S+)$', text, flags=re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def num_calls_at_rest(self) -> int:
        """The same, once nothing is generated any more."""
        before, now = -1, self.num_calls()
        while now != before:
            time.sleep(0.3)
            before, now = now, self.num_calls()
        return now


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, ready, and its process."""
    command = [sys.executable, "-m", "hotexperts", "serve", *map(str, arguments)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            found = re.match(r"serving \S+ at (http://\S+)/v1 until Ctrl-C", line)
            if found is not None:
                break
        else:
            raise RuntimeError(process.stderr.read())
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model inside, which has no chat template, with one."""
    path = tmp_path_factory.mktemp("served")
    shutil.copytree(demo_model_path(), path, dirs_exist_ok=True)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    options = ("--device", "cpu", "--port", 0, "--expert-cache-size", 12, "--context", CONTEXT)
    limits = ("--max-requests", NUM_REQUESTS, "--max-body", f"{BODY_NBYTES}B")
    name = ("--served-model-name", NAME, "--engine", "transformers")
    with started(folder, *options, *limits, *name, HOTEXPERTS_API_KEY=KEY) as (url, process):
        yield Server(url, process, folder)
        assert process.poll() is None, "it is still there after everything below"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors.count("\n")) == (0, 1), errors  # the engine's note


@pytest.fixture(scope="module")
def said(folder: Path) -> Callable[..., str]:
    """What `hotexperts run` says to the same prompt."""
    found: dict[tuple[str, int, bool], str] = {}

    def ask(cli: Cli, prompt: str, num_new: int = NUM_NEW, *, chat: bool = False) -> str:
        key = (prompt, num_new, chat)
        if key not in found:
            options = ("--device", "cpu", "--expert-cache-size", 12, "--json")
            chosen = "--chat" if chat else "--no-chat"
            sizes = ("--max-new-tokens", num_new, "--prompt", prompt)
            found[key] = cli("run", folder, *options, chosen, *sizes).json["text"]
        return found[key]

    return ask


def greedy(num_new: int = NUM_NEW, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": num_new, "temperature": 0, **more}


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream)


def test_completions_say_what_run_says(server: Server, cli: Cli, said: Any) -> None:
    answer = server.client().completions.create(prompt=PROMPT, **greedy())
    expected = said(cli, PROMPT)
    assert "Return the file name" in expected
    assert answer.choices[0].text == expected
    assert (answer.model, answer.choices[0].finish_reason) == (NAME, "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 24, 31)


def test_chat_says_what_run_says(server: Server, cli: Cli, said: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Return the"}]}]
    create = server.client().chat.completions.create
    answer = create(messages=messages, **greedy())
    expected = said(cli, "Return the", chat=True)
    assert expected.strip()
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    chunks = list(create(messages=messages, stream=True, **greedy()))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage == answer.usage


def test_a_stream_comes_in_pieces_and_ends_with_the_mark(
    server: Server, cli: Cli, said: Any
) -> None:
    create = server.client().completions.create
    chunks = list(create(prompt=PROMPT, stream=True, **greedy()))
    assert len(chunks) > NUM_NEW / 2
    assert "".join(chunk.choices[0].text for chunk in chunks) == said(cli, PROMPT)
    assert chunks[-1].usage.completion_tokens == NUM_NEW
    body = json.dumps(greedy(2, prompt=PROMPT, stream=True)).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"}\n\ndata: [DONE]\n\n")


def test_the_example_of_the_documentation_works(
    server: Server, cli: Cli, said: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    told = {"http://127.0.0.1:8000": server.url, '"any"': repr(KEY), "hotexperts-demo": NAME}
    for shown, ours in told.items():
        assert shown in example
        example = example.replace(shown, ours)
    expected = said(cli, PROMPT)
    capfd.readouterr()
    exec(example, {})
    assert capfd.readouterr().out == expected


def test_streams_at_the_same_time_do_not_mix(server: Server, cli: Cli, said: Any) -> None:
    prompts = [PROMPT, "import os", "class Cache:"]
    client = server.client()

    def one(prompt: str) -> str:
        return text_of(client.completions.create(prompt=prompt, stream=True, **greedy()))

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        found = list(pool.map(one, prompts))
    assert found == [said(cli, prompt) for prompt in prompts]
    assert len(set(found)) == len(prompts)


def test_a_stop_text_ends_an_answer_and_is_not_shown(server: Server, cli: Cli, said: Any) -> None:
    expected, stop = said(cli, PROMPT).split("file name")[0], "file name"
    options = greedy(stop=[stop, "never said"])
    create = server.client().completions.create
    answer = create(prompt=PROMPT, **options)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    num_needed = answer.usage.completion_tokens
    assert num_needed < NUM_NEW
    just = create(prompt=PROMPT, **options | {"max_tokens": num_needed})
    assert (just.choices[0].text, just.choices[0].finish_reason) == (expected, "stop")
    chunks = list(create(prompt=PROMPT, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_what_a_temperature_draws(server: Server, cli: Cli, said: Any) -> None:
    def draw(seed: int | None) -> str:
        options = greedy() | {"temperature": 2.0, "seed": seed}
        return server.client().completions.create(prompt=PROMPT, **options).choices[0].text

    first = draw(3)
    assert draw(None) != first
    assert draw(3) == first
    assert draw(4) != first
    assert first != said(cli, PROMPT)


def test_one_request_too_many_is_told_to_come_again(server: Server, cli: Cli, said: Any) -> None:
    client = server.client()
    streams = [
        client.completions.create(prompt=PROMPT, stream=True, **greedy(180))
        for _ in range(NUM_REQUESTS)
    ]
    with pytest.raises(openai.RateLimitError, match="3 requests are being answered") as caught:
        client.completions.create(prompt=PROMPT, **greedy(1))
    assert caught.value.response.headers["retry-after"] == "1"
    assert server.ask("GET", "/health")[2] == {"status": "ok"}
    for stream in streams:
        stream.close()
    server.num_calls_at_rest()
    assert client.completions.create(prompt=PROMPT, **greedy()).choices[0].text == said(cli, PROMPT)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
def test_nothing_is_generated_for_a_client_that_is_gone(
    is_stream: bool, server: Server, cli: Cli, said: Any
) -> None:
    before = server.num_calls_at_rest()
    create, num_new = server.client().completions.create, CONTEXT - 20
    if is_stream:
        with create(prompt=PROMPT, stream=True, **greedy(num_new)) as stream:
            next(iter(stream))
    else:
        with pytest.raises(openai.APITimeoutError):
            create(prompt=PROMPT, **greedy(num_new) | {"timeout": 0.3})
    num_calls = server.num_calls_at_rest() - before
    assert 0 < num_calls < num_new * NUM_LAYERS
    assert create(prompt=PROMPT, **greedy()).choices[0].text == said(cli, PROMPT)


def test_the_context_is_a_limit(server: Server) -> None:
    create = server.client().completions.create
    with pytest.raises(openai.BadRequestError, match="more than the context of 200") as caught:
        create(prompt="x " * 2000, **greedy())
    assert caught.value.code == "context_length_exceeded"
    text = PROMPT * 25
    num_prompt = create(prompt=text, **greedy(1)).usage.prompt_tokens
    room = CONTEXT - num_prompt
    assert 0 < room < 40, "a short answer fills the context"
    message = f"{num_prompt} tokens of prompt and {room + 1} new ones"
    with pytest.raises(openai.BadRequestError, match=message):
        create(prompt=text, stream=True, **greedy(room + 1))
    assert create(prompt=text, **greedy(room)).usage.total_tokens == CONTEXT
    assert create(prompt=PROMPT, model=NAME, temperature=0).usage.completion_tokens == 16
    messages = [{"role": "user", "content": text}]
    answer = server.client().chat.completions.create(messages=messages, model=NAME, temperature=0)
    assert answer.usage.total_tokens == CONTEXT or answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["gpt-4", "/etc/passwd", "org/model", "../x", f"{NAME}@main"])
def test_another_model_is_not_looked_for(name: str, server: Server) -> None:
    client = server.client()
    for call in (
        lambda: client.completions.create(prompt=PROMPT, **greedy() | {"model": name}),
        lambda: client.models.retrieve(name),
    ):
        with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
            call()
        assert caught.value.code == "model_not_found"


def test_the_served_model_is_listed(server: Server) -> None:
    (listed,) = server.client().models.list().data
    assert (listed.id, listed.object) == (NAME, "model")
    assert server.client().models.retrieve(NAME) == listed


@pytest.mark.parametrize("key", ["", "sk-tes", "sk-test2"])
def test_without_the_key_nothing_is_answered(key: str, server: Server) -> None:
    status, _, found = server.ask("GET", "/v1/models", Authorization=f"Bearer {key}")
    assert (status, found["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
        server.client(api_key=key or "x").completions.create(prompt=PROMPT, **greedy())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is no JSON (Expecting property name"),
        (b"[1]", "the body is no JSON object"),
        (b'{"model": NaN}', "NaN is not JSON"),
        (b"[" * 19_000, "the body is no JSON"),
        (b'{"model": "served", "prompt": "\\ud800"}', "half a character"),
        (b'{"model": "served"}', "prompt must be one text"),
        (b"\xff", "the body is no JSON"),
    ],
)
def test_bad_bodies_are_refused(body: bytes, message: str, server: Server) -> None:
    status, _, found = server.ask("POST", "/v1/completions", body)
    assert status == 400
    assert message in found["error"]["message"]
    assert found["error"]["type"] == "invalid_request_error"


def test_a_large_body_is_refused_and_said_so(server: Server) -> None:
    with pytest.raises(openai.APIStatusError, match="more than 20000 bytes") as caught:
        server.client().completions.create(prompt="x" * 200_000, **greedy())
    assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/load_model", {}, 404),
        ("POST", "/reset", {}, 404),
        ("POST", "/v1/responses", {}, 404),
        ("GET", "/docs", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/models", {}, 405),
        ("POST", "/v1/completions", {"Content_Type": "text/plain"}, 415),
    ],
)
def test_nothing_else_is_reached(
    method: str, path: str, headers: dict[str, str], status: int, server: Server
) -> None:
    found = server.ask(method, path, b"{}" if method == "POST" else None, **headers)
    assert found[0] == status
    assert set(found[2]["error"]) == {"message", "type", "param", "code"}


def test_an_end_lets_answers_finish_and_saves_the_state(tmp_path: Path, cli: Cli) -> None:
    """The model inside, with no chat template, by its default name and without a key."""
    state = tmp_path / "state"
    options = ("--device", "cpu", "--port", 0, "--expert-cache-size", 12)
    with started(*options, "--expert-cache-state", state) as (url, process):
        server = Server(url, process, tmp_path)
        assert server.ask("GET", "/health")[0] == 200
        assert server.ask("GET", "/health", Host="evil.example")[0] == 403
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        stream = client.completions.create(
            model=DEMO_NAME, prompt=PROMPT, max_tokens=60, temperature=0, stream=True
        )
        first = next(iter(stream)).choices[0].text
        with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
            client.chat.completions.create(
                model=DEMO_NAME, messages=[{"role": "user", "content": "x"}]
            )
        process.send_signal(signal.SIGTERM)
        found = first + text_of(stream)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert f"saved for the next start: {state}" in errors
    assert state.stat().st_size > 0
    run = ("run", *options[:2], "--expert-cache-size", 12, "--json", "--prompt", PROMPT)
    assert found == cli(*run, "--max-new-tokens", 60).json["text"]


def test_a_second_signal_ends_answers_at_once(folder: Path) -> None:
    options = ("--device", "cpu", "--port", 0, "--expert-cache-size", 12)
    with started(folder, *options, "--served-model-name", NAME) as (url, process):
        create = openai.OpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0
        ).completions.create
        stream = iter(create(prompt="import os", stream=True, **greedy(1000)))
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(create, prompt="import os", **greedy(1000))
            time.sleep(0.5)
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            with pytest.raises(openai.InternalServerError, match="the server is ending") as caught:
                whole.result(timeout=30)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIConnectionError):
            list(stream)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors


RECORDER = """
import json, os, sys
if __name__ == "__main__":
    print(json.dumps([sys.argv[1:], os.environ.get("VLLM_API_KEY")]))
"""


@pytest.fixture
def vllm(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `hotexperts serve` beside a vLLM that says what it was called with."""
    module = tmp_path / "vllm/entrypoints/cli/main.py"
    module.parent.mkdir(parents=True)
    module.write_text(RECORDER)
    info = tmp_path / "vllm-0.26.0.dist-info/METADATA"
    info.parent.mkdir()
    info.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def call(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hotexperts", "serve", *map(str, arguments)]
        variables = os.environ | {"PYTHONPATH": paths} | environment
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    return call


def test_where_vllm_is_installed_it_serves(vllm: Any, tmp_path: Path) -> None:
    done = vllm("org/model")
    found, key = json.loads(done.stdout)
    expected = ["serve", "org/model", "--host", "127.0.0.1", "--port", "8000", "--dtype", "auto"]
    expected += ["--moe-expert-cache-size", "auto", "--moe-expert-cache-policy", "adv"]
    assert (done.returncode, found, key) == (0, expected, None)
    assert done.stderr.splitlines() == [
        "note: engine vllm: vLLM 0.26.0 is installed",
        f"note: vllm {' '.join(expected)}",
    ]
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    options = ("--host", "0.0.0.0", "--port", 9000, "--served-model-name", "name")
    options += ("--chat-template", template, "--dtype", "bfloat16", "--context", 512)
    options += ("--expert-cache-gib", 6.5, "--policy", "lru", "--no-host-memory-check")
    options += ("--expert-cache-state", tmp_path / "state", "--trust-remote-code")
    options += ("--expert-packing", "packed12", "--expert-store", "ram")  # the latter as ever
    options += ("--prefetch", "router")
    passed = ("--max-num-seqs", "8", "--", "x")
    done = vllm("org/model", *options, "--", *passed, HOTEXPERTS_API_KEY="secret")
    found, key = json.loads(done.stdout)
    expected = ["serve", "org/model", "--host", "0.0.0.0", "--port", "9000"]
    expected += ["--served-model-name", "name", "--chat-template", str(template)]
    expected += ["--dtype", "bfloat16", "--max-model-len", "512", "--trust-remote-code"]
    expected += ["--moe-expert-cache-gib", "6.5", "--moe-expert-cache-policy", "lru"]
    more = {"state": str(tmp_path / "state"), "packing": "packed12", "prefetch": "router"}
    more |= {"check_host_memory": False}
    expected += ["--moe-expert-cache-options", json.dumps(more), *passed]
    assert (done.returncode, found, key) == (0, expected, "secret")
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("m.gguf",), "m.gguf: vLLM with hotexperts reads no GGUF: take --engine transformers"),
        (("m", "--device", "cuda:1"), "--device cannot be had with vLLM: leave it out, or take"),
        (("m", "--expert-dtype", "int8"), "--expert-dtype cannot be had with vLLM: leave it out"),
        (("m", "--max-body", "1MiB", "--cache-mode", "host"), "--cache-mode, --max-body cannot"),
        (
            ("m", "--max-requests", 16, "--expert-store", "file"),
            "--expert-store, --max-requests ca",
        ),
        (("m", "--", "--host=0.0.0.0"), "--host after '--': hotexperts gives that to vLLM itself"),
        (("m", "--", "--api_key", "x"), "--api-key after '--'"),
        (("m", "--host", "0.0.0.0"), "can be reached from other machines: give --api-key"),
        (("m", "--engine", "transformers", "--", "--x"), "--x after '--' is for vLLM, and"),
    ],
)
def test_what_vllm_cannot_take_is_refused(
    arguments: tuple[str, ...], message: str, vllm: Any
) -> None:
    done = vllm(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


def test_the_model_inside_and_a_wish_decide(vllm: Any) -> None:
    """What runs then is seen by what it refuses."""
    for arguments in ((), ("m", "--engine", "transformers")):
        done = vllm(*arguments, "--max-body", "0B")
        assert "note: engine transformers: " in done.stderr
        assert "error: --max-body: size '0B' is less than a byte" in done.stderr
    assert json.loads(vllm("--engine", "vllm").stdout)[0][1] == str(demo_model_path())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 can be reached from other machines"),
        (("--api-key", "a b"), "--api-key: give 1 to 512 visible ASCII characters"),
        (("--max-body", "many"), "--max-body: size 'many' is not a number with a unit"),
        (("--engine", "vllm"), "--engine vllm: vLLM is not installed"),
        (
            ("--chat-template", "no/such"),
            "--chat-template no/such cannot be read (No such file or directory): give a file",
        ),
        (("--policy", "best"), "best"),
        (("--prefetch", "all"), "prefetch is 'all': use 'off', 'router' or 'lift'"),
        (("--prefetch", "router", "--engine", "transformers"), "use prefetch 'off'"),
        (("--served-model-name", " "), "--served-model-name is empty"),
        (("no/such/model", "--engine", "transformers"), "no/such/model"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: tuple[str, ...], message: str, cli: Cli
) -> None:
    result = cli("serve", "--device", "cpu", *arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err.splitlines()[-1]


def test_a_template_that_is_none_is_refused_at_the_start(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("fine so far\n{% for")
    result = cli("serve", "--device", "cpu", "--port", 0, "--chat-template", path)
    assert (result.status, result.out) == (2, "")
    assert "error: --chat-template, line 2: " in result.err
