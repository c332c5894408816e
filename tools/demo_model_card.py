"""Write the demonstration model's card from its training log and the corpus's list of sources.

Usage::

    python tools/demo_model_card.py --corpus .corpus --out src/hotexperts/demo_model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# How the samples are drawn: train_demo_model.py does so, and the card says so.
NEW_TOKENS = 60
TEMPERATURE = 0.5
TOP_K = 40


def write_card(corpus: Path, folder: Path) -> None:
    """Write ``README.md`` into the model's folder.

    Args:
        corpus: Folder that ``build_corpus.py`` wrote.
        folder: Folder of the model, with its ``training_log.json``.
    """
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    sources = json.loads((corpus / "sources.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(model_card(log, sources), encoding="utf-8")


def model_card(log: dict[str, Any], sources: dict[str, Any]) -> str:
    """Compose the model card.

    Args:
        log: The log, with the evaluation in it.
        sources: The corpus's ``sources.json``.

    Returns:
        Markdown.
    """
    sections = [
        _card_head(log),
        _card_data(sources),
        _card_training(log),
        _card_heldout(log["heldout"]),
        _card_routing(log["routing"]),
        _card_samples(log),
    ]
    return "\n\n".join(sections) + "\n"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _card_head(log: dict[str, Any]) -> str:
    front = "---\nlicense: apache-2.0\nlanguage:\n- en\npipeline_tag: text-generation\n---\n\n"
    return front + (
        "# hotexperts demonstration model\n\n"
        f"An OLMoE model of {log['parameters'] / 1e6:.2f} M parameters, trained from scratch: 6 "
        "layers, hidden size 128, 4 heads, 32 experts a layer of width 64 of which a token uses 4 "
        "(weights normalised), a byte-level BPE vocabulary of 4096 entries, tied embeddings, "
        "context 1024, bfloat16.\n\n"
        "It exists to exercise an expert cache on real routing: it writes recognisable English "
        "and Python, and what it says is not to be relied on. The weights are licensed under "
        "Apache-2.0; the texts they were trained on keep their own licences, below."
    )


def _card_data(sources: dict[str, Any]) -> str:
    rows = [
        [
            *(source[key] for key in ("domain", "package", "version", "licence", "origin")),
            f"{source['bytes'] / 1e6:.1f}",
        ]
        for source in sources["sources"]
    ]
    header = ["domain", "package", "version", "licence", "copyright", "MB"]
    tokens = sum(domain["train_tokens"] for domain in sources["domains"].values())
    return (
        f"## Data\n\n{_table(header, rows)}\n\nPackages are Debian packages, except the standard "
        f"library of CPython. {tokens / 1e6:.1f} M tokens were trained on; 1.5 % of each "
        "domain's bytes were held out, by whole files (WordNet: by blocks of entries). Exact "
        "duplicates were removed; near-duplicates, also between domains, were not.\n\n"
        "WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved."
    )


def _card_training(log: dict[str, Any]) -> str:
    options, last = log["options"], log["progress"][-1]
    mixing = ", ".join(f"{name} {share:.0%}" for name, share in log["mixing"].items())
    return (
        f"## Training\n\n{log['steps']} steps of {options['batch_tokens']} tokens in "
        f"{log['seconds']:.0f} s ({log['tokens'] / 1e6:.0f} M tokens, "
        f"{log['tokens'] / log['corpus_tokens']:.1f} passes over the corpus) on {log['machine']}; "
        f"Python {log['python']}, PyTorch {log['torch']}, Transformers {log['transformers']}. "
        f"AdamW, peak learning rate {options['lr']}, float32 master weights, load-balancing "
        f"loss for each layer (coefficient 0.01; at the end {last['auxiliary']:.2f}, 4 is "
        f"balance). Windows of {options['sequence']} tokens were drawn at random: {mixing}.\n\n"
        "```\npython tools/build_corpus.py --out .corpus\n"
        "python tools/train_demo_model.py --corpus .corpus --out demo_model "
        f"--minutes {options['minutes']:g} --device {options['device']} "
        f"--batch-tokens {options['batch_tokens']} --lr {options['lr']} --seed {options['seed']} "
        f"--experts-implementation {options['experts_implementation']}\n```\n\n"
        "Training is boxed by time, so a repetition gives a similar model, not the same one."
    )


def _card_heldout(heldout: dict[str, dict[str, Any]]) -> str:
    rows = [
        [
            domain,
            *(result[key] for key in ("tokens", "nats_per_token", "bits_per_byte", "bar")),
            "yes" if result["passed"] else "no",
        ]
        for domain, result in heldout.items()
    ]
    header = ["domain", "tokens", "nats/token", "bits/byte", "bar, nats/token", "passed"]
    return f"## Held-out loss\n\nThe bars were fixed before training.\n\n{_table(header, rows)}"


def _card_routing(routing: list[dict[str, float]]) -> str:
    rows = [[layer, *record.values()] for layer, record in enumerate(routing)]
    header = [
        "layer",
        "overlap with the previous token's experts",
        "overlap by chance",
        "share of the busiest eighth",
        "load entropy",
    ]
    return (
        "## Routing over the held-out text\n\nOverlap: the fraction of a token's experts that "
        "the token before it used too. By chance: what independent choices with the same loads "
        "give. Busiest eighth: the share of all assignments that go to the 4 busiest of 32 "
        "experts (0.125 is balance). Load entropy: as a fraction of its maximum.\n\n"
        f"{_table(header, rows)}"
    )


def _card_samples(log: dict[str, Any]) -> str:
    parts = [
        "## Ten prompts\n\nThe prompts are fixed and the continuations not selected: "
        f"{NEW_TOKENS} tokens at temperature {TEMPERATURE}, top-k {TOP_K}, seed "
        f"{log['options']['seed']}, on the CPU. `⟶` marks where the model takes over."
    ]
    # Four backticks, since the model may well write three.
    parts += [f"````\n{s['prompt']}⟶{s['continuation']}\n````" for s in log["samples"]]
    return "\n\n".join(parts)


def main() -> None:
    """Parse the command line and write the card."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write_card(options.corpus, options.out)


if __name__ == "__main__":
    main()
