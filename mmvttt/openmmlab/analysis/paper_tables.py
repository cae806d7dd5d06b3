"""The papers' ablations on ImageNet, with their own schedules, for a sweep's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..registry import type_name

_BACKBONE = 'model.backbone'
_RATE = 'optim_wrapper.paramwise_cfg.new_lr_mult'
_TTT = {'mixer.type': 'TTTMixer'}
_T5 = {'mixer.type': 'TTTMixer', 'mixer.inner.type': 'SwiGLU', 'mixer.key_norm': 'instance'}


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper.

    Attributes:
        column: Title of the column.
        model: Class of the backbone.
        keys: Options that differ between rows, relative to the backbone or the whole config.
        rows: Values of the options in that order, and the result.
        given: Values of other options in the table.
        defaults: Defaults of options.
    """

    column: str
    model: str
    keys: tuple[str, ...]
    rows: Mapping[tuple[Any, ...], float]
    given: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _one(key: str, rows: Mapping[Any, float]) -> dict[str, Any]:
    return dict(keys=(key,), rows={(value,): result for value, result in rows.items()})


_MLP = {'mixer.inner.ratio': 1, 'mixer.inner.depth': 2, 'mixer.inner.residual': None,
        'mixer.inner.identity_init': False}  # fmt: skip
_TWO_LAYERS = {**_TTT, 'mixer.inner.type': 'MLP', **_MLP}
_INNER = ('mixer.inner.type', *_MLP)
_PLAIN = (1, 2, None, False)
TABLES = (
    PaperTable(
        'Top-1 in the paper (Vision-TTT, Tab. 3)', 'Vittt',
        **_one('design', dict(ttt_layer=74.2, share_qk=74.0, gating=75.2, conv1d=75.6, dual=77.5,
                              conv2d=77.7)),
    ),
    PaperTable(
        'Top-1 in the paper (Vision-TTT, Tab. 4)', 'Vittt',
        **_one('cls_mode', dict(head=76.6, middle=76.8, double=75.4, max=77.2, mean=77.7)),
    ),
    PaperTable(
        'Top-1 in the paper (ViT³, Tab. 1)', 'ViT3', given=_TWO_LAYERS, defaults=_MLP,
        **_one('mixer.loss', dict(dot=78.9, l2=79.2, rmse=78.8, l1=76.5, smooth_l1=78.1)),
    ),
    PaperTable(
        'Top-1 in the paper (ViT³, Tab. 2)', 'ViT3', ('mixer.num_batches', 'mixer.epochs'),
        {(1, 1): 78.9, (2, 1): 78.6, (3, 1): 78.3, (4, 1): 78.1, (1, 2): 79.1, (1, 3): 79.2,
         (1, 4): 57.0},
        _TWO_LAYERS, {'mixer.num_batches': 1, 'mixer.epochs': 1, **_MLP},
    ),
    PaperTable(
        'Top-1 in the paper (ViT³, Tab. 3)', 'ViT3', given=_TWO_LAYERS, defaults=_MLP,
        **_one('mixer.step', {.1: 77.5, .2: 78.1, .5: 78.7, 1: 78.9, 2: 78.9, 5: 76.7, 10: 76.9,
                              'dynamic': 78.7}),
    ),
    PaperTable(
        'Top-1 in the paper (ViT³, Tab. 4 and 6)', 'ViT3', _INNER,
        {
            ('FC', *_PLAIN): 79.1, ('SiLUFC', *_PLAIN): 79.4, ('SwiGLU', *_PLAIN): 79.0,
            ('GatedFC', *_PLAIN): 79.7, ('Conv', *_PLAIN): 79.9, ('DWConv', *_PLAIN): 80.1,
            ('MLP', *_PLAIN): 78.9, ('MLP', 2, 2, None, False): 79.2,
            ('MLP', 3, 2, None, False): 79.5, ('MLP', 4, 2, None, False): 79.6,
            ('MLP', 1, 3, None, False): 77.5, ('MLP', 1, 2, 'input', False): 78.8,
            ('MLP', 1, 2, 'weight', False): 79.1, ('MLP', 1, 2, None, True): 79.0,
        },
        _TTT, _MLP,
    ),
    PaperTable(
        'Top-1 in the paper (T⁵, Tab. 1)', 'T5',
        ('mixer.inner.type', 'mixer.inner.depth', 'mixer.inner.project', 'only_new'),
        {
            ('SoftmaxAttention', 2, False, False): 72.05,
            ('LinearAttention', 2, False, True): 3.71, ('LinearAttention', 2, False, False): 63.30,
            ('LinearAttention', 2, True, True): 24.39, ('LinearAttention', 2, True, False): 66.23,
            ('GatedFC', 2, False, True): 61.95, ('GatedFC', 2, False, False): 67.59,
            ('MLP', 2, False, True): 65.98, ('MLP', 2, False, False): 68.14,
            ('MLP', 3, False, True): 67.09, ('MLP', 3, False, False): 68.93,
            ('SwiGLU', 2, False, True): 67.33, ('SwiGLU', 2, False, False): 69.25,
        },
        {'mixer.locality': None, 'mixer.key_norm': 'instance'},
        {'mixer.inner.depth': 2, 'mixer.inner.project': False, 'only_new': False},
    ),
    PaperTable(
        'Top-1 in the paper (T⁵, Tab. 2)', 'T5',
        given={'mixer.inner.type': 'SwiGLU', 'mixer.locality': 'dwc_qk'},
        **_one('mixer.key_norm', {None: .37, 'rms': 57.38, 'layer': 57.25, 'instance': 71.19,
                                  'instance_center': 71.15, 'instance_scale': 51.43}),
    ),
    PaperTable(
        'Top-1 in the paper (T⁵, Tab. 3)', 'T5', ('cpe', 'mixer.locality', 'mixer.neighborhood'),
        {
            (False, None, None): 69.25, (True, None, None): 69.64, (False, 'dwc_v', None): 70.47,
            (False, 'dwc_qk', None): 71.19, (False, 'dwc_qk', 3): 71.67,
            (False, 'dwc_qk', 5): 72.06,
        },
        _T5, {'cpe': False, 'mixer.neighborhood': None},
    ),
    PaperTable(
        'Top-1 in the paper (T⁵, Tab. 11)', 'T5', given={**_T5, 'mixer.locality': 'dwc_qk'},
        **_one(_RATE, {1: 68.14, 10: 70.71, 20: 71.19, 30: 71.29, 40: 71.36, 50: 71.31,
                       100: 71.35}),
    ),
)  # fmt: skip
# Defaults of the backbones' mixers.
_MIXERS = {
    'T5': {**_T5, 'mixer.locality': 'dwc_qk'},
    'ViT3': {'mixer.type': 'ViT3Mixer'},
}


