"""What README.md and docs/benchmarks.md say in numbers, and what holds it."""

from __future__ import annotations

from claim import Claim, Value, all_experts_nbytes, expert_nbytes, field, short_version

TABLES = {
    "cards": "vllm-promise",
    "memory": "vllm-promise",
    "speed": "vllm-promise",
    "prompt": "vllm-promise",
    "decode": "core-decode",
    "device": "device-decode",
    "prefill": "device-prefill",
    "vllm": "vllm-decode",
    "eager": "vllm-decode-plain",
    "load": "core-load",
    "disk": "tiers-disk",
    "plan": "device-plan",
    "copies": "device-plan",
    "bytes": "missed-bytes",
    "replay": "simulate-speed",
    "recording": "trace-recording",
}
_LINK = "cases/whole/link_gb_s"
_RUNS = "cases/{}/runs/{}, batch 1/ms"
CLAIMS = (
    Claim(
        "shape whole, {} layers of {} experts, {} GB of experts in host memory, in stock vLLM {}",
        "vllm-promise",
        (
            field("shape/num_hidden_layers"),
            field("shape/num_experts"),
            Value("that of all experts", lambda d: all_experts_nbytes(d) / 1e9, "{:.0f}"),
            field("machine/versions/vllm"),
        ),
    ),
    Claim("the KV cache has {} MiB", "vllm-promise", (field("kv_bytes", "{:.0f}", 2**-20),)),
    Claim("{} GB/s is what that machine has", "vllm-promise", (field(_LINK, "{:.0f}"),)),
    Claim(
        "Loading took {} s and {} GB of host memory",
        "vllm-promise",
        (
            field("cases/whole/load_seconds", "{:.0f}"),
            field("cases/whole/host_bytes/VmRSS", "{:.0f}", 1e-9),
        ),
    ),
    Claim(
        "at most {} GB of the GPU's were allocated meanwhile",
        "vllm-promise",
        (field("cases/whole/load_peak_gpu_gb", "{:.1f}"),),
    ),
    Claim(
        "Qwen3-30B-A3B, all {} layers, in vLLM {}",
        "vllm-promise",
        (field("shape/num_hidden_layers"), field("machine/versions/vllm")),
    ),
    Claim(
        "The KV cache has {} MiB, prompts come in pieces of {} tokens",
        "vllm-promise",
        (field("kv_bytes", "{:.0f}", 2**-20), field("chunk_tokens")),
    ),
    Claim(
        "at {} tokens/s this way",
        "device-decode",
        (field("cases/device-6GiB-adv/tokens_per_s", "{:.0f}"),),
    ),
    Claim(
        "at {} with experts packed on the way (the default) and at {} with prefetch",
        "device-decode",
        (
            field("cases/device-6GiB-adv-packed12/tokens_per_s", "{:.0f}"),
            field("cases/device-6GiB-adv-packed12-prefetch/tokens_per_s", "{:.0f}"),
        ),
    ),
    Claim(
        '`device_map="auto"` gives {}',
        "device-decode",
        (field("cases/auto-6GiB/tokens_per_s/median", "{:.2f}"),),
    ),
    Claim("vLLM on {} layers", "vllm-decode", (field("shape/num_hidden_layers"),)),
    Claim("in vLLM {}, random weights", "vllm-decode", (field("machine/versions/vllm"),)),
    Claim(
        "takes {} ms a token, where its own offload takes {}",
        "vllm-decode",
        (
            field(_RUNS.format("cache", "32 slots"), "{:.1f}"),
            field(_RUNS.format("uva", "uva"), "{:.1f}"),
        ),
    ),
    Claim(
        "PyTorch {} and Transformers {}. Its routers",
        "core-decode",
        (short_version("torch"), short_version("transformers")),
    ),
    Claim("over {} steps only", "core-decode", (field("cases/auto-4GiB/num_steps"),)),
    Claim(
        "With {} slots, {} experts of each layer stream over the link, {} GB in all",
        "device-prefill",
        (
            field("cases/quarter-adv/capacity"),
            Value(
                "shape/num_experts less cases/quarter-adv/capacity",
                lambda d: d["shape"]["num_experts"] - d["cases"]["quarter-adv"]["capacity"],
            ),
            field("cases/quarter-adv/prefill/512/missed_bytes", "{:.1f}", 1e-9),
        ),
    ),
    Claim(
        "misses {} % more experts",
        "device-prefill",
        (field("cases/quarter-adv/interleaved/more", "{:.1f}", 100),),
    ),
    Claim(
        "{} of the 48 layers of Qwen3-30B-A3B's shape ({} experts of {} MB a layer, {} GB in all, "
        "{} a token)",
        "vllm-decode",
        (
            field("shape/num_hidden_layers"),
            field("shape/num_experts"),
            Value(
                "shape: 3 x 2 bytes x hidden_size x moe_intermediate_size",
                lambda d: expert_nbytes(d) / 1e6,
                "{:.1f}",
            ),
            Value("that of all experts", lambda d: all_experts_nbytes(d) / 1e9, "{:.0f}"),
            field("shape/num_experts_per_tok"),
        ),
    ),
    Claim(
        "Loading a {} GB bf16 checkpoint on two CPU cores, PyTorch {} and Transformers {}",
        "core-load",
        (
            field("checkpoint_bytes", "{:.2f}", 1e-9),
            short_version("torch"),
            short_version("transformers"),
        ),
    ),
)
STATED = {  # no result holds these; where they come from instead
    "on one H200, where PyTorch": "the machine of `vllm-promise.json`",
    "over 26 GB/s (about a PCIe 4.0 x16 slot) or 12 GB/s (3.0 x16, or 4.0 x8)": (
        "stated, not measured: `LINKS_GB_S` in `bench/vllm_promise.py`"
    ),
    "missed up to 2.5 times as much": "`docs/decisions/0013-forecasts-are-ranges.md`",
    "[decision 13]": "a name",
    "on one H200 (`bench/vllm_promise.py`)": "the machine of `vllm-promise.json`",
    "a prompt of 2000 tokens": "`PREFILL_TOKENS` in `bench/vllm_decode.py`",
    "([R1]": "a name",
    "One H200 limited to 6 GiB": "the budget asked for; `device-decode.json` names its rows by it",
    "Python 3.10 to 3.13": "`pyproject.toml`",
    "12 of its 32 experts": "the command below it, and the model's `config.json`",
    "1.2 GB of disk": "no result; it moves with PyTorch's build",
    "at most 6 GiB of GPU memory": "the command below it",
    "0.9 of the free memory": "`AUTO_SHARE` in `integrations/transformers/build.py`",
    "status is 0 when done, 1 when `verify` or `bench` found a difference or `doctor` something "
    "red, 2 for an error": "`cli/main.py`",
    "Transformers 5.17 and 5.24": "`hotexperts/known_versions.py`; tests run with both",
    "[29 model families]": "`tests/test_docs.py` counts them",
    "and Llama 4": "a name",
    "multiples of 4 bytes": "the kernel copies words of 32 bits",
    "0.26 on one GPU (bf16, fp8, int4, mxfp4), 0.32 on CPUs": "what was tried: `docs/vllm.md`",
    "at most 25 % outside of it": "`tools/check_plan.py` prints each; a test holds the limit",
    "element 0 of tensors": "PyTorch's words",
    "batch 1, one H200": "the machine of `core-decode.json`, and what `bench/core_decode.py` does",
    "507M-parameter model of 64 experts, 8 a token": "about the recording, which is not here",
    "At 4 GiB": "the budget of the rows below",
    "[decision 9]": "a name",
    "[decision 16]": "a name",
    "in 64 steps after such a prefill": "what `bench/device_prefill.py` does",
    "and 2000 tokens of prompt": "what `bench/vllm_decode.py` does",
}
