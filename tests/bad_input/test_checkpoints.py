"""Checkpoints that are damaged, hostile or of something else: an error, or the right weights."""

import copy
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mmvttt.checkpoints.load import load_pretrained
from mmvttt.checkpoints.publish import describe_checkpoint, publish_checkpoint
from mmvttt.convert import convert_checkpoint, to_ours, to_public
from mmvttt.errors import CheckpointError, CheckpointMismatchError, UsageError
from mmvttt.registry import MODELS

from .cases import not_ints, refused, run_cases
from .models import BASES


def build(seed: int, **options: object) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS.build(copy.deepcopy(BASES['ViT3']) | options)


SOURCE = build(0)
WEIGHTS = SOURCE.state_dict()


def in_backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f'backbone.{name}': tensor for name, tensor in weights.items()}


def saved(content: object, **options: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


WHOLE = saved({'state_dict': in_backbone(WEIGHTS), 'meta': {'epoch': 3}})


def load(path: Path) -> None:
    model = build(1)
    load_pretrained(model, path, prefix='backbone')
    assert_equal(model.state_dict(), WEIGHTS)


def init(path: Path) -> None:
    model = build(1, init_cfg=dict(type='Pretrained', checkpoint=str(path), prefix='backbone.'))
    model.init_weights()
    assert_equal(model.state_dict(), WEIGHTS)


def publish(path: Path) -> None:
    out = publish_checkpoint(path, path.with_name('published.pth'), 'backbone.')
    assert_equal(torch.load(out, weights_only=True)['state_dict'], WEIGHTS)


def convert(path: Path) -> None:
    conversion = convert_checkpoint(path, path.with_name('converted.pth'), to='public')
    assert_equal(conversion.weights, to_public(in_backbone(WEIGHTS)).weights)


def describe(path: Path) -> None:
    assert f'{len(WEIGHTS)} tensors' in describe_checkpoint(path)


READERS: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (load, init, publish, convert, describe)
}
reader = st.sampled_from(sorted(READERS))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