def paper_result(cfg: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, float] | None:
    """Column and value of the paper's table for a variant.

    Args:
        cfg: The variant's config, with its options merged.
        options: The options by which the variants differ.

    Returns:
        None if the model, an option or a value is not in one of the tables.
    """
    backbone = (cfg.get('model') or {}).get('backbone')
    if not options or not isinstance(backbone, Mapping):
        return None
    model = _bare(backbone.get('type'))
    varied = {key for pair in options.items() for key, _ in _flat(*pair)}
    rate = ((cfg.get('optim_wrapper') or {}).get('paramwise_cfg') or {}).get('new_lr_mult')
    found = {**_MIXERS.get(model, {}), **dict(_flat('', dict(backbone))), _RATE: rate}
    for table in TABLES:
        values = {**table.defaults, **found}
        if (
            table.model == model
            and varied <= set(table.keys)
            and all(values.get(key) == value for key, value in table.given.items())
        ):
            row = tuple(values.get(key) for key in table.keys)
            result = next((r for known, r in table.rows.items() if known == row), None)
            if result is not None:
                return table.column, result
    return None


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Options by their keys below the backbone; `inner='MLP'` is `inner.type`."""
    name = key.removeprefix(_BACKBONE).removeprefix('.')
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _flat(f'{name}.{part}', inner)
    elif name in ('mixer', 'mixer.inner') and value is not None:
        yield f'{name}.type', _bare(value)
    else:
        yield name, _bare(value) if name.endswith('.type') else value


def _bare(kind: Any) -> str:
    return type_name(kind).rpartition('.')[2]
