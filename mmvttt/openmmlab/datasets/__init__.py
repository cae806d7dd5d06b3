"""Data sets of mmvttt. No toolbox is needed to import or build them."""

from typing import Any

from mmvttt.on_demand import OnDemand

_NAMES = OnDemand(
    __name__,
    digit_images='DigitImages TinyDigits',
    digits='make_digits',
    latents='CachedLatents cache_latents',
)


def __getattr__(name: str) -> Any:
    return _NAMES.attribute(name)