def test_the_whole_file_is_read(tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    for read in READERS.values():
        read(tmp_path / 'a.pth')


def test_truncated(tmp_path: Path) -> None:
    def check(value: tuple[str, int]) -> None:
        name, length = value
        (tmp_path / 'a.pth').write_bytes(WHOLE[:length])
        refused(lambda: READERS[name](tmp_path / 'a.pth'), 'a.pth', kind=CheckpointError)

    run_cases(st.tuples(reader, st.integers(0, len(WHOLE) - 1)), check, 20)


def test_flipped_bits(tmp_path: Path) -> None:
    """Most lie in the numbers of a tensor, where torch alone reads them without a word."""
    refusals = []

    def check(value: tuple[str, int, int]) -> None:
        name, at, bit = value
        damaged = bytearray(WHOLE)
        damaged[at] ^= 1 << bit
        (tmp_path / 'a.pth').write_bytes(damaged)
        try:
            # Reads the right weights, or not at all.
            READERS[name](tmp_path / 'a.pth')
        except CheckpointError as error:
            refusals.append(str(error))

    places = st.tuples(reader, st.integers(0, len(WHOLE) - 1), st.integers(0, 7))
    run_cases(places, check, 60)
    assert len(refusals) > 40
    assert all('a.pth' in sentence for sentence in refusals)
    assert any("checksum of its part 'archive/data/" in sentence for sentence in refusals)


def zipped(names: list[str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, 'w') as archive:
        for name in names:
            archive.writestr(name, name)
    return buffer.getvalue()


parts = st.sampled_from(['archive/data.pkl', 'archive/version', 'archive/data/0', 'readme.txt'])
no_checkpoints = st.one_of(
    st.binary(max_size=64),
    st.text(max_size=64).map(str.encode),
    st.binary(max_size=64).map(lambda b: b'PK\x03\x04' + b),
    st.binary(max_size=64).map(lambda b: b'\x80\x02' + b),
    st.lists(parts, max_size=4, unique=True).map(zipped),
    st.sampled_from([pickle.dumps([1]), pickle.dumps({'state_dict': {}}, 2), WHOLE[100:] + b'x']),
)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    def check(value: tuple[str, bytes]) -> None:
        name, content = value
        (tmp_path / 'a.pth').write_bytes(content)
        refused(lambda: READERS[name](tmp_path / 'a.pth'), 'a.pth', kind=CheckpointError)

    run_cases(st.tuples(reader, no_checkpoints), check, 40)


class Command:
    """Makes a folder when it is unpickled, by one of the ways to run code."""

    def __init__(self, way: str, target: Path) -> None:
        self.way, self.target = way, str(target)

    def __reduce__(self) -> tuple:
        return {
            'function': (os.mkdir, (self.target,)),
            'eval': (eval, (f'__import__("os").mkdir({self.target!r})',)),
            'method': (getattr(Path(self.target), 'mkdir'), ()),  # noqa: B009
        }[self.way]


def test_code_in_a_pickle_does_not_run(tmp_path: Path) -> None:
    holders: dict[str, Callable[[object], object]] = {
        'itself': lambda command: command,
        'beside': lambda command: {'state_dict': in_backbone(WEIGHTS), 'meta': command},
        'among': lambda command: {'state_dict': {**in_backbone(WEIGHTS), 'x': command}},
        'a key': lambda command: {'state_dict': in_backbone(WEIGHTS), 'optimizer': [{1: command}]},
    }

    def check(value: tuple) -> None:
        name, way, holder, zipped = value
        content = holders[holder](Command(way, tmp_path / 'ran'))
        data = saved(content, _use_new_zipfile_serialization=zipped)
        (tmp_path / 'a.pth').write_bytes(data)
        refused(lambda: READERS[name](tmp_path / 'a.pth'), 'could run code', kind=CheckpointError)
        assert not (tmp_path / 'ran').exists()

    values = st.tuples(
        reader,
        st.sampled_from(['function', 'eval', 'method']),
        st.sampled_from(sorted(holders)),
        st.booleans(),
    )
    run_cases(values, check, 20)


leaves = st.none() | st.integers() | st.text(max_size=3) | st.just([0.5])
nests = st.recursive(
    leaves,
    lambda inner: st.dictionaries(
        st.sampled_from(['state_dict', 'model', 'model_ema', 'meta', 'a.weight']) | st.integers(),
        inner,
        max_size=3,
    ),
)


def test_nests_without_weights(tmp_path: Path) -> None:
    def check(value: tuple[str, object]) -> None:
        name, content = value
        (tmp_path / 'a.pth').write_bytes(saved(content))
        refused(lambda: READERS[name](tmp_path / 'a.pth'), 'no weights', kind=CheckpointError)

    run_cases(st.tuples(reader, nests), check, 25)
    deeper = {'state_dict': {'model': in_backbone(WEIGHTS)}}
    check(('load', deeper))


def test_weights_are_taken_out_of_odd_company(tmp_path: Path) -> None:
    def check(value: tuple) -> None:
        name, company = value
        (tmp_path / 'a.pth').write_bytes(saved({**company, 'state_dict': in_backbone(WEIGHTS)}))
        READERS[name](tmp_path / 'a.pth')

    company = st.dictionaries(st.sampled_from(['meta', 'model', 'x']) | st.integers(), nests)
    run_cases(st.tuples(reader, company), check, 15)


CHANGES: dict[str, Callable[[Tensor], object]] = {
    'other shape': lambda x: torch.zeros(*x.shape, 2),
    'no numbers': lambda x: torch.zeros(0),
    'integers': lambda x: torch.ones(x.shape, dtype=torch.int8),
}


def test_single_tensors_that_do_not_fit_are_reported_and_left_out(tmp_path: Path) -> None:
    def check(changes: dict[str, str]) -> None:
        content = {n: CHANGES[changes[n]](x) if n in changes else x for n, x in WEIGHTS.items()}
        (tmp_path / 'a.pth').write_bytes(saved(content))
        model = build(1)
        before = {n: x.clone() for n, x in model.state_dict().items()}
        report = load_pretrained(model, tmp_path / 'a.pth')
        assert {line.partition(':')[0] for line in report.mismatched} == set(changes)
        assert_equal(
            model.state_dict(), {n: (before if n in changes else WEIGHTS)[n] for n in before}
        )

    names = st.sampled_from(sorted(WEIGHTS))
    changes = st.dictionaries(names, st.sampled_from(sorted(CHANGES)), min_size=1, max_size=9)
    run_cases(changes, check, 15)


def test_a_position_embedding_that_is_none_is_reported(tmp_path: Path) -> None:
    def check(embedding: Tensor) -> None:
        (tmp_path / 'a.pth').write_bytes(saved({**WEIGHTS, 'pos_embed': embedding}))
        model = build(1, pos_embed=True, img_size=64)
        assert 'pos_embed' in str(load_pretrained(model, tmp_path / 'a.pth').mismatched)

    shapes = st.sampled_from([(), (16,), (16, 32), (1, 15, 32), (1, 0, 32), (1, 9, 31), (2, 9, 32)])
    dtypes = st.sampled_from([torch.float32, torch.int64])
    run_cases(st.builds(torch.zeros, shapes, dtype=dtypes), check, 10)


def test_wrong_prefixes_name_the_right_one(tmp_path: Path) -> None:
    def check(prefix: str) -> None:
        content = {f'{prefix}.{name}': x for name, x in WEIGHTS.items()}
        (tmp_path / 'a.pth').write_bytes(saved(content))
        refused(
            lambda: load_pretrained(build(1), tmp_path / 'a.pth', prefix='wrong.'),
            f"write prefix='{prefix}.'",
            kind=CheckpointMismatchError,
        )
        model = build(1)
        load_pretrained(model, tmp_path / 'a.pth', prefix=prefix)
        assert_equal(model.state_dict(), WEIGHTS)

    run_cases(st.from_regex(r'[a-z]{1,6}(\.[a-z]{1,6}){0,2}', fullmatch=True), check, 10)


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    def check(value: tuple) -> None:
        width, heads = value
        arch = dict(embed_dims=8 * width, num_layers=3, num_heads=heads, feedforward_channels=24)
        other = build(0, arch=arch)
        (tmp_path / 'a.pth').write_bytes(saved(other.state_dict()))
        refused(
            lambda: load_pretrained(build(1), tmp_path / 'a.pth'),
            'of this architecture',
            kind=CheckpointMismatchError,
        )

    widths = st.sampled_from([1, 2, 3, 5, 6, 7, 9])
    run_cases(st.tuples(widths, st.sampled_from([1, 2, 4])), check, 6)


def test_wrong_arguments(tmp_path: Path) -> None:
    (tmp_path / 'a.pth').write_bytes(WHOLE)
    no_path = not_ints.filter(lambda v: not isinstance(v, str))
    run_cases(
        no_path,
        lambda v: refused(lambda: load_pretrained(SOURCE, v), repr(v), 'path', kind=TypeError),
        5,
    )
    run_cases(
        no_path.filter(lambda v: v is not None),
        lambda v: refused(
            lambda: load_pretrained(SOURCE, tmp_path / 'a.pth', prefix=v), 'prefix', kind=TypeError
        ),
        5,
    )
    refused(lambda: load_pretrained(SOURCE, tmp_path), 'no checkpoint', kind=CheckpointError)
    with pytest.raises(UsageError, match=r"nothing is under the prefix 'neck'.*backbone"):
        publish_checkpoint(tmp_path / 'a.pth', tmp_path / 'b.pth', 'neck')


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are checked as files are, and a missing one is a clear error."""
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path / 'cache'))
    damaged = bytearray(WHOLE)
    damaged[len(WHOLE) // 2] ^= 1
    (tmp_path / 'good.pth').write_bytes(WHOLE)
    (tmp_path / 'bad.pth').write_bytes(damaged)
    server = ThreadingHTTPServer(
        ('127.0.0.1', 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}'
    model = build(1)
    load_pretrained(model, f'{url}/good.pth', prefix='backbone')
    assert_equal(model.state_dict(), WEIGHTS)
    refused(lambda: load_pretrained(model, f'{url}/bad.pth'), 'checksum', kind=CheckpointError)
    refused(lambda: load_pretrained(model, f'{url}/none.pth'), '404', kind=CheckpointError)
    server.shutdown()
    server.server_close()
    refused(lambda: load_pretrained(model, f'{url}/x.pth'), 'downloaded', kind=CheckpointError)
    assert sorted(p.name for p in (tmp_path / 'cache/checkpoints').glob('*/*')) == [
        'bad.pth',
        'good.pth',
    ]


def test_public_weights_that_are_not_whole(tmp_path: Path) -> None:
    """A conversion of changed weights is refused, or marked as incomplete."""
    public = to_public(WEIGHTS).weights

    def check(value: tuple) -> None:
        name, change = value
        changed = dict(public)
        tensor = changed.pop(name)
        if change in CHANGES:
            changed[name] = CHANGES[change](tensor)
        elif change == 'another number':
            changed[name.replace('blocks.1', 'blocks.99999999')] = tensor
        elif change == 'a scalar':
            changed[name] = torch.tensor(1.0)
        try:
            conversion = to_ours(changed)
        except CheckpointError:
            return
        if change == 'integers' or (change == 'another number' and 'blocks.1' not in name):
            return
        assert not conversion.complete
        assert name in conversion.missing

    names = [n for n in public if n.startswith(('blocks.0', 'blocks.1', 'patch', 'norm'))]
    changes = ['left out', 'another number', 'a scalar', *CHANGES]
    run_cases(st.tuples(st.sampled_from(sorted(names)), st.sampled_from(changes)), check, 40)
