"""Weights named in `init_cfg` load with a report of keys, and never silently match nothing."""

import re
from collections.abc import Mapping
from typing import Any

from mmengine.model import BaseModule, PretrainedInit
from torch import Tensor

from ..checkpoints.load import adapted, load_pretrained
from ..errors import CheckpointMismatchError
from ..registry import WEIGHT_INITIALIZERS

_INHERIT = 'mmvttt.InheritViT'
# The inner weights as the authors of ViT³ and T⁵ name them; much of the rest has our names.
_PUBLIC = re.compile(r'(^|\.)attn\.w[123]$')
_VIT = re.compile(r'(^|\.)(blocks|layers)\.0\.attn\.qkv\.weight$')
_CONVERT = (
    'convert it once: python tools/convert_checkpoint.py PUBLIC.pth OURS.pth (with --ema its '
    "averaged weights, MESA's teacher)"
)


class PretrainedMixin(BaseModule):
    """A `BaseModule` whose `init_cfg=dict(type='Pretrained', …)` goes through `load_pretrained`.

    mmengine's own loading is `strict=False` without a word about what did not match.
    With `ema=True` the averaged weights of the file are loaded, MESA's teacher for one.
    `dict(type='mmvttt.InheritViT', …)` takes the same options for the checkpoint of a ViT.
    """

    init_cfg: Any

    def init_weights(self) -> None:
        """Initialises as mmengine does, then loads the `Pretrained` entries of `init_cfg`."""
        configs = self.init_cfg
        entries = [configs] if isinstance(configs, Mapping) else configs or []
        if not isinstance(entries, list | tuple) or not all(
            isinstance(entry, Mapping) and 'type' in entry for entry in entries
        ):
            raise TypeError(
                f"init_cfg={configs!r}: give dict(type='Pretrained', checkpoint=…), another of "
                "mmengine's initialisers, or a list of them."
            )
        pretrained = [c for c in entries if c['type'] in ('Pretrained', PretrainedInit, _INHERIT)]
        first_time = not self.is_init
        self.init_cfg = [c for c in entries if c not in pretrained]
        try:
            super().init_weights()
        finally:
            self.init_cfg = configs
        if first_time:
            for config in pretrained:
                if config['type'] == _INHERIT:
                    WEIGHT_INITIALIZERS.build(config)(self)
                    continue
                options = {k: v for k, v in config.items() if k != 'type'}
                load_pretrained(self, **options, adapt=self._adapted)

    def _adapted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights after every part of the model has made them its own, e.g. resized them.

        Raises:
            CheckpointMismatchError: They are of the authors' code, or a ViT's, and would load in
                part.
        """
        if any(_PUBLIC.search(name) for name in weights):
            raise CheckpointMismatchError(
                "the checkpoint is one of the authors' of ViT³ or T⁵, with names of their own; "
                f'{_CONVERT}'
            )
        weights = adapted(self, weights)
        if any(_VIT.search(name) for name in weights.keys() - self.state_dict().keys()):
            raise CheckpointMismatchError(
                f'the checkpoint is a ViT, of which {type(self).__name__} would load the patches '
                'and norms alone: take mmvttt.T5 with '
                f"init_cfg=dict(type='{_INHERIT}', checkpoint=…), or mmvttt.TimmViT"
            )
        return weights
