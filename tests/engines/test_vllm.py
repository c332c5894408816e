"""Stock vLLM with the plug-in installed: cached equals uncached, flags, refusals, a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotexperts.errors import ConfigError, UnsupportedOperationError
from hotexperts.simulate import read_trace

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM warns a lot
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "seed": 0,
    "enable_prefix_caching": False,
}
PROMPTS = [[5, 9, 17, 33, 65], list(range(3, 103))]
Checkpoint = Callable[[str], Path]


def generate(path: Path, temperature: float, **options: Any) -> tuple[list[Any], Any]:
    """Tokens of two prompts, 16 each, and the layers' counters where there is a cache."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(path), **OPTIONS | options)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    params = SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True, seed=1)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], stats_of(llm)


def stats_of(llm: Any) -> dict[str, dict[str, int]] | None:
    """Counters of this engine alone: one of an earlier test may still be in the process."""
    from hotexperts.integrations.vllm import hooks

    ours = llm.llm_engine.vllm_config.instance_id
    found = [c.stats() for c in hooks.models() if c.config.instance_id == ours]
    if found:
        assert found[0] in llm.collective_rpc("expert_cache_stats")[0]
    return found[0] if found else None


@pytest.mark.parametrize("name", ["qwen3", "olmoe"])
def test_one_wave_gives_the_uncached_tokens(name: str, checkpoint: Checkpoint) -> None:
    """With a slot for every expert nothing is summed apart; vLLM's CPU kernel adds up a token's
    experts in the order of their slots, so the last bit may differ, and greedy does not see it."""
    expected, nothing = generate(checkpoint(name), 0.0)
    found, stats = generate(checkpoint(name), 0.0, moe_expert_cache_size=16)
    assert nothing is None
    assert found == expected
    assert len(stats) == 4
    assert all(layer["misses"] > 0 and layer["evictions"] == 0 for layer in stats.values())


def test_waves_give_the_uncached_tokens(checkpoint: Checkpoint) -> None:
    """Greedy on trained weights, down to one slot; warm-up left nothing in the counters."""
    expected, _ = generate(checkpoint("demo"), 0.0)
    for size, policy in ((12, "adv"), (4, "lru"), (1, "lru")):
        options = {
            "moe_expert_cache_size": size,
            "moe_expert_cache_policy": policy,
            "moe_expert_cache_options": {"self_test": True},
        }
        found, stats = generate(checkpoint("demo"), 0.0, **options)
        assert found == expected
        layer = stats["model.layers.5.mlp.experts"]
        assert layer["calls"] <= 2 + 16
        assert layer["bypasses"] > 0
        assert layer["waves"] > layer["calls"]


def test_what_cannot_work_is_refused_before_weights_load(checkpoint: Checkpoint) -> None:
    from vllm import LLM

    for options, error, message in (
        ({"moe_expert_cache_size": 0}, ConfigError, "--moe-expert-cache-size: .*at least 1"),
        ({"moe_expert_cache_size": 17}, ConfigError, "only 16 experts here: give at most 16"),
        (
            {"moe_expert_cache_size": 4, "moe_expert_cache_policy": "best"},
            ConfigError,
            "--moe-expert-cache-policy.*best",
        ),
        (
            {"moe_expert_cache_size": 4, "enable_lora": True},
            UnsupportedOperationError,
            "--enable-lora does not work",
        ),
    ):
        with pytest.raises(error, match=message):
            LLM(str(checkpoint("qwen3")), **OPTIONS | options)


def test_the_hooked_names_are_there() -> None:
    """What the plug-in relies on in the installed vLLM, module by module."""
    import importlib

    from hotexperts.integrations.vllm.compat import HOOKED, check_names

    for name in HOOKED:
        check_names(importlib.import_module(name))


VLLM_SERVE = (str(Path(sys.executable).parent / "vllm"), "serve")
HOTEXPERTS_SERVE = (sys.executable, "-m", "hotexperts", "serve")


def terminate(server: subprocess.Popen[bytes]) -> None:
    server.terminate()


def press_ctrl_c(server: subprocess.Popen[bytes]) -> None:
    """A terminal sends it to all processes, and the server sends its engine SIGTERM besides."""
    os.killpg(server.pid, signal.SIGINT)


def kill_all(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, signal.SIGKILL)


