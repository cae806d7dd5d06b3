"""The options of an inner training, checked, and as JSON (vit3 Sec. 4; t5 Sec. 4)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmvttt.arguments import check_backend, check_choice, check_int, check_number, checked_size
from mmvttt.errors import OptionError

from ..build import build_part
from .inner_losses import InnerLoss
from .inner_models import Inner
from .json_options import to_json
from .key_norms import KeyNorm

DYNAMIC = 'dynamic'
LOCALITIES = (None, 'dwc_v', 'dwc_qk')


@dataclass(frozen=True, kw_only=True)
class InnerOptions:
    """Options of `InnerTraining`, of the mixers on it, and of `linearize`.

    Attributes:
        inner: The inner model by a name, a class, or `dict(type=…)` and options: `FC`, `MLP`
            (`ratio`, `depth`, `residual`, `identity_init`), `SiLUFC`, `SwiGLU`, `GatedFC`, `Conv`,
            `DWConv`, or any other `InnerModel` (docs/own_mixer.md). `SoftmaxAttention` and
            `LinearAttention` (`project`) read the keys and values without training.
        loss: 'dot', 'l2', 'rmse', 'l1', 'smooth_l1' (Tab. 1), or another function of predictions,
            values and scale, by its registered name or itself.
        num_batches: Mini-batches of an epoch, in the order of the tokens: B = N / num_batches (Tab.
            2). Convolutions see the whole map of keys in each.
        epochs: Passes over all tokens (Tab. 2).
        step: The inner learning rate η (Tab. 3), or 'dynamic': σ(x W_η) for every token and head.
        scale: Factor s of the loss. None is d^−½, as in Sec. 8.
        damping: Divide every gradient by its norm plus one, per output channel, as ViT³ does.
        key_position: Grid (h, w) for which every mixer learns a position embedding of its keys,
            with a gain per channel, or None. The paper's Tab. 4 counts 0.91M parameters that cost
            no FLOPs and that its text does not mention. At the grid (14, 14) this reading meets
            all of its rows.
        key_norm: How the keys are normed (t5 Tab. 2): None, 'rms', 'layer', 'instance',
            'instance_center', 'instance_scale' (`key_norms`), or another function of the keys.
        locality: Depth-wise 3×3 convolutions (t5 Tab. 3): 'dwc_qk' adds one to q and one to the
            normed k. 'dwc_v' adds one of v to the output of the inner model, before the projection
            (the paper leaves the place open). None adds no convolution.
        neighborhood: Odd side of the window of neighbourhood attention, whose mean with the inner
            model's output is returned (T⁵⁺, t5 Eq. 15: 3 or 5), or None. The attention reads q, k
            and v as they are projected.
        qk_affine: Whether q and k have a learned scale and offset per channel before the key norm,
            initialised as 1 and 0 (DiT⁵, in its authors' code, not in the paper).
        backend: Implementation of the fused op: 'triton', 'numba' or 'reference'. None leaves the
            choice to it (docs/kernels.md). It is an error where no op does the training.

    Raises:
        TypeError: If an option has another type.
        ValueError: If an option is out of range. The message names the allowed values.
    """

    inner: Inner
    loss: str | Mapping[str, Any] | InnerLoss = 'dot'
    num_batches: int = 1
    epochs: int = 1
    step: float | str = 1.0
    scale: float | None = None
    damping: bool = False
    key_position: tuple[int, int] | None = None
    key_norm: str | Mapping[str, Any] | KeyNorm | None = None
    locality: str | None = None
    neighborhood: int | None = None
    qk_affine: bool = False
    backend: str | None = None

    def __post_init__(self) -> None:
        check_int('num_batches', self.num_batches)
        check_int('epochs', self.epochs)
        if self.step != DYNAMIC and not (
            isinstance(self.step, int | float) and 0 < self.step < float('inf')
        ):
            raise OptionError(
                f'step={self.step!r}: give a positive rate (default 1.0) or {DYNAMIC!r}.'
            )
        if self.scale is not None:
            check_number('scale', self.scale, above=0)
        if self.key_position is not None:
            object.__setattr__(
                self, 'key_position', checked_size('key_position', self.key_position)
            )
        check_choice('locality', self.locality, LOCALITIES)
        if self.neighborhood is not None:
            check_int('neighborhood', self.neighborhood)
            if self.neighborhood % 2 == 0:
                raise OptionError(
                    f'neighborhood={self.neighborhood}: give an odd side, such as 3 or 5.'
                )
        check_backend('backend', self.backend)

    @classmethod
    def of(cls, owner: str, **options: Any) -> 'InnerOptions':
        """Builds options from names, with `owner` at the start of errors about unknown ones."""
        return build_part(owner, cls, **options)

    def to_json(self) -> dict[str, Any]:
        """The options that differ from the defaults, as a config.json holds it.

        The key norm and the locality are always written, because `linearize` has other defaults.
        `backend` is left out, because it depends on the machine and does not change the network.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        written = to_json({name: v for name, v in values.items() if name != 'backend'})
        for name, value in written.items():
            # dict(type='MLP') is 'MLP'.
            if isinstance(value, dict) and [*value] == ['type']:
                written[name] = value['type']
        defaults = {field.name: field.default for field in fields(self)}
        always = ('key_norm', 'locality')
        return {n: v for n, v in written.items() if n in always or v != defaults[n]}
