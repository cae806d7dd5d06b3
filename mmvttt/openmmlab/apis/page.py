"""A page in the browser that shows the predictions of a trained model (Gradio)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from mmengine.config import Config

from mmvttt.errors import UsageError

from .inference import open_model, require_image

if TYPE_CHECKING:
    import gradio

# About 24 megapixels, a large photograph. Drawing takes some hundred bytes for each.
MAX_PIXELS = 25_000_000
# Uploads and pictures are deleted after this time.
KEPT_SECONDS = 600


def build_page(
    config: Config, checkpoint: str | os.PathLike[str], name: str, device: str = 'cpu'
) -> gradio.Interface:
    """Builds the page: an image and a threshold in, the drawn picture and its description out.

    Uploads are refused unless they have a common format and at most `MAX_PIXELS`; files are deleted
    after `KEPT_SECONDS`. For the arguments and other errors see `open_model`.

    Raises:
        UsageError: Gradio is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise UsageError(
            "the page needs Gradio, which is not installed: pip install 'mmvttt[gradio]'"
        ) from error
    predictor = open_model(config, checkpoint, device)

    def show(path: str | None, score_thr: float) -> tuple[np.ndarray | None, str]:
        if path is None:
            return None, 'Choose an image first.'
        try:
            require_image(path, MAX_PIXELS)
        except UsageError as error:
            return None, str(error)
        prediction = predictor.predict(path, score_thr)
        return prediction.draw(), '\n'.join(prediction.lines) or 'nothing'

    return gradio.Interface(
        show,
        [
            # As files: Gradio would decode any format that Pillow knows, at any size.
            gradio.Image(
                label='Image',
                sources=['upload', 'webcam', 'clipboard'],
                type='filepath',
                image_mode=None,
            ),
            gradio.Slider(0, 1, 0.3, label='Lowest score of a box'),
        ],
        [gradio.Image(label='Prediction'), gradio.Textbox(label='Description')],
        title=name,
        flagging_mode='never',
        delete_cache=(KEPT_SECONDS, KEPT_SECONDS),
    )
