"""Convolutional branch for local detail at four strides (ViT-Adapter, Sec. 3.2)."""

from torch import Tensor, nn

from ..layers.norms import ConvNormAct, NormLayer


class SpatialPrior(nn.Module):
    """A stem to stride 4, three stride-2 convolutions, and a projection of each to `embed_dims`.

    Every map covers the image: sides are rounded up, `ceil(H / stride)`.

    Args:
        embed_dims: Channels of the outputs, C.
        width: Channels of the stem. The later stages have 2, 4 and 4 times as many.
        norm_layer: Norm layers after the convolutions, see `build_norm`.
        in_channels: Channels of the image.
        with_stride4: Whether to project the stem's map too (else the first output is None).
    """

    def __init__(
        self,
        embed_dims: int,
        width: int,
        norm_layer: NormLayer,
        in_channels: int = 3,
        with_stride4: bool = True,
    ) -> None:
        super().__init__()

        def conv(dims: int, out_dims: int, stride: int) -> ConvNormAct:
            built = ConvNormAct(dims, out_dims, 3, stride, norm_layer)
            _kaiming(built.conv)
            return built

        self.stem = nn.Sequential(
            conv(in_channels, width, 2),
            conv(width, width, 1),
            conv(width, width, 1),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        widths = (width, 2 * width, 4 * width, 4 * width)
        self.stages = nn.ModuleList(
            conv(widths[i], widths[i + 1], 2) for i in range(len(widths) - 1)
        )
        self.projections = nn.ModuleList(nn.Conv2d(w, embed_dims, 1) for w in widths)
        if not with_stride4:
            self.projections[0] = nn.Identity()
        self.with_stride4 = with_stride4
        for projection in self.projections:
            if isinstance(projection, nn.Conv2d):
                _kaiming(projection)
                nn.init.zeros_(projection.bias)

    def forward(self, image: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """Image `(B, in_channels, H, W)` → maps `(B, C, h, w)` at strides 4, 8, 16 and 32."""
        features = [self.stem(image)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        first, *others = (p(x) for p, x in zip(self.projections, features, strict=True))
        return first if self.with_stride4 else None, *others


def _kaiming(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode='fan_out', nonlinearity='relu')
