"""Names and titles in pictures."""

import pytest

from mmvttt.analysis.pictures import block_title, cut_middle


@pytest.mark.parametrize(
    ('name', 'shown'),
    [
        ('photo.jpg', 'photo.jpg'),
        (
            'street_0042_png.rf.0123456789abcdef0123456789abcdef.jpg',
            'street_00…abcdef.jpg',
        ),
    ],
)
def test_long_names_are_cut_in_the_middle(name: str, shown: str) -> None:
    short = cut_middle(name, len(shown))
    assert (short, len(short)) == (shown, len(shown))


@pytest.mark.parametrize(
    ('name', 'title'),
    [
        ('blocks.0', 'block 1'),
        ('stages.2.blocks.3', 'stage 3, block 4'),
        ('layers.11', 'layer 12'),
        ('transformer.blocks.1', 'block 2'),
        ('mixer', 'mixer'),
    ],
)
def test_blocks_have_one_kind_of_title(name: str, title: str) -> None:
    assert block_title(name) == title
