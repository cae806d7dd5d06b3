"""Weights by the names of the authors of ViT³, H-ViT³, T⁵, DiT³ and DiT⁵ → ours."""

import re
from collections.abc import Mapping

from torch import Tensor

from .conversion import Conversion, to_our_shape
from .dit import dit_to_ours, is_authors_dit
from .families import Rules, add_once

# The first block's inner weight: what precedes it, and whether it is in stages.
_MARK = re.compile(r'(|.*?\.)(layers\.0\.)?blocks\.0\.attn\.w1')
# The rest of a detector, which has the same names in both toolboxes.
_OTHER_PARTS = {
    'neck', 'rpn_head', 'roi_head', 'bbox_head', 'mask_head', 'decode_head', 'auxiliary_head',
}  # fmt: skip
_STEM: Rules = (
    (r'^patch_embed\.conv\.(\d+)\.conv\.', r'stem.\1.conv.'),
    (r'^patch_embed\.conv\.(\d+)\.norm\.', r'stem.\1.bn.'),
    (r'^norm(\d+)\.', r'norms.\1.'),
)
_IN_BLOCKS: Rules = (
    (r'\.attn\.([qk])_conv2d\.', r'.mixer.\1_conv.'),
    (r'\.attn\.', '.mixer.'),
    (r'\.mlp\.dwc\.', '.mlp.dwconv.'),
    (r'^layers\.', 'stages.'),
)
# All names of a backbone's tensors, behind its prefix.
_KNOWN = re.compile(
    r'(pos_embed|patch_embed\.(proj|conv\.\d+\.(conv|norm))|norm\d*'
    r'|layers\.\d+\.downsample\.conv\.\d\.(conv|norm)|(layers\.\d+\.)?blocks\.\d+\.'
    r'(cpe|norm[12]|attn\.(qkv|proj|w[123]|[qk]_conv2d)|mlp\.(fc[12]|dwc)))(\.\w+)?'
)
_DOWNSAMPLE = re.compile(r'layers\.(\d+)\.downsample\.conv\.(\d)\.(conv|norm)\.')


def authors_prefix(weights: Mapping[str, Tensor]) -> str | None:
    """The prefix of the authors' names of a backbone; None if there are no such names."""
    marks = sorted((m for m in map(_MARK.fullmatch, weights) if m), key=lambda m: len(m[0]))
    return marks[0][1] if marks else None


def vit3_to_ours(weights: Mapping[str, Tensor], prefix: str) -> Conversion:
    """Renames a ViT³, H-ViT³ or T⁵ to `backbone.…`, `head.fc.…`; a detector's heads stay.

    Args:
        weights: Tensors by the authors' names.
        prefix: What precedes the names of the backbone.
    """
    plain = f'{prefix}blocks.0.attn.w1' in weights
    name = 'H-ViT³' if not plain else 'T⁵' if f'{prefix}pos_embed' in weights else 'ViT³'
    result = Conversion(name)
    for theirs, value in weights.items():
        if 'rope.rotations' in theirs:
            result.dropped[theirs] = 'a table for one image size; ours are made for each image'
            continue
        if theirs.removeprefix(prefix) in ('head.weight', 'head.bias'):
            ours = f'head.fc.{theirs.rpartition(".")[2]}'
        elif theirs.partition('.')[0] in _OTHER_PARTS:
            ours = theirs
        elif theirs.startswith(prefix) and _KNOWN.fullmatch(theirs, len(prefix)):
            ours = f'backbone.{_our_name(theirs[len(prefix) :], name == "T⁵")}'
        else:
            result.left_over.append(theirs)
            continue
        add_once(result.weights, ours, to_our_shape(ours, value), theirs)
        result.matched[theirs] = ours
    return result


def _our_name(name: str, is_t5: bool) -> str:
    """Our name of a backbone's tensor: `patch_embed.conv.0.norm.bias` → `stem.0.bn.bias`."""
    if down := _DOWNSAMPLE.match(name):
        # There the downsampling ends a stage; here it begins the next one.
        part = 'norm' if down[3] == 'norm' else ('widen', 'halve', 'narrow')[int(down[2])]
        return f'stages.{int(down[1]) + 1}.downsample.{part}.{name[down.end() :]}'
    if is_t5:
        name = re.sub(r'\.attn\.(w[123])$', r'.mixer.inner.\1', name)
    for pattern, ours in (*_STEM, *_IN_BLOCKS):
        name = re.sub(pattern, ours, name)
    return name


def by_our_names(weights: Mapping[str, Tensor]) -> Conversion | None:
    """The weights by our names, if they have the authors'; None for any others.

    Names that no rule knows stay as they are.
    """
    if is_authors_dit(weights):
        result = dit_to_ours(weights)
    elif (prefix := authors_prefix(weights)) is not None:
        result = vit3_to_ours(weights, prefix)
    else:
        return None
    for name in result.left_over:
        add_once(result.weights, name, weights[name], name)
    return result
