"""Guesses of the next layer's experts: what its own norm and router make of this one's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hotexperts.transformers as hot
from hotexperts.errors import UnsupportedModelError
from hotexperts.integrations.transformers import compat
from hotexperts.integrations.transformers.recording import Recorded, RoutingRecorder
from hotexperts.simulate.guesses import count_guessed
from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

NUM_TOKENS = 12
AFTER_ATTENTION = "post_attention_layernorm"
ROUTERS = {  # the norm and the router of a decoder layer, by family
    "olmoe": (AFTER_ATTENTION, "mlp.gate"),
    "mixtral": (AFTER_ATTENTION, "mlp.gate"),
    "qwen3_moe": (AFTER_ATTENTION, "mlp.gate"),
    "gpt_oss": (AFTER_ATTENTION, "mlp.router"),
    "jamba": ("pre_ff_layernorm", "feed_forward.router"),
}
BY_OTHERS = "does not go by router logits alone in choosing"
NO_LOGITS = "does not say where the router logits of"
NO_NORM = "does not name the norm before the router of"
MORE_INPUTS = "gives more than hidden states to the router of"
REFUSED = {
    "deepseek_v2": BY_OTHERS,  # the best groups first
    "deepseek_v3": BY_OTHERS,
    "glm4_moe": "has one layer of experts, and so no next one",
    "nemotron_h": BY_OTHERS,  # a bias
    "minimax_m2": MORE_INPUTS,
    "ernie4_5_moe": BY_OTHERS,
    "lfm2_moe": MORE_INPUTS,
    "dots1": BY_OTHERS,
    "flex_olmo": NO_NORM,  # it norms what experts return
    "glm4_moe_lite": BY_OTHERS,
    "afmoe": MORE_INPUTS,
    "exaone_moe": BY_OTHERS,
    "deepseek_v4": "has layers whose output is not what goes to the router of",
    "gemma4": NO_NORM,  # its router has its own
    "inkling": BY_OTHERS,
}


def cached(family: str) -> Any:
    model = zoo.build_model(family)
    hot.attach(model, expert_cache_size=3, cache_mode="host", device="cpu")
    return model


@torch.no_grad()
def recorded(model: Any) -> Recorded:
    """One prefill and one step of decode."""
    tokens = zoo.sample_ids(batch=1, length=NUM_TOKENS)
    with RoutingRecorder(model, with_guesses=True) as recorder:
        seen = model(input_ids=tokens[:, :-1], use_cache=True)
        model(input_ids=tokens[:, -1:], past_key_values=seen.past_key_values)
        found = recorder.take()
    assert found is not None
    return found


def no_attention(model: Any) -> None:
    """Let the second layer's attention add nothing, so that guesses are certain."""
    for name, parameter in model.model.layers[1].self_attn.named_parameters():
        if name.startswith("o_proj"):
            parameter.data.zero_()


@pytest.mark.parametrize("family", ROUTERS)
@torch.no_grad()
def test_a_guess_is_the_routers_answer_to_the_layer_before(family: str) -> None:
    found = recorded(cached(family))
    resident = zoo.build_model(family)
    tokens = zoo.sample_ids(batch=1, length=NUM_TOKENS)
    output = resident(input_ids=tokens, output_hidden_states=True).hidden_states[1][0]
    after = resident.model.layers[1]
    norm, router = (after.get_submodule(name) for name in ROUTERS[family])
    logits = norm(output) @ router.weight.T
    if getattr(router, "bias", None) is not None:
        logits = logits + router.bias
    best = logits.argsort(dim=1, descending=True)[:, : 2 * zoo.TOP_K]
    assert found.guesses is not None
    assert found.guesses[:, 0].tolist() == best.tolist()
    assert found.guesses.shape == (NUM_TOKENS, 2, 4)
    assert (found.guesses[:, 1] == -1).all(), "no layer follows"


@pytest.mark.parametrize("family", ROUTERS)
def test_a_layer_without_attention_is_guessed_exactly(family: str) -> None:
    model = cached(family)
    no_attention(model)
    found = recorded(model)
    assert found.guesses is not None
    assert found.guesses[:, 0, : zoo.TOP_K].tolist() == found.ids[:, 1].tolist()
    assert count_guessed(found.ids, found.guesses, zoo.TOP_K) == (NUM_TOKENS * 2, NUM_TOKENS * 2)


@pytest.mark.parametrize("family", ROUTERS)
@torch.no_grad()
def test_guessing_changes_nothing(family: str) -> None:
    tokens = zoo.sample_ids(batch=1, length=NUM_TOKENS)
    model = cached(family)
    plain = model(input_ids=tokens).logits
    with RoutingRecorder(model, with_guesses=True, with_logits=True) as recorder:
        watched = model(input_ids=tokens).logits
        found = recorder.take()
    assert torch.equal(plain, watched)
    assert torch.equal(plain, model(input_ids=tokens).logits)
    assert found is not None
    assert found.logits is not None
    assert found.logits.shape == (NUM_TOKENS, 2, zoo.NUM_EXPERTS), "a guess is no pass of its own"


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_is_guessed_or_refused(family: str) -> None:
    if (why := zoo.known_exception(family)) and not why.startswith("bfloat16 only"):
        pytest.skip(why)
    model = cached(family)
    refused = REFUSED.get(family)
    if not compat.router_kinds(model):  # of some families in older Transformers
        refused = refused if family == "glm4_moe" else NO_LOGITS
    if refused is None:
        found = recorded(model)
        assert found.guesses is not None
        guessed, demanded = count_guessed(found.ids, found.guesses, zoo.TOP_K)
        assert demanded == NUM_TOKENS * zoo.TOP_K
        assert guessed > demanded * zoo.TOP_K / zoo.NUM_EXPERTS, "better than chance"
        return
    with pytest.raises(UnsupportedModelError, match=f"{refused}.*without guesses"):
        recorded(model)
    model(input_ids=zoo.sample_ids(batch=1, length=2))  # no hook is left that would refuse
