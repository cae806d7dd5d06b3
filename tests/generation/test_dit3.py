"""DiT³ and DiT⁵: counts of the papers, start, formulas, DiT⁵ of diffusers, in diffusers."""

from pathlib import Path

import pytest
import torch
from torch import nn

from mmvttt.analysis.flops import count_cost
from mmvttt.errors import OptionError

pytest.importorskip('diffusers')

from mmvttt.models.generation.dit3 import DIT, DIT5, DiT3, position_table
from mmvttt.models.linearize import saved

from ..models.building import shaken
from .formulas import dit3, dit5_mixer, position, vit3_mixer
from .small import DIFFUSERS_DIT, SMALL

OPTIONS = {'DiT3': {}, 'DiT': DIT, 'DiT5': DIT5}
# Parameters in millions with the fixed position table, which is none here, and GFLOPs without the
# inner gradient of the 3×3: of the authors' code. Then the paper's Tab. 10.
COUNTS = {
    ('DiT3', 'small', 8): (34.9729, 0.4036, 35, 0.40),
    ('DiT3', 'small', 4): (34.7698, 1.5667, 35, 1.57),
    ('DiT3', 'small', 2): (34.7881, 6.2191, 35, 6.23),
    ('DiT3', 'base', 8): (134.5219, 1.5086, 135, 1.51),
    ('DiT3', 'base', 4): (134.1160, 5.8729, 134, 5.88),
    ('DiT3', 'base', 2): (134.1527, 23.3301, 134, 23.35),
    ('DiT3', 'large', 2): (467.8042, 81.5631, None, None),
    ('DiT3', 'xlarge', 2): (689.4110, 120.4180, None, None),
    ('DiT', 'small', 2): (32.9634, 6.0557, None, None),
    ('DiT', 'xlarge', 2): (675.1296, 118.6214, None, None),
    ('DiT5', 'small', 2): (33.6638, 6.0604, None, None),
    ('DiT5', 'xlarge', 2): (680.5486, 119.1169, None, None),
}


