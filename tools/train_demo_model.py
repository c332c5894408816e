"""Train, evaluate and describe the demonstration model: a small OLMoE.

The corpus comes from ``build_corpus.py``. Training is boxed by wall-clock time, so that the
learning rate follows the fraction of the time that has passed, not a number of steps.

Usage::

    python tools/train_demo_model.py --corpus .corpus --out demo_model --minutes 5

``--evaluate-only`` repeats everything after training on the model that ``--out`` already holds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, OlmoeConfig

from demo_model_card import NEW_TOKENS, TEMPERATURE, TOP_K, write_card

# The share of the training windows that each domain gives. Small domains get somewhat more than
# their share of the tokens, because prose is scarcer here than code.
MIXING = {
    "python_docs": 0.14,
    "postgresql_docs": 0.09,
    "sqlite_docs": 0.05,
    "rust_docs": 0.03,
    "django_docs": 0.05,
    "wordnet": 0.16,
    "python_stdlib": 0.26,
    "python_libraries": 0.22,
}
# Held-out loss in nats per token that the model is to stay under; fixed before training.
HELDOUT_BAR = {
    "python_docs": 2.60,
    "postgresql_docs": 2.50,
    "sqlite_docs": 2.60,
    "rust_docs": 3.00,
    "django_docs": 2.70,
    "wordnet": 3.30,
    "python_stdlib": 2.30,
    "python_libraries": 2.20,
}
PROMPTS = (
    "The SELECT statement is used to",
    "If the transaction is rolled back, the database",
    "This function returns a new list containing",
    "dog (noun):",
    "To create a new thread, call the",
    "def read_lines(path):\n    ",
    "import os\nimport sys\n\n",
    "class Stack:\n    def __init__(self):\n",
    "for key, value in",
    "    def test_empty(self):\n        self.assert",
)
ADAM_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
WARM_UP_FRACTION = 0.03
CLIP_NORM = 1.0
EVALUATION_WINDOWS = 32
REPORT_SECONDS = 5.0
HELDOUT_CHECKS = 10
BUSIEST_FRACTION = 8


def model_config() -> OlmoeConfig:
    """Return the architecture: 5.66 M parameters, of which a token uses about 1.5 M."""
    return OlmoeConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        num_experts=32,
        num_experts_per_tok=4,
        # Unnormalised, four of 32 weights start at a sum of 1/8, and the experts learn slowly.
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def load_tokens(corpus: Path, part: str) -> dict[str, np.ndarray]:
    """Load the token arrays of every domain.

    Args:
        corpus: Folder that ``build_corpus.py`` wrote.
        part: "train" or "heldout".

    Returns:
        An int16 array for each domain.
    """
    arrays = {}
    for domain in MIXING:
        with lzma.open(corpus / f"{part}_{domain}.npy.xz") as file:
            arrays[domain] = np.load(file).astype(np.int16)
    return arrays


class Sampler:
    """Draws random windows from all domains; the tokens stay on the device."""

    def __init__(self, arrays: dict[str, np.ndarray], device: str, seed: int) -> None:
        lengths = [len(arrays[domain]) for domain in MIXING]
        self.data = torch.from_numpy(np.concatenate([arrays[d] for d in MIXING])).to(device)
        self.lengths = torch.tensor(lengths, device=device)
        self.offsets = self.lengths.cumsum(0) - self.lengths
        self.weights = torch.tensor(list(MIXING.values()), device=device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, count: int, length: int) -> Tensor:
        """Return ``count`` windows of ``length`` + 1 tokens."""
        device = self.data.device
        domain = torch.multinomial(self.weights, count, True, generator=self.generator)
        place = torch.rand(count, device=device, generator=self.generator, dtype=torch.float64)
        start = self.offsets[domain] + (place * (self.lengths[domain] - length - 1)).long()
        return self.data[start[:, None] + torch.arange(length + 1, device=device)].long()


@contextmanager
def tap_routers(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect the router logits and the chosen experts of each layer of the next forward pass.

    Args:
        model: The model.

    Yields:
        A list that fills with (logits, expert indices), one entry a layer; clear it between passes.
    """
    taps: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: taps.append((out[0], out[2])))
        for layer in model.model.layers
    ]
    try:
        yield taps
    finally:
        for hook in hooks:
            hook.remove()


