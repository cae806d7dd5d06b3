"""A diffusion transformer as a model of mmengine: its training, and what a sampler asks of it."""

import hashlib
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from torch import Tensor

from mmvttt.arguments import check_choice
from mmvttt.errors import DataError, UsageError
from mmvttt.models.generation.sampling import image_generator, sample, sampling_scheduler

from ..registry import MODELS

_LABELS = 'class_labels'
# Rate at which an image's class becomes the null class in training (DiT Sec. 4).
_LABEL_DROPOUT = 0.1
# The error of tools that need photographs, for a `DiffusionModel`.
TAKES_NO_PHOTOGRAPHS = (
    'a diffusion model takes no photographs: tools/generate.py draws images with it'
)
# Options of a validation's samples.
_SAMPLES: dict[str, Any] = dict(steps=50, guidance=1.0, guided='all', scheduler=None, seed=0)


@MODELS.register_module()
class DiffusionModel(BaseModel):
    """A transformer that learns to remove noise, with the scheduler that sets how much there is.

    A batch is a dict of `latents`, `(B, C, h, w)`, and of the transformer's conditions by the names
    of its arguments: `class_labels`, or `encoder_hidden_states` and `pooled_projections`.

    Args:
        transformer: Config of the network: `mmvttt.DiT3`, any `diffusers.…` class, or anything
            that is called as `transformer(hidden_states, timestep=…, **condition)` and has a
            diffusers `config`.
        scheduler: Config of a diffusers scheduler, such as `dict(type='diffusers.DDPMScheduler')`.
        loss: Config of `mmvttt.DDPMLoss` or `mmvttt.FlowLoss`, without the scheduler.
        with_cp: Whether blocks are computed again in the backward pass, to save memory.
        test_cfg: `steps` (50), `guidance` (1), `guided`, `scheduler` and `seed` of the samples
            that a validation looks at; see `sampling_scheduler` and `denoise`.
        data_preprocessor: Default: a `LatentPreprocessor` for the transformer.
        init_cfg: As of mmengine's models.

    Raises:
        UsageError: The scheduler does not fit the loss, the transformer's output or the size of
            latents.
    """

    def __init__(
        self,
        transformer: Mapping,
        scheduler: Mapping,
        loss: Mapping | None = None,
        with_cp: bool = False,
        test_cfg: Mapping | None = None,
        data_preprocessor: Mapping | None = None,
        init_cfg: Mapping | None = None,
    ) -> None:
        # Else types of a missing diffusers would be unknown ones.
        from diffusers.models.embeddings import LabelEmbedding

        network = MODELS.build(transformer)
        classes = _num_classes(network)
        super().__init__(
            data_preprocessor or dict(type='mmvttt.LatentPreprocessor', num_classes=classes),
            init_cfg,
        )
        self.transformer = network
        self.num_classes = classes
        self.scheduler = MODELS.build(scheduler)
        loss = dict(type='mmvttt.DDPMLoss') if loss is None else loss
        self.loss = MODELS.build(dict(loss, scheduler=self.scheduler))
        self.test_cfg = {**_SAMPLES, **(test_cfg or {})}
        self._require_fit()
        for module in network.modules():
            # diffusers' DiT would drop the labels of each block by themselves.
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0
        if hasattr(network, 'adapt_weights'):
            self.register_load_state_dict_pre_hook(
                lambda model, weights, prefix, *_: model.transformer.adapt_weights(
                    weights, f'{prefix}transformer.'
                )
            )
        if with_cp:
            network.enable_gradient_checkpointing()

    def _require_fit(self) -> None:
        name, config = type(self.scheduler).__name__, self.transformer.config
        channels = config.in_channels
        if self.scheduler.config.get('clip_sample') and channels not in (1, 3):
            raise UsageError(
                f'{name} with clip_sample=True cuts samples to [-1, 1], and latents of {channels} '
                'channels are larger: set clip_sample=False in the scheduler'
            )
        outputs, needed = config.get('out_channels'), channels * (1 + self.loss.learns_variance)
        outputs = channels if outputs is None else outputs
        if outputs != needed:
            raise UsageError(
                f'the transformer has {outputs} output channels for {channels} of its input, and '
                f'{name} with {type(self.loss).__name__} needs {needed}: set out_channels, or the '
                "scheduler's variance_type ('learned_range' learns it)"
            )

    def init_weights(self) -> None:
        """Loads the weights of `init_cfg`. The transformer has initialised itself."""
        if self.init_cfg:
            super().init_weights()

    def forward(self, latents: Tensor, mode: str = 'tensor', **condition: Tensor) -> Any:
        """The losses of a batch (`mode='loss'`), or a sample for each of its classes ('predict').

        With 'tensor', the transformer's output at time 0, of class 0 without a condition, for
        counters of FLOPs.
        """
        if mode == 'tensor':
            zeros = torch.zeros(len(latents), dtype=torch.long, device=latents.device)
            condition = condition or dict(class_labels=zeros)
            return self.transformer(latents, timestep=zeros, return_dict=False, **condition)[0]
        if mode == 'predict':
            return self._sample_classes(latents, condition[_LABELS])
        labels = condition.get(_LABELS)
        if labels is not None:
            dropped = torch.rand(len(labels), device=labels.device) < _LABEL_DROPOUT
            condition[_LABELS] = labels.masked_fill(dropped, self.num_classes)
        times, noise, noisy = self.loss.draw(latents)
        output = self.transformer(noisy, timestep=times, return_dict=False, **condition)[0]
        return self.loss(output, latents, noise, noisy, times)

    def denoise(
        self,
        noisy: Tensor,
        time: Tensor,
        condition: Mapping[str, Tensor],
        null: Mapping[str, Tensor] | None = None,
        guidance: float = 1.0,
        guided: str = 'all',
    ) -> Tensor:
        """Predicts what a scheduler takes for noisy latents `(B, C, h, w)` at a time `()`.

        Args:
            noisy, time: See above.
            condition: The transformer's conditions, `(B, …)` each.
            null: The same for no class or prompt. Guidance without it is a UsageError.
            guidance: 1 for none. g multiplies the condition's effect on the output by g.
            guided: Which channels: 'all', as in diffusers, or the first 'three', as in DiT's code.
                The logits of the variance are the condition's own.

        Returns:
            `(B, C, h, w)`, or `(B, 2C, h, w)` with the logits of the variance.
        """
        check_choice('guided', guided, ('all', 'three'))
        if guidance == 1:
            output = self._output(noisy, time, condition)
        elif not null:
            raise UsageError(
                f'guidance={guidance} needs a null condition: give the embeddings of an empty '
                'prompt, or take guidance 1'
            )
        else:
            both = {name: torch.cat([value, null[name]]) for name, value in condition.items()}
            output, without = self._output(torch.cat([noisy, noisy]), time, both).chunk(2)
            count = noisy.shape[1] if guided == 'all' else min(3, noisy.shape[1])
            start = without[:, :count]
            guided_part = start + guidance * (output[:, :count] - start)
            output = torch.cat([guided_part, output[:, count:]], dim=1)
        return self.loss.for_scheduler(output, noisy, time)

    def draw(
        self,
        condition: Mapping[str, Tensor],
        null: Mapping[str, Tensor] | None,
        shape: Sequence[int],
        generators: Sequence[torch.Generator],
        steps: int,
        guidance: float = 1.0,
        guided: str = 'all',
        scheduler: str | None = None,
    ) -> Tensor:
        """Samples `(B, C, h, w)`, one for each row of the condition; see `denoise` and `sample`."""
        return sample(
            lambda noisy, time: self.denoise(noisy, time, condition, null, guidance, guided),
            sampling_scheduler(self.scheduler, scheduler),
            shape,
            steps,
            generators,
            next(iter(condition.values())).device,
        )

    def _sample_classes(self, latents: Tensor, labels: Tensor) -> list[dict]:
        options = dict(self.test_cfg)
        seed = options.pop('seed')
        nulls = {_LABELS: torch.full_like(labels, self.num_classes)}
        generators = [image_generator(seed, _number_of(image)) for image in latents]
        images = self.draw({_LABELS: labels}, nulls, latents.shape[1:], generators, **options)
        return [dict(image=i, label=l) for i, l in zip(images, labels.tolist(), strict=True)]

    def _output(self, noisy: Tensor, time: Tensor, condition: Mapping[str, Tensor]) -> Tensor:
        dtype = next(self.transformer.parameters()).dtype
        cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in condition.items()}
        time = time.expand(len(noisy))
        output = self.transformer(noisy.to(dtype), timestep=time, return_dict=False, **cast)
        return output[0].float()


@MODELS.register_module()
class LatentPreprocessor(BaseDataPreprocessor):
    """Moves a batch to the device. A DataError names a class that the model does not have."""

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, data: dict[str, Tensor], training: bool = False) -> dict[str, Tensor]:
        """The batch on the device."""
        labels = data.get(_LABELS)
        # On the CPU, where looking costs nothing.
        if labels is not None and self.num_classes is not None and labels.device.type == 'cpu':
            bad = labels[(labels < 0) | (labels >= self.num_classes)]
            if len(bad):
                raise DataError(
                    f'class {int(bad[0])} of the data does not exist: the model has the classes 0 '
                    f'to {self.num_classes - 1}; set num_classes in the transformer'
                )
        return super().forward(data, training)


def _num_classes(transformer: Any) -> int | None:
    """Classes of a transformer, by our name for them or by diffusers'; None for one of prompts."""
    if 'class_labels' not in signature(transformer.forward).parameters:
        return None
    return transformer.config.get('num_classes', transformer.config.get('num_embeds_ada_norm'))


def _number_of(image: Tensor) -> int:
    """A number for an image's noise, the same in any batch and on any number of GPUs."""
    content = image.detach().float().cpu().contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(content).digest()[:7], 'big')