class OneImage(nn.Module):
    """The model at one time and class, for counters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(1, dtype=torch.long, device=x.device)
        return self.model(x, zero, zero, return_dict=False)[0]


def counts(arch: str, patch: int, **options) -> tuple[float, float]:
    """Parameters in millions, the position table included; GFLOPs but for the 3×3's gradient."""
    with torch.device('meta'):
        model = DiT3(arch=arch, patch_size=patch, **options)
    table = (32 // patch) ** 2 * DiT3.arch_zoo[arch]['embed_dims']
    parameters = sum(p.numel() for p in model.parameters())
    cost = count_cost(OneImage(model), (32, 32), in_channels=4)
    # Half of this op is the gradient, which there is nine products of maps, that no counter counts.
    gradient = sum(macs for op, macs in cost.by_op.items() if 'dwconv' in op) / 2
    return (parameters + table) / 1e6, (cost.total_macs - gradient) / 1e9


@pytest.mark.parametrize(('kind', 'arch', 'patch'), COUNTS)
def test_counts_are_those_of_the_authors_code_and_the_paper(
    kind: str, arch: str, patch: int
) -> None:
    whole, gflops, paper_params, paper_gflops = COUNTS[kind, arch, patch]
    parameters, cost = counts(arch, patch, **OPTIONS[kind])
    assert round(parameters, 4) == whole
    # The counters see the products of DiT⁵'s window in different ways.
    assert cost == pytest.approx(gflops, rel=1e-3) if kind == 'DiT5' else round(cost, 4) == gflops
    if paper_params:
        assert round(whole) == paper_params
        # Its counter adds up to .3 % for norms (fvcore).
        assert cost == pytest.approx(paper_gflops, rel=4e-3, abs=6e-3)


def test_start_is_dits() -> None:
    torch.manual_seed(0)
    model = DiT3(arch=dict(SMALL, embed_dims=96), num_classes=1000)
    for name, parameter in model.named_parameters():
        zero = name.endswith('bias') and 'cpe' not in name
        zero |= name.startswith('final_') or '.modulation.' in name
        assert zero != bool(parameter.any()), name
    for linear in (model.blocks[0].mixer.qkv, model.blocks[0].mlp.net[2], model.patch_embed):
        fan_in, fan_out = linear.weight[0].numel(), len(linear.weight)
        bound = (6 / (fan_in + fan_out)) ** 0.5
        # The largest of thousands of uniform numbers comes close to the bound.
        assert 0.95 * bound < linear.weight.abs().max() <= bound
    for module in (model.time_embed.linear_1, model.time_embed.linear_2, model.label_embed):
        # Thousands of numbers: their deviation is known to a few percent.
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    out = model(torch.randn(2, 4, 6, 10), torch.tensor([0, 999]), torch.tensor([1, 3])).sample
    assert out.shape == (2, 8, 6, 10)
    assert not out.any()


@pytest.mark.parametrize(
    ('kind', 'mixer', 'hw'), [('DiT3', vit3_mixer, (6, 10)), ('DiT5', dit5_mixer, (10, 14))]
)
def test_output_and_gradients_are_those_of_the_formulas(kind: str, mixer, hw: tuple) -> None:
    torch.manual_seed(0)
    model = shaken(DiT3(arch=SMALL, in_channels=3, num_classes=3, **OPTIONS[kind]).double(), 0.15)
    latents = torch.randn(2, 3, *hw, dtype=torch.float64, requires_grad=True)
    times, labels = torch.tensor([7, 981]), torch.tensor([0, 3])
    direction = torch.randn(2, 6, *hw, dtype=torch.float64)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = torch.stack(
        [
            dit3(weights, x, t, y, depth=2, heads=2, patch=2, mixer=mixer)
            for x, t, y in zip(latents, times.tolist(), labels.tolist(), strict=True)
        ]
    )
    expected_grads = torch.autograd.grad(
        (expected * direction).sum(), [latents, *weights.values()], materialize_grads=True
    )
    out = model(latents, times, labels).sample
    grads = torch.autograd.grad((out * direction).sum(), [latents, *model.parameters()])
    # fp64, but for the sines and cosines of time and position: fp32 in both, from rates that may
    # differ in the last bit, 6e-8, times 981.
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for name, grad, right in zip(['latents', *weights], grads, expected_grads, strict=True):
        assert right.any(), name
        difference = (grad - right).norm() / right.norm()
        assert difference < 1e-4, (name, difference)
    # fp32 angles up to 9.
    table = position_table((4, 9), 24).double()
    torch.testing.assert_close(table, position(4, 9, 24), rtol=0, atol=2e-6)


@pytest.mark.parametrize(('options', 'shift'), [({}, 1), (dict(time_shift=0), 0)])
def test_the_door_builds_and_saves_the_embedding_of_the_time(
    options: dict, shift: int, tmp_path: Path
) -> None:
    models = pytest.importorskip('mmvttt.openmmlab.registry', exc_type=ImportError).MODELS
    options |= dict(source=DIFFUSERS_DIT, where='dit5')
    model = models.build(dict(type='mmvttt.LinearTransformer', **options))
    assert 'transformer_blocks.1.attn1.processor.qk_scale' in model.state_dict()
    model.save_pretrained(tmp_path)
    for same in (model, saved.DiTTransformer2DModel.from_pretrained(tmp_path)):
        for block in same.transformer_blocks:
            assert block.norm1.emb.time_proj.downscale_freq_shift == shift


def test_checkpointing_changes_nothing() -> None:
    torch.manual_seed(0)
    model = shaken(DiT3(arch=SMALL, num_classes=3))
    latents, one = torch.randn(2, 4, 6, 10), torch.tensor([1, 2])
    grads = []
    for _ in range(2):
        model.zero_grad()
        model(latents, one, one).sample.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.enable_gradient_checkpointing()
    # The same operations twice.
    for (name, _), plain, again in zip(model.named_parameters(), *grads, strict=True):
        assert torch.equal(plain, again), name


def test_bad_latents() -> None:
    model = DiT3(arch=SMALL, num_classes=3)
    with pytest.raises(OptionError):
        model(torch.zeros(1, 4, 5, 4), torch.tensor(0), torch.tensor([0]))
