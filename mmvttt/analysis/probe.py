"""Quality of frozen features: nearest neighbours, linear probes, agreement with a source."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from mmvttt.errors import DataError, UsageError
from mmvttt.models.distillation import block_tokens

from .pictures import save, styled

# Label of a patch without a class, as in label maps.
IGNORED = 255
_SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')


def class_folder(root: Path, most: int | None = None) -> tuple[list[Path], np.ndarray, list[str]]:
    """Images of `ROOT/CLASS/*`, their classes as numbers, and the names; evenly at most so many."""
    if not root.is_dir():
        raise DataError(f'there is no folder {str(root)!r}: give FOLDER/CLASS/*.jpg.')
    pairs = [
        (path, folder.name)
        for folder in sorted(p for p in root.iterdir() if p.is_dir())
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in _SUFFIXES
    ]
    names = sorted({name for _, name in pairs})
    if len(names) < 2:
        raise DataError(f'{root} has images of {len(names)} classes: give FOLDER/CLASS/*.jpg.')
    if most is not None and most < len(pairs):
        pairs = [pairs[i * len(pairs) // most] for i in range(most)]
    return [p for p, _ in pairs], np.array([names.index(n) for _, n in pairs]), names


@torch.no_grad()
def pooled_features(
    model: nn.Module, batches: Iterable[Tensor], source: nn.Module | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Features of images by a frozen model, and how they agree with its source's.

    Args:
        model: A plain backbone of mmvttt or a timm vision transformer, in evaluation mode.
        batches: Images `(B, 3, H, W)`.
        source: A model of the same tokens.

    Returns:
        `mean` of the normed patches, and `class`, the class token where there is one, `(N, C)`; and
        the mean cosine of patch tokens to the source's for each block and the final norm, `(L,)`.
    """
    prefix = getattr(model, 'num_prefix_tokens', 0)
    features: dict[str, list[Tensor]] = {'mean': []}
    cosines, count = 0.0, 0
    for images in batches:
        tokens = block_tokens(model, images)
        features['mean'].append(tokens[-1][:, prefix:].mean(1))
        if getattr(model, 'cls_token', None) is not None:
            features.setdefault('class', []).append(tokens[-1][:, 0])
        if source is not None:
            pairs = zip(tokens, block_tokens(source, images), strict=True)
            near = [F.cosine_similarity(a, b, dim=-1)[:, prefix:].mean() for a, b in pairs]
            cosines = cosines + torch.stack(near).double().numpy() * len(images)
        count += len(images)
    return {k: torch.cat(v).float().numpy() for k, v in features.items()}, np.array(cosines) / count


def labelled_images(
    images: Path, maps: Path, most: int | None = None
) -> tuple[list[Path], list[Path]]:
    """Images of a folder and those below it, and their label maps, of the same names in `maps`."""
    files = sorted(p for p in images.rglob('*') if p.suffix.lower() in _SUFFIXES)
    if most is not None and most < len(files):
        files = [files[i * len(files) // most] for i in range(most)]
    labels = [(maps / p.relative_to(images)).with_suffix('.png') for p in files]
    if missing := [p for p in labels if not p.is_file()] or ([] if files else [images]):
        raise DataError(
            f'{images} has {len(files)} images, and there is no {missing[0]}: give a folder of '
            'images, and one of label maps with the same names, ending in .png.'
        )
    return files, labels


def patch_labels(
    path: Path, size: tuple[int, int], grid: tuple[int, int], ignore: int = IGNORED
) -> np.ndarray:
    """The most frequent class of each patch, `(h·w,)`.

    Args:
        path: A label map, whose pixels are numbers of classes.
        size: Height and width that it is brought to, as the image is.
        grid: Patches h and w, which divide the size.
        ignore: Pixels of this number count for no class.

    Returns:
        Numbers of classes, `IGNORED` where no pixel of a patch has one.
    """
    with Image.open(path) as file:
        pixels = np.array(file.resize(size[::-1], Image.Resampling.NEAREST))
    if pixels.ndim != 2:
        raise DataError(f'{str(path)!r} is no label map: give one channel, the number of a class.')
    (h, w), (rows, columns) = grid, (size[0] // grid[0], size[1] // grid[1])
    patches = pixels.reshape(h, rows, w, columns).swapaxes(1, 2).reshape(h * w, -1)
    seen = [patch[(patch != ignore) & (patch != IGNORED)] for patch in patches]
    return np.array([np.bincount(s).argmax() if len(s) else IGNORED for s in seen])


@torch.no_grad()
def patch_features(model: nn.Module, batches: Iterable[Tensor]) -> np.ndarray:
    """Normed patches of images `(B, 3, H, W)` by a frozen model, `(N·h·w, C)`."""
    prefix = getattr(model, 'num_prefix_tokens', 0)
    patches = [block_tokens(model, images)[-1][:, prefix:].flatten(0, 1) for images in batches]
    return torch.cat(patches).float().numpy()


def probe(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, k: int = 20
) -> dict[str, float]:
    """Accuracies of `k` nearest neighbours by cosine, and of a logistic regression.

    Args:
        train, test: Features `(N, C)` and `(M, C)`.
        labels, truth: Their classes.
        k: Number of neighbours, weighted alike.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    nearest = KNeighborsClassifier(min(k, len(train)), metric='cosine').fit(train, labels)
    linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
    return {
        'knn': float(nearest.score(test, truth)),
        'linear': float(linear.fit(train, labels).score(test, truth)),
    }


def neighbour_agreement(a: np.ndarray, b: np.ndarray, k: int = 10) -> float:
    """Share of an image's k nearest neighbours by features `a` that are among those by `b`."""
    from sklearn.neighbors import NearestNeighbors

    if len(a) < 2:
        raise UsageError('the agreement of neighbours needs two images or more')
    k = min(k, len(a) - 1)
    # Called without X, so that an image is not its own neighbour.
    rows = [NearestNeighbors(n_neighbors=k, metric='cosine').fit(x).kneighbors()[1] for x in (a, b)]
    shared = [len(set(x) & set(y)) for x, y in zip(*map(np.ndarray.tolist, rows), strict=True)]
    return float(np.mean(shared) / k)


def patch_miou(train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray) -> float:
    """Mean intersection over union of a linear probe of patches, `(N, C)` with a label each.

    Patches labelled `IGNORED` are left out.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import jaccard_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
    model.fit(train[labels != IGNORED], labels[labels != IGNORED])
    seen = truth != IGNORED
    return float(jaccard_score(truth[seen], model.predict(test[seen]), average='macro'))


@styled
def draw_cosines(cosines: Sequence[float], path: Path) -> None:
    """Draws the cosine between source and twin by block, the final norm last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout='constrained')
    axes = figure.subplots()
    ticks = [*map(str, range(len(cosines) - 1)), 'norm']
    axes.plot(ticks, cosines, 'o-')
    axes.set(xlabel='block', ylabel='cosine of patch tokens', ylim=(min(0, *cosines), 1))
    save(figure, path)
