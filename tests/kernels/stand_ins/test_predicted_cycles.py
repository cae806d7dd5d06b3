"""The cycle model on loops with a known answer, and the report that compares its predictions.

How a kernel of ours changed is a report: `python tools/dev/kernel_benchmarks/predict.py` prints the
difference to the committed table. A prediction fails no test.
"""

import math
import types

import predict
import pytest
from cycles import BARRIER, GLOBAL, TENSOR_CORE_BUSY, Instruction, Loop, cycles, innermost

from ttt_kernels.ttt_linear.kernel import output_apart


def instruction(name, stall=1, sets=7, waits=0, registers=()):
    return Instruction(name, '', name, False, stall, sets, 7, waits, registers)


def loop(*body, warps=4):
    return Loop(body, registers=64, warps=warps, resident=4)


def test_one_warp_a_scheduler_is_bound_by_its_stalls():
    chain = loop(*[instruction('FADD', stall=4)] * 20)
    assert cycles(chain, 1) == pytest.approx(80)
    # Others fill the gaps, until every cycle issues.
    assert cycles(chain, 4) == pytest.approx(80, rel=0.05)
    assert cycles(chain, 8) == pytest.approx(160, rel=0.05)


def test_tensor_cores_are_shared_by_the_warps_of_a_scheduler():
    products = loop(*[instruction('HMMA')] * 20)
    for programs in (1, 2):
        expected = 20 * TENSOR_CORE_BUSY * programs
        assert cycles(products, programs) == pytest.approx(expected, rel=0.1)


def test_products_of_a_warp_group_are_bound_by_tensor_cores_and_fetch_their_operands():
    def products(first, *others):
        text = f'R24, {first}, R24'
        product = instruction('HGMMA')._replace(modifiers='.64x64x16.F32.BF16', text=text)
        return loop(*[product, *others] * 20)

    shared, registers = 'gdesc[UR8]', 'R56, gdesc[UR8]'
    # 64·64·16 at 2048 multiply-accumulates a cycle.
    for first in (shared, registers):
        assert cycles(products(first), 1) == pytest.approx(20 * 32, rel=0.1)
    # Cycles of the pipe to shared memory, while others are busy: 32 or 16.
    fetches = [instruction('LDS')._replace(modifiers='.128')] * 6
    more = cycles(products(shared, *fetches), 1) - cycles(products(registers, *fetches), 1)
    assert more == pytest.approx(20 * 16, rel=0.2)


def test_a_load_is_waited_for_and_hidden_by_others():
    load = loop(instruction('LDG', sets=0), instruction('FADD', waits=1))
    one = cycles(load, 1)
    assert GLOBAL < one < GLOBAL + 40
    # Twice the work in the same time.
    assert cycles(load, 2) == pytest.approx(one, rel=0.1)


def test_a_barrier_waits_for_the_last_warp():
    met = loop(instruction('FADD', stall=4), instruction('BAR'))
    assert cycles(met, 1) >= BARRIER


def test_the_loop_over_tokens_is_found_inside_the_one_over_segments():
    def back(label):
        return instruction('BRA')._replace(text=f'@P0 BRA `({label})')

    work = instruction('FADD')
    # The inner loop has two ways back.
    body = [*[work] * 70, back('.L_x_2'), *[work] * 9, back('.L_x_2'), *[work] * 50, back('.L_x_1')]
    labels = {'.L_x_1': 10, '.L_x_2': 40}
    assert innermost(body, labels) == (40, 81)
    assert innermost([work] * 50, labels) is None


def test_every_kernel_of_a_case_gets_its_figures():
    found = dict(predict.predicted('ttt_glu d 64', 90))
    kernels = {name.split(', ')[1] for name in found}
    assert kernels >= {'step', 'read', 'read_backward', 'step_backward'}
    for figures in found.values():
        assert figures['instructions'] > 0
        # With more programs on it a multiprocessor needs no less time.
        assert figures['cycles'] == sorted(figures['cycles'])