def balancing_loss(taps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the load-balancing loss, the mean over the layers.

    Transformers sums the layers' loads before it multiplies them, so that one layer's imbalance
    can hide another's; here every layer is balanced on its own. A balanced layer gives top-k.

    Args:
        taps: Router logits and chosen experts of each layer.
    """
    losses = []
    for logits, chosen in taps:
        probabilities = logits.float().softmax(-1)
        load = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0)
        losses.append(logits.shape[-1] * (load * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the cross entropy of every token but the first of each window, flattened."""
    hidden = model.model(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), windows[:, 1:].flatten(), reduction="none")


class MasterAdamW:
    """AdamW over float32 copies of bfloat16 parameters.

    The model computes with exactly the rounded weights that are released, while small updates
    still add up in the copies. Only the parameters are rounded: the rotary frequencies are
    buffers, which ``model.to(torch.bfloat16)`` would round as well.
    """

    def __init__(self, model: nn.Module, fused: bool) -> None:
        self.parameters = list(model.parameters())
        self.masters = [p.detach().clone().float() for p in self.parameters]
        embedding = model.get_input_embeddings().weight
        decayed, plain = [], []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            decays = parameter.ndim > 1 and parameter is not embedding
            (decayed if decays else plain).append(master)
            parameter.data = parameter.data.bfloat16()
        groups = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=ADAM_BETAS, fused=fused)

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        """Update from the parameters' gradients, then drop these; return the gradient norm."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        return norm


def learning_rate(peak: float, fraction: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to 1 % of the peak."""
    if fraction < WARM_UP_FRACTION:
        return peak * max(fraction / WARM_UP_FRACTION, 0.02)
    progress = min(1.0, (fraction - WARM_UP_FRACTION) / (1 - WARM_UP_FRACTION))
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """Train a model from scratch.

    Args:
        options: The command line.

    Returns:
        The model in bfloat16, and the training log.
    """
    torch.manual_seed(options.seed)
    sampler = Sampler(load_tokens(options.corpus, "train"), options.device, options.seed)
    heldout = load_tokens(options.corpus, "heldout")
    model = AutoModelForCausalLM.from_config(
        model_config(),
        dtype=torch.float32,
        experts_implementation=options.experts_implementation,
    ).to(options.device)
    optimizer = MasterAdamW(model, fused=options.device == "cuda")
    model.train()
    print(f"{model.num_parameters()} parameters, {len(sampler.data)} tokens", flush=True)
    log = _training_log(options, model, sampler)
    with tap_routers(model) as taps:
        _train_loop(options, model, optimizer, sampler, taps, log, heldout)
    return model.eval(), log


def _training_log(
    options: argparse.Namespace, model: nn.Module, sampler: Sampler
) -> dict[str, Any]:
    cuda = options.device == "cuda"
    return {
        "machine": torch.cuda.get_device_name() if cuda else platform.machine() + " CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        # Without paths: the log is released with the model.
        "options": {
            key: value
            for key, value in vars(options).items()
            if key != "evaluate_only" and not isinstance(value, Path)
        },
        "mixing": MIXING,
        "parameters": model.num_parameters(),
        "corpus_tokens": len(sampler.data),
        "progress": [],
        "heldout_progress": [],
    }


