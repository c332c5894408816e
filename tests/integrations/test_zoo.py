"""The zoo's models build, save, load, run and generate; a wrong expert shows in their logits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from integrations import zoo

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("one_thread")]

# The least change of the logits, relative to the largest, that a wrong expert tensor must cause.
VISIBLE = 8 * torch.finfo(torch.bfloat16).eps


@pytest.fixture(params=zoo.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bf16_family(family: str) -> str:
    if cause := zoo.known_exception(family):
        pytest.skip(cause)
    return family


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(zoo.sample_ids()).logits.float()


def routing_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns for each experts module how many tokens each expert gets in one forward."""
    counts: dict[str, torch.Tensor] = {}

    def record(name: str, top_k_index: torch.Tensor) -> None:
        counts[name] = torch.bincount(top_k_index.flatten(), minlength=zoo.NUM_EXPERTS)

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: record(name, args[1]))
        for name, module in zoo.experts_modules(model)
    ]
    logits_of(model)
    for hook in hooks:
        hook.remove()
    return counts


@torch.no_grad()
def changes_by_a_wrong_expert(model: PreTrainedModel) -> Iterator[tuple[str, float]]:
    """Yields (parameter, relative change of the logits) with one expert's slice exchanged."""
    counts, right = routing_of(model), logits_of(model)
    for name, module in zoo.experts_modules(model):
        expert = int(counts[name].argmax())
        for parameter_name, parameter in module.named_parameters(recurse=False):
            kept = parameter[expert].clone()
            parameter[expert] = parameter[(expert + 1) % zoo.NUM_EXPERTS]
            change = (logits_of(model) - right).abs().max() / right.abs().max()
            parameter[expert] = kept
            yield f"{name}.{parameter_name}", float(change)


def assert_runs(model: PreTrainedModel) -> None:
    assert logits_of(model).isfinite().all()
    ids = zoo.sample_ids()
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (len(ids), ids.shape[1] + 4)


def test_every_family_is_listed_once():
    assert len(set(zoo.FAMILIES)) == len(zoo.FAMILIES) == 29
    assert {family for family, _ in zoo.KNOWN_EXCEPTIONS} <= set(zoo.FAMILIES)


def test_a_wrong_expert_is_visible(family: str):
    changes = dict(changes_by_a_wrong_expert(zoo.build_model(family)))
    assert changes
    assert not {name: change for name, change in changes.items() if change < VISIBLE}


def test_most_experts_are_used(family: str):
    counts = routing_of(zoo.build_model(family))
    assert len(counts) == (1 if family == "glm4_moe" else 2)
    assert min(int((count > 0).sum()) for count in counts.values()) > zoo.NUM_EXPERTS // 2


def test_a_float32_model_runs(family: str):
    assert_runs(zoo.build_model(family))


def test_a_checkpoint_loads_back(bf16_family: str, tmp_path: Path):
    folder = zoo.save_checkpoint(bf16_family, tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 2

    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    built = zoo.build_model(bf16_family, dtype=torch.bfloat16)
    assert torch.equal(logits_of(loaded), logits_of(built))
    assert_runs(loaded)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_other_implementations_agree(family: str, implementation: str):
    eager = logits_of(zoo.build_model(family))
    other = logits_of(zoo.build_model(family, experts_implementation=implementation))
    torch.testing.assert_close(other, eager, rtol=0, atol=1e-4)


def test_the_seed_decides_the_weights():
    def weights(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = zoo.build_model("olmoe", seed=seed, dtype=dtype)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    state = torch.random.get_rng_state()
    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))
    assert torch.equal(weights(0).bfloat16(), weights(0, torch.bfloat16))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_fp8_is_dequantized_to_nearly_the_same_weights(tmp_path: Path):
    loaded = AutoModelForCausalLM.from_pretrained(zoo.build_fp8_checkpoint(tmp_path))
    exact = zoo.build_model("qwen3_moe", dtype=torch.bfloat16).state_dict()
    for name, weight in loaded.state_dict().items():
        # e4m3 keeps three bits of mantissa, and a block's largest values are the coarsest.
        torch.testing.assert_close(weight, exact[name], rtol=2**-4, atol=2**-8)
    name = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(loaded.state_dict()[name], exact[name])
    assert_runs(loaded)


def test_mxfp4_is_dequantized_to_bfloat16(tmp_path: Path):
    loaded, info = AutoModelForCausalLM.from_pretrained(
        zoo.build_mxfp4_checkpoint(tmp_path), output_loading_info=True
    )
    assert not any(info.values()), info
    (_, experts), *_ = zoo.experts_modules(loaded)
    assert experts.gate_up_proj.dtype == torch.bfloat16
    assert experts.gate_up_proj.shape == (zoo.NUM_EXPERTS, zoo.HIDDEN_SIZE, 6 * zoo.MXFP4_GROUP)
    # Eight magnitudes of e2m1 times two scales that differ by a factor of two.
    assert len(experts.gate_up_proj.abs().unique()) == 10
    assert min(change for _, change in changes_by_a_wrong_expert(loaded)) > VISIBLE
    assert_runs(loaded)


def test_llama4_runs():
    model = zoo.build_llama4()
    (experts, *_) = (m for m in model.modules() if type(m).__name__ == "Llama4TextExperts")
    right = logits_of(model)
    with torch.no_grad():
        experts.down_proj.copy_(experts.down_proj.roll(1, dims=0))
    assert (logits_of(model) - right).abs().max() / right.abs().max() > VISIBLE
    assert_runs(model)
