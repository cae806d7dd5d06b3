"""metafile.yml and model-index.yml: complete, valid, honest, and what the documents show."""

import re
from pathlib import Path

import modelindex
import pytest
from mmengine.infer import BaseInferencer

from mmvttt.analysis.flops import count_cost
from mmvttt.analysis.model_zoo import fill, load_models, table, update
from mmvttt.analysis.models import DenseForward, find_model
from mmvttt.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MODELS = load_models(ROOT / 'configs' / 'metafile.yml')
NAMES = [model['Name'] for model in MODELS]
# Worked examples: no paper has them.
EXAMPLES = re.compile('demo|pennfudan|camvid')
TO_NAME = {
    'Top 1 Accuracy': 'Top-1',
    'box AP': 'box AP',
    'mask AP': 'mask AP',
    'mIoU': 'mIoU',
}


def metrics(model: dict) -> dict[str, float]:
    return {k: v for result in model['Results'] for k, v in result['Metrics'].items()}


def test_the_index_is_valid() -> None:
    index = modelindex.load(str(ROOT / 'model-index.yml'))
    index.build_models_with_collections()
    assert [model.name for model in index.models] == NAMES
    assert not index.check_errors
    for model in index.models:
        assert not model.check(silent=True)


def test_every_config_but_the_examples_is_listed_once() -> None:
    files = {path.stem for path in (ROOT / 'configs').glob('*.py')}
    assert {name for name in files if not EXAMPLES.search(name)} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    for model in MODELS:
        assert model['Config'] == f'configs/{model["Name"]}.py'
        # mmengine's inferencers read the key, whatever is in it.
        assert model['Weights'] is None


@pytest.mark.parametrize('model', MODELS, ids=NAMES)
def test_results_are_the_papers_and_say_so(model: dict) -> None:
    if not metrics(model):
        assert model['Metadata']['Results From'] == 'no training yet'
        head = (ROOT / model['Config']).read_text().split('_base_')[0]
        assert 'No paper has it.' in head or 'there is no result' in head
        return
    assert model['Metadata']['Results From'].startswith('the paper (')
    head = (ROOT / model['Config']).read_text().split('_base_')[0]
    written = re.search(r'# The .*result.*: (.*)\.', head)[1]
    found = {TO_NAME[k]: v for k, v in metrics(model).items()}
    for name, value in re.findall(r'([\w -]+?) ([\d.]+)(?:, |$)', written):
        assert found[name] == float(value)
    source = re.search(r'Tab\. \d+', head)[0]
    assert source in model['Metadata']['Results From']


@pytest.mark.parametrize(
    'name',
    ['vittt_t_in1k', 'vit3_s_in1k', 'hvit3_t_in1k', 't5plus_t_in1k_30e', 'upernet_vittt_t_160k'],
)
def test_counts_are_those_of_the_tool(name: str) -> None:
    meta = MODELS[NAMES.index(name)]['Metadata']
    found = find_model(name, weightless=True)
    # As text: `mim search` cannot print a list of numbers.
    assert '{}x{}'.format(*found.size) == meta['Input Size']
    cost = count_cost(DenseForward(found.model), found.size)
    assert (cost.total_params, cost.total_macs) == (meta['Parameters'], meta['FLOPs'])


def test_mmengine_finds_the_configs_by_name() -> None:
    assert set(BaseInferencer.list_models('mmvttt')) == set(NAMES)


def test_documents_are_up_to_date() -> None:
    documents = [ROOT / 'docs' / 'model_zoo.md', ROOT / 'README.md']
    marked = [path for path in documents if '<!-- model-zoo:' in path.read_text()]
    assert documents[0] in marked
    stale = [path.name for path in marked if update(path, check=True)]
    assert not stale, f'run: python tools/make_model_zoo.py {" ".join(stale)}'


def test_tables_stand_between_their_markers(tmp_path: Path) -> None:
    text = 'a\n<!-- model-zoo:segmentation -->\nold\n<!-- /model-zoo -->\nb\n'
    new = fill(text, MODELS)
    assert new.startswith('a\n<!-- model-zoo:segmentation -->\n| config |')
    assert new.endswith(' |\n<!-- /model-zoo -->\nb\n')
    assert 'old' not in new
    row = '[upernet_vittt_s_160k](configs/upernet_vittt_s_160k.py) | 512×512 | 61.9 M | 263.9 G |'
    assert f'| {row} 48.4 | Vision-TTT, Tab. 2 |' in new
    assert "mIoU (paper's)" in new
    assert fill(new, MODELS) == new
    page = tmp_path / 'page.md'
    page.write_text(text)
    assert update(page, check=True)
    assert page.read_text() == text
    assert update(page)
    assert not update(page)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'tracking'.*classification, detection"):
        table(MODELS, 'tracking')
    with pytest.raises(UsageError, match='no document'):
        update(tmp_path / 'nowhere.md')
    page = tmp_path / 'page.md'
    page.write_text('nothing to fill')
    with pytest.raises(UsageError, match='model-zoo:KIND'):
        update(page)