@contextmanager
def serving(
    command: Sequence[str], end: Callable[[Any], None] = terminate, **variables: str
) -> Iterator[str]:
    """The address of a server, ready."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **variables}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    url = "http://127.0.0.1:8642"
    try:
        for _ in range(240):
            if server.poll() is not None:
                raise RuntimeError(f"vllm serve ended with status {server.returncode}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        end(server)
        server.wait(30)


def complete(url: str, path: Path, key: str = "none") -> list[str]:
    body = {"model": str(path), "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["logprobs"]["tokens"]


ON_CPU = ("--port", "8642", "--dtype", "bfloat16", "--max-model-len", "256", "--enforce-eager")


def options_of(files: dict[str, str]) -> tuple[str, str]:
    return "--moe-expert-cache-options", json.dumps(files)


def run_in_shell(line: str, documented_url: str, url: str) -> str:
    assert documented_url in line
    line = line.replace(documented_url, url)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def misses_from(state: str, path: Path) -> int:
    """Of the first prompt, in an engine that starts from a server's state."""
    from vllm import LLM, SamplingParams

    assert Path(state).is_file()
    options = {"moe_expert_cache_size": 16, "moe_expert_cache_options": {"state": state}}
    llm = LLM(str(path), **OPTIONS | options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    return sum(layer["misses"] for layer in (stats_of(llm) or {}).values())


def documented() -> tuple[str, list[str]]:
    """The command that README.md and docs/vllm.md give for a server, and what they ask it."""
    root = Path(__file__).parents[2]
    found = [
        re.findall(r"```\n(vllm serve MODEL --moe-expert-cache-size \d+)\n(curl.*?)```", text, re.S)
        for text in ((root / name).read_text() for name in ("README.md", "docs/vllm.md"))
    ]
    assert found[0] == found[1]
    ((serve, asked),) = found[0]
    return serve, asked.replace("\\\n", "").splitlines()


def test_a_server_answers_over_http(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Engine and server are processes of their own; the flag reaches them all, and the engine's
    counters come back in the server's metrics. It leaves a trace and a state. The commands are
    those of the documents, with a model, a port and what a CPU needs."""
    path = checkpoint("qwen3")
    files = {"trace": str(tmp_path / "routing.npz"), "state": str(tmp_path / "state")}
    serve, asked = documented()
    command = shlex.split(serve.replace("MODEL", str(path)))
    with serving((VLLM_SERVE[0], *command[1:], *ON_CPU, *options_of(files))) as url:
        found = complete(url, path)
        time.sleep(1.1)  # counters are published once a second
        complete(url, path)
        completion, metrics = (
            run_in_shell(line.replace("MODEL", str(path)), "http://localhost:8000", url)
            for line in asked
        )
    usage = json.loads(completion)["usage"]
    lines = metrics.splitlines()
    counters = dict(line.rsplit(" ", 1) for line in lines if line.startswith("hotexperts_"))
    assert float(counters['hotexperts_misses_total{rank="0"}']) > 0
    assert float(counters['hotexperts_hits_total{rank="0"}']) > 0
    assert float(counters['hotexperts_evictions_total{rank="0"}']) == 0
    expected, _ = generate(path, 0.0)
    assert [int(token.removeprefix("t")) for token in found] == list(expected[0][:12])
    trace = read_trace(files["trace"])
    phases = [0] * len(PROMPTS[0]) + [1] * 11  # the twelfth token is not fed
    for seq in (0, 1):
        assert trace.phase[trace.seq == seq].tolist() == phases
    asked_for = [0] * usage["prompt_tokens"] + [1] * (usage["completion_tokens"] - 1)
    assert trace.phase[trace.seq == 2].tolist()[: len(asked_for)] == asked_for
    assert misses_from(files["state"], path) == 0


@pytest.mark.parametrize("end", [press_ctrl_c, kill_all])
def test_what_a_server_leaves_however_it_ends(
    end: Callable[[Any], None], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Killed, it leaves what it had saved after the first step at least, and whole files."""
    path = checkpoint("qwen3")
    files = {"trace": str(tmp_path / "routing.npz"), "state": str(tmp_path / "state")}
    command = (*VLLM_SERVE, str(path), "--moe-expert-cache-size", "16")
    with serving((*command, *ON_CPU, *options_of(files)), end) as url:
        complete(url, path)
        time.sleep(1)  # for the thread that writes
    trace = read_trace(files["trace"])
    num_prompt = len(PROMPTS[0])
    if end is press_ctrl_c:
        assert trace.phase.tolist() == [0] * num_prompt + [1] * 11
    assert trace.phase[:num_prompt].tolist() == [0] * num_prompt
    assert misses_from(files["state"], path) == 0 or end is kill_all
    leftovers = {file.name for file in tmp_path.iterdir()} - {"routing.npz", "state"}
    assert not leftovers


def test_hotexperts_serve_is_vllm_s_server(checkpoint: Checkpoint) -> None:
    """Its options reach vLLM and the plug-in, and what comes after `--` as well."""
    path = checkpoint("qwen3")
    options = ("--port", "8642", "--dtype", "bfloat16", "--context", "256")
    command = (*HOTEXPERTS_SERVE, str(path), *options, "--expert-cache-size", "16")
    with serving((*command, "--", "--enforce-eager"), HOTEXPERTS_API_KEY="key") as url:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            complete(url, path)
        found = complete(url, path, "key")
        time.sleep(1.1)  # counters are published once a second
        complete(url, path, "key")
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert 'hotexperts_misses_total{rank="0"}' in text
    expected, _ = generate(path, 0.0)
    assert [int(token.removeprefix("t")) for token in found] == list(expected[0][:12])


def test_help_shows_the_flags() -> None:
    vllm = Path(sys.executable).parent / "vllm"
    command = [str(vllm), "serve", "--help=hotexperts"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("size", "gib", "policy", "options"):
        assert f"--moe-expert-cache-{name}" in found


def test_a_restart_is_warm(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the first engine had in its slots the second has before its first request."""
    from vllm import LLM, SamplingParams

    state = str(tmp_path / "state")
    options = {"moe_expert_cache_size": 16, "moe_expert_cache_options": {"state": state}}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def run() -> tuple[list[int], int]:
        llm = LLM(str(checkpoint("qwen3")), **OPTIONS | options)
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
        stats = stats_of(llm)
        assert stats is not None
        assert state in llm.collective_rpc("save_expert_cache_state")[0]
        misses = sum(layer["misses"] for layer in stats.values())
        return list(outputs[0].outputs[0].token_ids), misses

    (cold_tokens, cold_misses), (warm_tokens, warm_misses) = run(), run()
    assert warm_tokens == cold_tokens
    assert cold_misses > 0
    assert warm_misses == 0
    assert len(json.loads(Path(state).read_text())["model"]) == 16, "which model it is of"