def _train_loop(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: MasterAdamW,
    sampler: Sampler,
    taps: list[tuple[Tensor, Tensor]],
    log: dict[str, Any],
    heldout: dict[str, np.ndarray],
) -> None:
    count = max(1, options.batch_tokens // options.sequence)
    step, reported, checks, start = 0, 0.0, 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < options.minutes * 60:
        taps.clear()
        windows = sampler.draw(count, options.sequence)
        loss = token_losses(model, windows).mean()
        auxiliary = balancing_loss(taps)
        (loss + model.config.router_aux_loss_coef * auxiliary).backward()
        rate = learning_rate(options.lr, elapsed / (options.minutes * 60))
        norm = optimizer.step(rate)
        step += 1
        # The clock of the schedule must not run ahead of the device's queue.
        if step % 8 == 0 and options.device == "cuda":
            torch.cuda.synchronize()
        if step == 1 or elapsed - reported >= REPORT_SECONDS:
            reported = elapsed
            values = {"loss": loss, "auxiliary": auxiliary, "norm": norm}
            _report(log, step, count * options.sequence, time.perf_counter() - start, rate, values)
        if elapsed >= (checks + 1) * options.minutes * 60 / HELDOUT_CHECKS:
            checks += 1
            log["heldout_progress"].append({"step": step} | _quick_heldout(model, heldout, options))
            print(json.dumps(log["heldout_progress"][-1]), flush=True)
    log["steps"], log["tokens"] = step, step * count * options.sequence
    log["seconds"] = round(time.perf_counter() - start, 1)


def _report(
    log: dict[str, Any],
    step: int,
    step_tokens: int,
    elapsed: float,
    rate: float,
    values: dict[str, Tensor],
) -> None:
    numbers = {name: round(value.item(), 4) for name, value in values.items()}
    speed = round(step * step_tokens / elapsed)
    record = {"step": step, "seconds": round(elapsed, 1), "tokens_per_second": speed}
    log["progress"].append(record | {"learning_rate": round(rate, 6)} | numbers)
    print(json.dumps(log["progress"][-1]), flush=True)
    if not math.isfinite(numbers["loss"]):
        raise SystemExit("the loss is not finite: lower --lr")


def heldout_windows(tokens: np.ndarray, length: int) -> Tensor:
    """Cut held-out tokens into windows that overlap by one token, so that each is predicted once.

    Args:
        tokens: The tokens; a last, shorter piece is left out.
        length: Tokens predicted a window.

    Returns:
        An int64 tensor of windows of ``length`` + 1 tokens.
    """
    data = torch.from_numpy(tokens.astype(np.int64))
    return data.unfold(0, min(length, len(data) - 1) + 1, length)


@torch.no_grad()
def _quick_heldout(
    model: nn.Module, arrays: dict[str, np.ndarray], options: argparse.Namespace
) -> dict[str, float]:
    # A few windows only, while training: whether the repeated passes begin to overfit.
    losses = {}
    for domain, tokens in arrays.items():
        windows = heldout_windows(tokens, options.sequence)[:4].to(options.device)
        losses[domain] = round(token_losses(model, windows).mean().item(), 3)
    return losses


def save(model: nn.Module, options: argparse.Namespace, log: dict[str, Any]) -> None:
    """Write the model, its configuration, the tokenizer and the log.

    Args:
        model: The trained model.
        options: The command line.
        log: The training log.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=TOP_K,
    )
    model.save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(options.corpus / "tokenizer" / name, options.out / name)
    write_json(options.out / "training_log.json", log)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


class RoutingCounter:
    """Adds up routing statistics of every layer over held-out text."""

    def __init__(self, config: OlmoeConfig) -> None:
        self.experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.counts = torch.zeros(config.num_hidden_layers, self.experts, dtype=torch.float64)
        self.shared = torch.zeros(config.num_hidden_layers, dtype=torch.float64)
        self.pairs = 0

    def add(self, taps: list[tuple[Tensor, Tensor]], batch: int) -> None:
        """Count one forward pass over ``batch`` windows."""
        for layer, (logits, chosen) in enumerate(taps):
            used = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
            self.counts[layer] += used.sum(0).double().cpu()
            used = used.view(batch, -1, self.experts)
            self.shared[layer] += (used[:, 1:] & used[:, :-1]).sum().item()
        self.pairs += batch * (taps[0][0].shape[0] // batch - 1)

    def summary(self) -> list[dict[str, float]]:
        """Return a record for each layer; fractions lie between 0 and 1."""
        shares = self.counts / self.counts.sum(1, keepdim=True)
        entropy = -(shares * shares.clamp_min(1e-12).log()).sum(1) / math.log(self.experts)
        busiest = shares.topk(self.experts // BUSIEST_FRACTION).values.sum(1)
        # Two tokens that choose independently with these shares would overlap by chance.
        chance = self.top_k * (shares**2).sum(1)
        overlap = self.shared / (self.pairs * self.top_k)
        columns = {
            "previous_token_overlap": overlap,
            "chance_overlap": chance,
            "busiest_eighth_share": busiest,
            "load_entropy": entropy,
        }
        return [
            {name: round(column[layer].item(), 4) for name, column in columns.items()}
            for layer in range(len(shares))
        ]


@torch.no_grad()
def evaluate(
    model: nn.Module, options: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], list[dict[str, float]]]:
    """Measure held-out loss and routing.

    Args:
        model: The model as released.
        options: The command line.

    Returns:
        A record for each domain, and the routing statistics of each layer over all domains.
    """
    sizes = json.loads((options.corpus / "sources.json").read_text())["domains"]
    counter, results = RoutingCounter(model.config), {}
    with tap_routers(model) as taps:
        for domain, tokens in load_tokens(options.corpus, "heldout").items():
            total, predicted = 0.0, 0
            for windows in heldout_windows(tokens, options.sequence).split(EVALUATION_WINDOWS):
                taps.clear()
                losses = token_losses(model, windows.to(options.device))
                counter.add(taps, len(windows))
                total, predicted = total + losses.double().sum().item(), predicted + len(losses)
            nats = total / predicted
            bytes_per_token = sizes[domain]["heldout_bytes"] / sizes[domain]["heldout_tokens"]
            results[domain] = {
                "tokens": predicted,
                "nats_per_token": round(nats, 4),
                "bits_per_byte": round(nats / math.log(2) / bytes_per_token, 4),
                "bar": HELDOUT_BAR[domain],
                "passed": nats <= HELDOUT_BAR[domain],
            }
    return results, counter.summary()


def continue_prompts(folder: Path, seed: int) -> list[dict[str, str]]:
    """Continue the fixed prompts on the CPU, so that one machine repeats its own text.

    Another processor or PyTorch build may round differently and part from it at some token.

    Args:
        folder: Folder of the model.
        seed: Seed of the sampling, set again for every prompt.

    Returns:
        Prompt and continuation of each.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    samples = []
    for prompt in PROMPTS:
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
        text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        samples.append({"prompt": prompt, "continuation": text})
    return samples


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--experts-implementation",
        default="grouped_mm",
        help="grouped_mm, or eager (slower) where grouped_mm does not run",
    )
    parser.add_argument("--evaluate-only", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train unless told not to, then evaluate and write the card."""
    options = parse_options()
    if not options.evaluate_only:
        # Saved before the evaluation: a fault there must not cost the training.
        trained, log = train(options)
        save(trained, options, log)
    log = json.loads((options.out / "training_log.json").read_text(encoding="utf-8"))
    implementation = options.experts_implementation
    model = AutoModelForCausalLM.from_pretrained(options.out, experts_implementation=implementation)
    log["heldout"], log["routing"] = evaluate(model.to(options.device).eval(), options)
    log["samples"] = continue_prompts(options.out, log["options"]["seed"])
    write_json(options.out / "training_log.json", log)
    write_card(options.corpus, options.out)
    for domain, result in log["heldout"].items():
        print(domain, json.dumps(result))
    for layer, record in enumerate(log["routing"]):
        print(f"layer {layer}", json.dumps(record))


if __name__ == "__main__":
    main()