def test_the_table_has_no_case_that_is_gone():
    known = {(case, f'sm_{arch}') for case, arch in predict.VARIANTS}
    for table in predict.tables().values():
        assert {tuple(name.rsplit(', ', 2)[::2]) for name in table} <= known


def test_a_scan_that_one_program_walks_has_all_of_its_chunks():
    def launch(name):
        kernel = types.SimpleNamespace(__name__=name)
        return predict.Launch(kernel, None, (1, 1, 1), {'T': 1600, 'segment': 32})

    walks = ('forward_scan', 'backward_chain')
    assert [predict.iterations(launch(name)) for name in walks] == [100, 100]
    segments = ('forward_output', 'backward_query', 'backward_key')
    assert [predict.iterations(launch(name)) for name in segments] == [32, 32, 32]


def forward_cycles(dim: int, scans: int, tokens: int, processors: int) -> dict[bool, int]:
    """Predicted cycles of ttt_linear's forward pass, with its output apart and not."""
    table = predict.tables()['3.8.0']

    def kernel(case: str, name: str, programs: int, iterations: int) -> int:
        cycles = table[f'ttt_linear {case}, {name}, sm_90']['cycles']
        together = min(len(cycles), math.ceil(programs / processors))
        rounds = math.ceil(programs / (processors * together))
        return rounds * iterations * cycles[together - 1]

    chunks = math.ceil(tokens / 16)
    parts = scans * math.ceil(chunks / 32)
    # Up to two scans a multiprocessor have all of its registers.
    few = dim == 64 and scans <= 2 * processors
    many = dim == 64 and not few
    apart, whole = f'in segments d {dim}', f'whole d {dim}{", few scans" * few}'
    chain = kernel(f'{apart}{", many scans" * many}', 'forward_scan', scans, chunks)
    output = kernel(apart, 'forward_output', parts, min(chunks, 32))
    whole = kernel(whole, 'forward_scan', scans, chunks)
    return {True: chain + output, False: whole}


@pytest.mark.parametrize('dim', [64, 128])
@pytest.mark.parametrize('tokens', [196, 512, 576, 1024, 4200, 6400])
@pytest.mark.parametrize('scans', [6, 24, 96, 132, 192, 384, 1536])
def test_output_apart_takes_the_path_that_is_predicted_to_be_faster(dim, tokens, scans):
    predicted = forward_cycles(dim, scans, tokens, 132)
    apart = output_apart(dim, scans / 132, tokens)
    # Predictions that are closer do not tell the two apart.
    assert predicted[apart] < 1.1 * predicted[not apart]


def test_the_report_has_a_line_for_every_difference(monkeypatch, capsys):
    rows = {'a, k, sm_90': [100, 210], 'b, k, sm_90': [100], 'c, k, sm_90': [7], 'd, k, sm_90': [9]}
    table = {'a, k, sm_90': [100, 200], 'b, k, sm_90': [100], 'd, k, sm_90': [10]}
    lines = predict.compare(
        *({name: {'cycles': c} for name, c in found.items()} for found in (rows, table))
    )
    assert lines == [
        'a, k, sm_90: [100, 200] → [100, 210] cycles, +5.0 %',
        'c, k, sm_90: not in the table, [7] cycles',
        'd, k, sm_90: [10] → [9] cycles, -10.0 %',
    ]


def test_the_report_ends_with_success_whatever_it_finds(monkeypatch, capsys):
    case = next(iter(predict.CASES))
    name = f'{case}, kernel, sm_90'
    found = {'registers': 1, 'cycles': [500]}
    monkeypatch.setattr(predict, 'predicted', lambda *_: iter([(name, found)]))
    table = {predict.triton.__version__: {name: {'cycles': [100]}}}
    monkeypatch.setattr(predict, 'tables', lambda: table)
    monkeypatch.setattr(predict.sys, 'argv', ['predict.py', '--case', case])
    assert predict.main() == 0
    assert f'{name}: [100] → [500] cycles, +400.0 %' in capsys.readouterr().out
