"""A page in a browser that shows what a trained model sees in an image (Gradio)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from mmengine.config import Config

from ..errors import UsageError
from .inference import open_model

if TYPE_CHECKING:
    import gradio


def build_page(
    config: Config, checkpoint: str | os.PathLike[str], name: str, device: str = 'cpu'
) -> gradio.Interface:
    """The page: an image and a threshold in, the drawn picture and its description out.

    Args:
        config: Of a model of mmdet, mmsegmentation or mmpretrain.
        checkpoint: Its weights.
        name: Heading of the page.
        device: Where to run.

    Raises:
        UsageError: Gradio is not installed; else as `open_model`.
        CheckpointError: As `open_model`.
    """
    try:
        import gradio
    except ImportError as error:
        raise UsageError(
            "the page needs Gradio, which is not installed: pip install 'mmvttt[gradio]'"
        ) from error
    look = open_model(config, checkpoint, device)

    def show(image: np.ndarray | None, score_thr: float) -> tuple[np.ndarray | None, str]:
        if image is None:
            return None, 'Choose an image first.'
        lines, picture = look(np.ascontiguousarray(image[..., ::-1]), score_thr)
        return picture, '\n'.join(lines) or 'nothing'

    return gradio.Interface(
        show,
        [
            gradio.Image(label='Image', sources=['upload', 'webcam', 'clipboard']),
            gradio.Slider(0, 1, 0.3, label='Draw boxes from this score on'),
        ],
        [gradio.Image(label='What the model sees'), gradio.Textbox(label='In words')],
        title=name,
        flagging_mode='never',
    )
