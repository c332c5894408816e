"""Where two runs of a model part: the first value that is not the same, and by how much."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Step(NamedTuple):
    """One forward pass: embeddings and layers' outputs, logits `[tokens, vocabulary]`."""

    hidden: list[torch.Tensor]
    logits: torch.Tensor


def record(model: Any, ids: list[int], forced: list[int], num_tokens: int) -> list[Step]:
    """The prompt in one pass, then one token a pass: `forced` ones, or the likeliest.

    Args:
        model: a Transformers model.
        ids: of the prompt.
        forced: tokens to feed after it; none feeds what the model finds.
        num_tokens: passes.
    """
    steps: list[Step] = []
    fed, past = ids, None
    with torch.no_grad():
        for index in range(num_tokens):
            out = model(
                input_ids=torch.tensor([fed], device=model.device),
                past_key_values=past,
                use_cache=True,
                output_hidden_states=True,
            )
            past = out.past_key_values
            hidden = [tensor[0].cpu() for tensor in out.hidden_states or ()]
            steps.append(Step(hidden, out.logits[0].cpu()))
            fed = [forced[index] if forced else int(out.logits[0, -1].argmax())]
    return steps


def drawn_ids(model: Any, num_ids: int) -> list[int]:
    """Ids of a prompt, the same for every model of as many embeddings."""
    most = model.get_input_embeddings().weight.shape[0]
    drawn = torch.randint(most, (num_ids,), generator=torch.Generator().manual_seed(0))
    return [int(token) for token in drawn]


def likeliest(steps: list[Step]) -> list[int]:
    """The token that each pass would give next."""
    return [int(step.logits[-1].argmax()) for step in steps]


def first_difference(
    expected: list[Step], found: list[Step], num_prompt_tokens: int
) -> dict[str, Any] | None:
    """Where the two part first, step by step and, within a step, layer by layer."""
    begin = 0
    for a, b in zip(expected, found, strict=True):
        names = ["embeddings", *(f"layer {i}" for i in range(len(a.hidden) - 1)), "logits"]
        pairs = [*zip(a.hidden, b.hidden, strict=True), (a.logits, b.logits)]
        for name, (left, right) in zip(names[-len(pairs) :], pairs, strict=True):
            if not same_bits(left, right):
                rows = [not same_bits(x, y) for x, y in zip(left, right, strict=True)]
                return {
                    "position": begin + rows.index(True),
                    "where": name,
                    "max_abs_difference": number_or_none(max_difference(left, right)),
                }
        begin = begin + 1 if begin else num_prompt_tokens
    return None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bits, not values: a NaN equals itself, and zero is not minus zero."""
    if left.dtype != right.dtype:
        return False
    left_bytes, right_bytes = (t.contiguous().view(torch.uint8) for t in (left, right))
    return bool(torch.equal(left_bytes, right_bytes))


def max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest absolute difference; infinite where a side is not a number."""
    return float((left.double() - right.double()).abs().nan_to_num(nan=torch.inf).max())


def number_or_none(value: float) -> float | None:
    """The value as JSON takes it, which has no infinity."""
    return value if value != torch.inf else None
