"""Objects, label maps and titles as they are drawn: long names, 80 classes, boxes of 8 pixels."""

import numpy as np
import pytest

from mmvttt.analysis.drawing import (
    beside,
    cut_middle,
    distinct_colours,
    draw_instances,
    draw_label_map,
    with_title,
)
from mmvttt.analysis.pictures import block_title

NAMES = [f'{i}_{"long_name_of_a_class_" * 3}'[:60] for i in range(80)]
GREY = np.full((120, 200, 3), 100, np.uint8)


def test_colours_of_80_classes_differ() -> None:
    colours = np.array(distinct_colours(80))
    gaps = np.abs(colours[:, None] - colours[None]).sum(2) + 1000 * np.eye(80)
    assert gaps.min() > 15
    # Neighbours, which are often in one image, differ clearly.
    assert np.abs(np.diff(colours, axis=0)).sum(1).min() > 100


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


@pytest.mark.parametrize('corner', [(0, 0), (60, 50), (191, 111)])
def test_a_small_box_is_drawn_and_stays_visible(corner: tuple[int, int]) -> None:
    """Its label is beside it, wholly in the image."""
    x, y = corner
    box = np.array([[x, y, x + 8, y + 8]])
    drawn = draw_instances(GREY, box, [79], NAMES, [0.5])
    assert drawn.shape == GREY.shape
    colour = distinct_colours(80)[79]
    inside = drawn[y + 2 : y + 7, x + 2 : x + 7]
    assert (inside == 100).all()
    assert (drawn[y, x : x + 8] == colour).all()
    changed = (drawn != GREY).any(2)
    changed[y : y + 9, x : x + 9] = False
    ys, xs = np.nonzero(changed)
    # One line of text of one size, whose name is cut.
    assert 15 < np.ptp(ys) < 30
    assert 100 < np.ptp(xs) < 200


def test_masks_and_boxes_have_the_class_s_colour() -> None:
    masks = np.zeros((1, *GREY.shape[:2]), bool)
    masks[0, 40:80, 50:90] = True
    box = np.array([[50, 40, 90, 80]])
    drawn = draw_instances(GREY, box, [0], ['a'], masks=masks, colours=[(200, 0, 0)])
    assert np.abs(drawn[60, 70] - np.array([145, 55, 55])).max() <= 1
    assert drawn[40, 70].tolist() == [200, 0, 0]
    assert np.array_equal(drawn, draw_instances(GREY, box, [0], ['a'], None, masks, [(200, 0, 0)]))
    nothing = draw_instances(GREY, np.zeros((0, 4)), [], NAMES, [], np.zeros((0, 120, 200), bool))
    assert np.array_equal(nothing, GREY)


def test_a_label_map_names_its_classes() -> None:
    labels = np.full((120, 200), 255)
    labels[:, 100:150], labels[:, 150:] = 3, 79
    drawn = draw_label_map(GREY, labels, NAMES)
    assert drawn.shape[1] == 200
    assert len(drawn) > 120
    assert drawn[:120, :100].max() < 50
    colours = distinct_colours(80)
    assert np.abs(drawn[60, 120] - (40 + 0.6 * np.array(colours[3]))).max() <= 1
    # Two names of 24 letters are too wide for one row.
    legend = drawn[120:]
    assert [c for c in (3, 79, 4) if (legend == colours[c]).all(2).any()] == [3, 79]
    assert len(legend) > 40


def test_titles_fit_and_pictures_stand_side_by_side() -> None:
    titled = with_title(GREY, 'truth: ' + NAMES[0] * 3)
    assert titled.shape[1] == 200
    assert np.array_equal(titled[-120:], GREY)
    bar = titled[:-120]
    assert bar.min() < 100
    assert (bar[:, -3:] == 255).all()
    pair = beside([titled, GREY])
    assert pair.shape == (len(titled), 400, 3)
    assert (pair[120:, 200:] == 255).all()


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
