"""Norm layers and activations by name, and a convolution with both."""

from collections.abc import Callable, Mapping
from typing import Any

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from ..build import build_part, split_config

# A class, a function of the channels, a name, or `dict(type=…)` with options.
NormLayer = str | Mapping[str, Any] | Callable[[int], nn.Module]

_NORMS: dict[str, type[nn.Module]] = {
    'BN': nn.BatchNorm2d,
    'BN2d': nn.BatchNorm2d,
    'SyncBN': nn.SyncBatchNorm,
    'GN': nn.GroupNorm,
    'LN': LayerNorm2d,
    'IN': nn.InstanceNorm2d,
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (nn.GELU, nn.Hardswish, nn.Identity, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh)
}


def build_norm(norm_layer: NormLayer, channels: int) -> nn.Module:
    """A norm of maps `(B, C, h, w)`.

    Args:
        norm_layer: 'BN', 'SyncBN', 'GN', 'LN', 'IN', a dict with one of them and its options, such
            as `dict(type='GN', num_groups=32)`, or a class or function that is called with the
            channels. The option `requires_grad=False` freezes the norm.
        channels: Channels C.
    """
    kind, options = split_config('norm_layer', norm_layer, _NORMS)
    trained = options.pop('requires_grad', True)
    sizes: tuple[int, ...] = (channels,)
    if kind is nn.GroupNorm:
        options['num_channels'], sizes = channels, ()
    norm = build_part('norm_layer', kind, *sizes, **options)
    if not trained:
        norm.requires_grad_(False)
    return norm


def build_activation(option: str, value: Any) -> nn.Module:
    """Builds an activation from a name in torch, a class, or a dict with a type and options.

    Args:
        option: Name of the option, for errors.
        value: The option.
    """
    kind, options = split_config(option, value, ACTIVATIONS)
    return build_part(option, kind, **options)


def _short_name(norm: nn.Module) -> str:
    """Name of a norm in the state dicts of OpenMMLab's convolutions, and ours."""
    kinds = {
        'bn': nn.modules.batchnorm._BatchNorm,
        'gn': nn.GroupNorm,
        'ln': nn.LayerNorm,
        'in': nn.modules.instancenorm._InstanceNorm,
    }
    # An InstanceNorm is a _NormBase, but not a _BatchNorm.
    return next((name for name, kind in kinds.items() if isinstance(norm, kind)), 'norm_layer')


class ConvNormAct(nn.Module):
    """A convolution without bias, a norm, and a ReLU unless `act=False`.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels C of the output.
        kernel_size: Odd side of the kernel, by half of which the map is padded.
        stride: Step of the kernel.
        norm_layer: See `build_norm`.
        act: Whether there is a ReLU.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        norm_layer: NormLayer = 'BN',
        act: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False
        )
        norm = build_norm(norm_layer, out_channels)
        self.norm_name = _short_name(norm)
        self.add_module(self.norm_name, norm)
        self.act = nn.ReLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in_channels, H, W)` → `(B, C, ⌈H/stride⌉, ⌈W/stride⌉)`."""
        return self.act(getattr(self, self.norm_name)(self.conv(x)))
