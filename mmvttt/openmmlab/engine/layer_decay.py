"""Layer-wise learning rates for any backbone with `get_layer_depth`.

The rate of layer l of L is lr · decay^(L − 1 − l). Neck and heads have the full rate. Vision-TTT's
appendix gives no such factor. Vision-RWKV, whose recipe it follows, takes 0.85 for detection.
"""

from __future__ import annotations

from typing import Any

from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from mmvttt.arguments import check_config, check_number
from mmvttt.checkpoints.load import declared
from mmvttt.errors import OptionError

from ..registry import OPTIM_WRAPPER_CONSTRUCTORS
from ..unwrap import backbones_of

_MULTIPLIERS = (
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
)
_KEYS = ('layer_decay_rate', 'new_lr_mult', 'custom_keys', *_MULTIPLIERS)
_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
# Position embeddings and tokens of backbones that have no method `no_weight_decay`.
_EMBEDDINGS = ('pos_embed', 'cls_token', 'mask_token')


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Builds an optimizer wrapper with layer-wise rates, and weight decay only for weights.

    It uses `get_layer_depth(name, prefix)` of modules called `backbone`, which returns the layer
    and the number of layers; for nested ones (an adapter around a plain backbone) of the outermost
    with this method. Norms, biases, 1-D parameters, position embeddings and whatever a module's
    `no_weight_decay()` names get no weight decay.

    Args:
        optim_wrapper_cfg: The wrapper with its `optimizer`, which needs `lr` and `weight_decay`.
        paramwise_cfg: `layer_decay_rate`, in (0, 1], and optionally mmengine's

            - `bias_lr_mult` (1), `bias_decay_mult` (0), `norm_decay_mult` (0),
              `flat_decay_mult` (0, for 1-D parameters), `dwconv_decay_mult` (1).
            - `custom_keys`: `{part of a name: dict(lr_mult=…, decay_mult=…)}`. The longest matching
              part counts. `lr_mult` multiplies the layer's rate. Each of the two replaces the rules
              above. Other entries go to the optimizer's group.
            - `new_lr_mult` (1): multiplies the rate of the modules' `new_parameters()`, the
              randomly initialised tensors of a model with inherited weights (20 in T⁵).

    Raises:
        ValueError: An option is unknown, missing or out of range, no parameter has a custom key
            in its name, or no backbone of the model has `get_layer_depth`.
    """

    def _validate_cfg(self) -> None:
        for key, value in (('lr', self.base_lr), ('weight_decay', self.base_wd)):
            if value is None:
                raise OptionError(f'optimizer.{key} is missing: it differs between parameters')
        super()._validate_cfg()
        unknown = sorted(set(self.paramwise_cfg) - set(_KEYS))
        if unknown:
            raise OptionError(
                f'paramwise_cfg has the unknown keys {unknown}; allowed: {", ".join(_KEYS)}'
            )
        rate = self.paramwise_cfg.get('layer_decay_rate')
        if not (isinstance(rate, int | float) and 0 < rate <= 1):
            raise OptionError(
                f'paramwise_cfg.layer_decay_rate is {rate}; it must be in (0, 1]. Write '
                'paramwise_cfg=dict(layer_decay_rate=0.85), or 1.0 for the same rate everywhere'
            )
        for key in _MULTIPLIERS:
            check_number(f'paramwise_cfg.{key}', self.paramwise_cfg.get(key, 0))
        for key, settings in self.paramwise_cfg.get('custom_keys', {}).items():
            check_config(f'paramwise_cfg.custom_keys[{key!r}]', settings, 'dict(lr_mult=0.1)')
        check_number('paramwise_cfg.new_lr_mult', self.paramwise_cfg.get('new_lr_mult', 1), above=0)

    def add_params(self, params: list[dict], module: nn.Module, **kwargs: Any) -> None:
        """Appends one group for each layer and setting to `params`.

        mmengine's other arguments are unused: one pass over the whole model forms the groups.
        """
        backbones = _backbones(module)
        names = [name for name, _ in module.named_parameters()]
        undecayed = {name for name in names if name.rpartition('.')[2] in _EMBEDDINGS}
        undecayed |= declared(module, 'no_weight_decay')
        new, new_lr_mult = set(), self.paramwise_cfg.get('new_lr_mult', 1)
        if new_lr_mult != 1:
            new = declared(module, 'new_parameters')
            if not new:
                raise OptionError(
                    f'paramwise_cfg.new_lr_mult={new_lr_mult} is for models that name their new '
                    'parameters (new_parameters()), and this one names none: linearize it, or '
                    'give 1'
                )
        for key in self.paramwise_cfg.get('custom_keys', {}):
            if not any(key in name for name in names):
                raise OptionError(
                    f'paramwise_cfg.custom_keys has {key!r}, which is part of no parameter: give a '
                    f'part of a name such as {names[0]!r}, or leave it out'
                )
        groups: dict[tuple, dict] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            layer, scale = self._layer(name, backbones)
            owner = module.get_submodule(name.rpartition('.')[0])
            lr_mult, decay_mult, extra = self._settings(owner, name, parameter, name in undecayed)
            if name in new:
                lr_mult *= new_lr_mult
            lr, decay = self.base_lr * scale * lr_mult, self.base_wd * decay_mult
            group = {'lr': lr, **extra, 'weight_decay': decay}
            key = (layer, *sorted((k, repr(v)) for k, v in group.items()))
            groups.setdefault(key, {**group, 'layer': layer, 'params': []})['params'].append(
                parameter
            )
        params.extend(sorted(groups.values(), key=lambda g: (g['layer'] is None, g['layer'] or 0)))

    def _layer(self, name: str, backbones: dict[str, nn.Module]) -> tuple[int | None, float]:
        """The layer of a parameter (None outside the backbones) and the scale of its rate."""
        for prefix, backbone in backbones.items():
            if name.startswith(prefix):
                layer, num_layers = backbone.get_layer_depth(name, prefix)
                return layer, self.paramwise_cfg['layer_decay_rate'] ** (num_layers - 1 - layer)
        return None, 1.0

    def _settings(
        self, owner: nn.Module, name: str, parameter: nn.Parameter, undecayed: bool
    ) -> tuple[float, float, dict]:
        """Multipliers of rate and decay, and further entries of the optimizer's group."""
        option = self.paramwise_cfg.get
        is_norm = isinstance(owner, _NORMS)
        is_bias = name.rpartition('.')[2] == 'bias'
        is_conv = isinstance(owner, nn.Conv1d | nn.Conv2d)
        lr_mult = option('bias_lr_mult', 1.0) if is_bias and not is_norm else 1.0
        if is_norm:
            decay_mult = option('norm_decay_mult', 0.0)
        elif is_bias:
            decay_mult = option('bias_decay_mult', 0.0)
        elif undecayed:
            decay_mult = 0.0
        elif is_conv and 1 < owner.in_channels == owner.groups:
            decay_mult = option('dwconv_decay_mult', 1.0)
        elif parameter.ndim <= 1:
            decay_mult = option('flat_decay_mult', 0.0)
        else:
            decay_mult = 1.0
        custom = option('custom_keys', {})
        matching = [key for key in custom if key in name]
        extra = dict(custom[min(matching, key=lambda key: (-len(key), key))]) if matching else {}
        return extra.pop('lr_mult', lr_mult), extra.pop('decay_mult', decay_mult), extra


def _backbones(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost backbones with `get_layer_depth`, by their parameters' prefix."""
    if with_layers := backbones_of(model, 'get_layer_depth'):
        return {f'{name}.': module for name, module in with_layers.items()}
    named = backbones_of(model)
    if not named and hasattr(model, 'get_layer_depth'):
        return {'': model}
    what = (
        ', '.join(f'{name} ({type(m).__name__})' for name, m in named.items())
        or type(model).__name__
    )
    raise OptionError(
        f'layer-wise learning rates need get_layer_depth(param_name, prefix), which {what} does '
        'not have. Use a backbone of mmvttt (mmvttt.Vittt, mmvttt.ViTAdapter), add the method, or '
        "leave optim_wrapper.constructor at mmengine's DefaultOptimWrapperConstructor"
    )
